package e2e

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/test/netns"
)

// object is a Service with all possible fields, and its EndpointSlices.
type object struct {
	name      string
	namespace string             // "" for default
	kind      corev1.ServiceType // "" for LoadBalancer
	vips      []string           // cluster IPs, IPv4 first
	port      uint16
	nodePort  uint16 // 0 for none
	target    uint16 // port of the endpoints
	protocol  corev1.Protocol
	portName  string // "" for http
	// twin has the same port number and target over TCP too, as DNS has.
	twin bool

	externalIPs, lbIPs []string
	lbProxied          []string // load balancer IPs of ipMode Proxy
	ranges             []string // loadBalancerSourceRanges
	internal, external string   // "Local", or "" for Cluster
	affinity           bool
	endpoints          []endpoint
}

// endpoint is a pod of a Service.
type endpoint struct {
	host  *netns.Host
	node  string
	state endpointState
}

type endpointState int

const (
	ready       endpointState = iota
	terminating               // and serving
	unready                   // neither ready nor serving
)

// yaml returns the manifests.
func (o *object) yaml() string {
	port := corev1.ServicePort{
		Name: o.portText(), Port: int32(o.port), Protocol: o.proto(),
		TargetPort: intstr.FromInt32(int32(o.target)), NodePort: int32(o.nodePort),
	}
	ports := []corev1.ServicePort{port}
	if o.twin {
		port.Name, port.Protocol = twinName, corev1.ProtocolTCP
		ports = append(ports, port)
	}
	s := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Name: o.name, Namespace: cmp.Or(o.namespace, "default")},
		Spec: corev1.ServiceSpec{
			Type: o.kind, Ports: ports, ExternalIPs: o.externalIPs,
			LoadBalancerSourceRanges: o.ranges,
		},
	}
	if s.Spec.Type == "" {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "elsewhere.example"}
		return text(s)
	}
	s.Spec.ClusterIP, s.Spec.ClusterIPs = o.vips[0], o.vips
	for _, vip := range o.vips {
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, corev1.IPFamily(family(netip.MustParseAddr(vip))))
	}
	if len(o.vips) > 1 {
		s.Spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyRequireDualStack)
	}
	if o.internal == "Local" {
		s.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	}
	if o.external == "Local" {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
			s.Spec.HealthCheckNodePort = int32(o.nodePort) + 2000
		}
	}
	if o.affinity {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	for mode, ips := range map[corev1.LoadBalancerIPMode][]string{corev1.LoadBalancerIPModeVIP: o.lbIPs, corev1.LoadBalancerIPModeProxy: o.lbProxied} {
		for _, ip := range ips {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip, IPMode: ptr.To(mode)})
		}
	}
	slices.SortFunc(s.Status.LoadBalancer.Ingress, func(a, b corev1.LoadBalancerIngress) int { return strings.Compare(a.IP, b.IP) })
	return text(s, o.slice(discoveryv1.AddressTypeIPv4), o.slice(discoveryv1.AddressTypeIPv6))
}

// twinName is the name of a twin's port.
const twinName = "tcp"

func (o *object) proto() corev1.Protocol {
	if o.protocol == "" {
		return corev1.ProtocolTCP
	}
	return o.protocol
}

func (o *object) portText() string {
	if o.portName == "" {
		return "http"
	}
	return o.portName
}

func (o *object) slice(f discoveryv1.AddressType) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Name: o.name + "-" + strings.ToLower(string(f)), Namespace: cmp.Or(o.namespace, "default"),
			Labels: map[string]string{discoveryv1.LabelServiceName: o.name},
		},
		AddressType: f,
		Endpoints:   []discoveryv1.Endpoint{},
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To(o.portText()), Port: ptr.To(int32(o.target)), Protocol: ptr.To(o.proto())}},
	}
	if o.twin {
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To(twinName), Port: ptr.To(int32(o.target)), Protocol: ptr.To(corev1.ProtocolTCP)})
	}
	for _, e := range o.endpoints {
		addr := e.host.IPv4
		if f == discoveryv1.AddressTypeIPv6 {
			addr = e.host.IPv6
		}
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{addr.String()}, NodeName: ptr.To(e.node),
			Conditions: discoveryv1.EndpointConditions{
				Ready: ptr.To(e.state == ready), Serving: ptr.To(e.state != unready), Terminating: ptr.To(e.state == terminating),
			},
		})
	}
	return s
}

// nodeYAML returns a Node object.
func nodeYAML(name string, addrs []netip.Addr, pods []netip.Prefix) string {
	n := &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelTopologyZone: "zone-" + name}},
	}
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	for _, p := range pods {
		n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, p.String())
	}
	n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
	return text(n)
}

// text returns objects as one YAML file.
func text(objects ...runtime.Object) string {
	var b strings.Builder
	for i, o := range objects {
		y, err := yaml.Marshal(o)
		if err != nil {
			return fmt.Sprintf("# %v\n", err) // all our objects can be written
		}
		if i > 0 {
			b.WriteString("---\n")
		}
		b.Write(y)
	}
	return b.String()
}
