package scale

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Size is a cluster's number of services, and that of the endpoints of each.
type Size struct{ Services, Each int }

// cluster has services of one TCP port with several endpoints each. The endpoints do not
// answer, except the only endpoint of the last service, which is live.
type cluster struct {
	Size
	live     netip.Addr // an address of the server
	nodeAddr netip.Addr
}

// endpoints is the total number.
func (c *cluster) endpoints() int { return (c.Services-1)*c.Each + 1 }

// serviceRange holds the cluster IPs.
var serviceRange = netip.MustParsePrefix("10.96.0.0/16")

// vip returns a service's cluster IP; those from c.Services on are free.
func vip(i int) netip.Addr {
	a := serviceRange.Addr().As4()
	i += 10
	a[2], a[3] = byte(i>>8), byte(i)
	return netip.AddrFrom4(a)
}

const (
	namespace   = "bench"
	servicePort = 80
	// serverPort is the live endpoint's port.
	serverPort = 8080
)

func serviceName(i int) string { return fmt.Sprintf("service-%05d", i) }

func (c *cluster) service(i int) *corev1.Service {
	ip := vip(i).String()
	return &corev1.Service{
		TypeMeta:   typeMeta("v1", "Service"),
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: serviceName(i), ResourceVersion: "1", Labels: map[string]string{"app": serviceName(i)}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{Name: "web", Protocol: corev1.ProtocolTCP, Port: servicePort, TargetPort: intstr.FromInt32(serverPort)}},
		},
	}
}

// slice returns a service's EndpointSlice.
func (c *cluster) slice(i int) *discoveryv1.EndpointSlice {
	if i >= c.Services-1 {
		return c.sliceOf(i, c.live)
	}
	return c.sliceOf(i, c.addresses(i)...)
}

// rolled returns a service's EndpointSlice after one of its pods was replaced; rounds take
// turns between two pods.
func (c *cluster) rolled(i, round int) *discoveryv1.EndpointSlice {
	addrs := c.addresses(i)
	if round%2 == 0 {
		a := addrs[0].As4()
		a[1] += 64
		addrs[0] = netip.AddrFrom4(a)
	}
	return c.sliceOf(i, addrs...)
}

// addresses are those of a service's endpoints that do not answer.
func (c *cluster) addresses(i int) []netip.Addr {
	addrs := make([]netip.Addr, c.Each)
	for k := range addrs {
		n := i*len(addrs) + k
		addrs[k] = netip.AddrFrom4([4]byte{10, 128 + byte(n>>16), byte(n >> 8), byte(n)})
	}
	return addrs
}

func (c *cluster) sliceOf(i int, addrs ...netip.Addr) *discoveryv1.EndpointSlice {
	ready, protocol, port, name := true, corev1.ProtocolTCP, int32(serverPort), "web"
	s := &discoveryv1.EndpointSlice{
		TypeMeta: typeMeta("discovery.k8s.io/v1", "EndpointSlice"),
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: serviceName(i) + "-abcde", ResourceVersion: "1",
			Labels: map[string]string{discoveryv1.LabelServiceName: serviceName(i), discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
	}
	for k, a := range addrs {
		node := fmt.Sprintf("node-%d", (i+k)%100)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{a.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &ready},
			NodeName:   &node,
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: namespace, Name: fmt.Sprintf("%s-5d89bf7c7c-%05d", serviceName(i), k)},
		})
	}
	return s
}

func (c *cluster) node() *corev1.Node {
	return &corev1.Node{
		TypeMeta:   typeMeta("v1", "Node"),
		ObjectMeta: metav1.ObjectMeta{Name: "node", ResourceVersion: "1"},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: c.nodeAddr.String()}}},
	}
}

func (c *cluster) cidr() *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{
		TypeMeta:   typeMeta("networking.k8s.io/v1", "ServiceCIDR"),
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes", ResourceVersion: "1"},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{serviceRange.String()}},
	}
}

// perFile is the number of services in a manifest.
const perFile = 100

// write writes the cluster into a directory of manifests, in JSON, a hundred
// services in a file; the last service and its slice have files of their own.
func (c *cluster) write(dir string) error {
	if err := writeFile(dir, "cluster.json", c.node(), c.cidr()); err != nil {
		return err
	}
	for from := 0; from < c.Services-1; from += perFile {
		var objects []runtime.Object
		for i := from; i < min(from+perFile, c.Services-1); i++ {
			objects = append(objects, c.service(i), c.slice(i))
		}
		if err := writeFile(dir, fmt.Sprintf("services-%05d.json", from), objects...); err != nil {
			return err
		}
	}
	last := c.Services - 1
	if err := writeFile(dir, "last.json", c.service(last)); err != nil {
		return err
	}
	return writeFile(dir, "last-slice.json", c.slice(last))
}

// writeFile creates or replaces a manifest atomically.
func writeFile(dir, name string, objects ...runtime.Object) error {
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": objects})
	if err != nil {
		return err
	}
	temporary := filepath.Join(dir, "."+name)
	if err := os.WriteFile(temporary, text, 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, filepath.Join(dir, name))
}
