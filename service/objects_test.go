package service

import (
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// newService makes a Service "default/name" with one TCP port 80 without a
// name, as people write them by hand; edits change it.
func newService(name, clusterIP string, edits ...func(*corev1.Service)) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       corev1.ServiceSpec{ClusterIP: clusterIP, Ports: []corev1.ServicePort{{Port: 80}}},
	}
	for _, e := range edits {
		e(svc)
	}
	return svc
}

func servicePort(name string, proto corev1.Protocol, port, nodePort int32) corev1.ServicePort {
	return corev1.ServicePort{Name: name, Protocol: proto, Port: port, NodePort: nodePort}
}

func withPorts(ports ...corev1.ServicePort) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.Ports = ports }
}

func withClusterIPs(ips ...string) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.ClusterIPs = ips }
}

func withFamilies(families ...corev1.IPFamily) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.IPFamilies = families }
}

func withExternalIPs(ips ...string) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.ExternalIPs = ips }
}

func withIngress(ips ...string) func(*corev1.Service) {
	return func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		for _, ip := range ips {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
		}
	}
}

func withCreated(seconds int64) func(*corev1.Service) {
	return func(s *corev1.Service) { s.CreationTimestamp = metav1.NewTime(time.Unix(seconds, 0)) }
}

func withLabel(key, value string) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Labels = map[string]string{key: value} }
}

// newSlice makes an EndpointSlice "default/name" of a service, with one TCP
// port without a name.
func newSlice(name, service string, port int32, edits ...func(*discoveryv1.EndpointSlice)) *discoveryv1.EndpointSlice {
	es := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name,
			Labels: map[string]string{discoveryv1.LabelServiceName: service},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Port: &port}},
	}
	for _, e := range edits {
		e(es)
	}
	return es
}

func withAddresses(addrs ...string) func(*discoveryv1.EndpointSlice) {
	return func(es *discoveryv1.EndpointSlice) {
		for _, a := range addrs {
			es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
		}
	}
}

func withEndpoint(addr string, edit func(*discoveryv1.Endpoint)) func(*discoveryv1.EndpointSlice) {
	return func(es *discoveryv1.EndpointSlice) {
		e := discoveryv1.Endpoint{Addresses: []string{addr}}
		edit(&e)
		es.Endpoints = append(es.Endpoints, e)
	}
}

func withType(t discoveryv1.AddressType) func(*discoveryv1.EndpointSlice) {
	return func(es *discoveryv1.EndpointSlice) { es.AddressType = t }
}

func slicePorts(ports ...discoveryv1.EndpointPort) func(*discoveryv1.EndpointSlice) {
	return func(es *discoveryv1.EndpointSlice) { es.Ports = ports }
}

func endpointPort(name string, proto corev1.Protocol, port int32) discoveryv1.EndpointPort {
	return discoveryv1.EndpointPort{Name: &name, Protocol: &proto, Port: &port}
}

func newNode(name string, addrs ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

func newServiceCIDR(name string, cidrs ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs},
	}
}

func services(list ...*corev1.Service) Change { return Change{Services: list} }

func endpointSlices(list ...*discoveryv1.EndpointSlice) Change {
	return Change{EndpointSlices: list}
}

func deleted(kind ObjectKind, name string) Change {
	key := ObjectKey{Kind: kind, Name: Name{Namespace: "default", Name: name}}
	if kind == KindNode || kind == KindServiceCIDR {
		key.Namespace = ""
	}
	return Change{Deleted: []ObjectKey{key}}
}

func ptr[T any](v T) *T { return &v }

func dest(addrPort string, p Protocol) Destination {
	ap := netip.MustParseAddrPort(addrPort)
	return Destination{Addr: ap.Addr(), Port: ap.Port(), Protocol: p}
}

// find returns the service port that a destination belongs to by its address, or
// nil.
func find(s *Snapshot, d Destination) (*Port, AddressKind) {
	for _, p := range s.Ports {
		if p == nil {
			continue
		}
		for at, kind := range p.Destinations {
			if at == d {
				return p, kind
			}
		}
	}
	return nil, 0
}

// found returns what find does as text: "ClusterIP default/web", or "".
func found(s *Snapshot, addrPort string, p Protocol) string {
	port, kind := find(s, dest(addrPort, p))
	if port == nil {
		return ""
	}
	return kind.String() + " " + port.Name.String()
}

// only returns the one port of a snapshot.
func only(t *testing.T, s *Snapshot) *Port {
	t.Helper()
	var found *Port
	for _, p := range s.Ports {
		if p == nil {
			continue
		}
		if found != nil {
			t.Fatalf("more than one port: %s and %s", found.Name, p.Name)
		}
		found = p
	}
	if found == nil {
		t.Fatal("no port")
	}
	return found
}

func addrs(list []Endpoint) []string {
	out := []string{}
	for _, e := range list {
		out = append(out, e.Addr.String())
	}
	return out
}

func problemTexts(s *Snapshot) []string {
	var out []string
	for _, p := range s.Problems {
		out = append(out, p.Object+": "+p.Text)
	}
	return out
}
