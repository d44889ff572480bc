package slowpolicy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// ownNode is the node from whose view random clusters are judged.
const ownNode = "n0"

func pick[T any](r *rand.Rand, list ...T) T { return list[r.IntN(len(list))] }

// chance is true once in n times.
func chance(r *rand.Rand, n int) bool { return r.IntN(n) == 0 }

// Random creates a small cluster with everything that the rules mention.
func Random(r *rand.Rand) *Cluster {
	c := &Cluster{NodeName: ownNode, MasqueradeAll: chance(r, 6)}
	c.DetectLocal = pick(r, "ClusterCIDR", "ClusterCIDR", "NodeCIDR", "Interface")
	for range r.IntN(8) { // also nested and repeated ranges
		p := pick(r, "10.244.0.1/32", "10.244.0.4/32", "10.244.0.5/32", "10.244.0.4/31", "10.244.0.0/24", "10.245.0.0/16", "172.16.0.1/32", "fd44::1/128", "fd44::4/127", "fd44:1::/32")
		c.PodRanges = append(c.PodRanges, netip.MustParsePrefix(p))
	}
	if chance(r, 8) {
		c.ProxyName = "ours"
	}
	if !chance(r, 4) {
		c.ClusterCIDRs = append(c.ClusterCIDRs, netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.245.0.0/16"))
	}
	if chance(r, 2) {
		c.ClusterCIDRs = append(c.ClusterCIDRs, netip.MustParsePrefix("fd44::/64"))
	}
	if chance(r, 2) {
		c.ServiceCIDRs = append(c.ServiceCIDRs, netip.MustParsePrefix("10.96.0.0/24"), netip.MustParsePrefix("fd96::/112"))
	}
	if chance(r, 2) {
		c.NodeIPs = append(c.NodeIPs, netip.MustParseAddr("192.168.7.1"), netip.MustParseAddr("fd02::1"))
	}
	c.LocalhostNodePorts = !chance(r, 4)
	if chance(r, 3) { // 10.244.0.1, like a bridge's address, is in the pods' range
		for _, a := range strings.Fields("10.244.0.1 172.16.0.9 127.0.0.1 fd44::1 fe80::1") {
			c.NodeAddresses = append(c.NodeAddresses, netip.MustParseAddr(a))
		}
	}
	for _, v := range []string{"primary", "localhost", "all", "172.16.0.0/12", "192.168.0.0/16", "fd01::/16"} {
		if chance(r, 5) {
			c.NodePortAddresses = append(c.NodePortAddresses, v)
		}
	}
	for i := range 3 {
		if i > 0 || !chance(r, 5) {
			c.Nodes = append(c.Nodes, randomNode(r, i))
		}
	}
	for i := range 5 {
		c.addService(r, i)
	}
	return c
}

func randomNode(r *rand.Rand, i int) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", i), Labels: map[string]string{}}}
	for _, key := range []string{"topology.kubernetes.io/zone", "rack", "row"} {
		if !chance(r, 4) {
			n.Labels[key] = pick(r, "a", "b")
		}
	}
	if i == 0 {
		n.Spec.PodCIDRs = pick(r, nil, []string{"10.244.0.0/24"}, []string{"fd44::/112", "10.244.0.0/24", "10.245.0.0/24"})
		for _, a := range pick(r, nil, []string{"172.16.0.1"}, []string{"172.16.0.1", "fd01::1"}) {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a},
				corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: "203.0.113.200"})
		}
	}
	return n
}

// addService adds a service with its slices. No two services have the same port
// number, so that they may share addresses.
func (c *Cluster) addService(r *rand.Rand, i int) {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: pick(r, "default", "shop"), Name: fmt.Sprintf("s%d", i)}}
	s.Spec.Type = pick(r, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeLoadBalancer)
	four, six := fmt.Sprintf("10.96.0.%d", i+1), fmt.Sprintf("fd96::%d", i+1)
	s.Spec.ClusterIPs = pick(r, []string{four}, []string{six}, []string{four, six}, []string{four, six}, []string{six, four})
	s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	for _, ip := range s.Spec.ClusterIPs {
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, map[bool]corev1.IPFamily{true: corev1.IPv4Protocol, false: corev1.IPv6Protocol}[netip.MustParseAddr(ip).Is4()])
	}
	switch r.IntN(20) {
	case 0:
		s.Spec.Type = corev1.ServiceTypeExternalName // A1.4
	case 1:
		s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "other"} // A1.1
	case 2: // without the label
	default:
		if c.ProxyName != "" {
			s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": c.ProxyName} // A1.2
		}
	}
	s.Spec.InternalTrafficPolicy = pick(r, nil, ptr.To(corev1.ServiceInternalTrafficPolicyCluster), ptr.To(corev1.ServiceInternalTrafficPolicyLocal))
	s.Spec.ExternalTrafficPolicy = pick(r, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal, "")
	s.Spec.HealthCheckNodePort = int32(32000 + i)
	s.Spec.SessionAffinity = pick(r, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
	if chance(r, 4) {
		s.Annotations = map[string]string{"sluice.dev/topology-keys": pick(r, "rack", "rack,*", "row", "row,rack", "*", "topology.kubernetes.io/zone,row")}
	}
	if chance(r, 2) {
		s.Spec.ExternalIPs = pick(r, []string{"192.0.2.1"}, []string{fmt.Sprintf("192.0.2.%d", 10+i), "2001:db8:1::1"}, []string{"172.16.0.1"})
	}
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
		s.Spec.LoadBalancerSourceRanges = pick(r, nil, []string{" 203.0.113.0/24"}, []string{"203.0.113.0/24", "172.16.0.0/24 "}, []string{"2001:db8::/48"}, []string{"0.0.0.0/0", "203.0.113.0/24"}, []string{"203.0.113.0/33"}, []string{"203.0.113.0/24,172.16.0.0/24", "172.16.0.0/24"})
		for _, ip := range pick(r, []string{"192.0.2.1"}, []string{fmt.Sprintf("192.0.2.%d", 20+i), "2001:db8:1::2"}) {
			in := corev1.LoadBalancerIngress{IP: ip, IPMode: pick(r, nil, nil, ptr.To(corev1.LoadBalancerIPModeVIP), ptr.To(corev1.LoadBalancerIPModeProxy))}
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, in)
		}
	}
	for j := range 1 + r.IntN(3) {
		p := corev1.ServicePort{Name: fmt.Sprintf("p%d", j), Port: int32(80 + 10*i + j), Protocol: pick(r, corev1.ProtocolTCP, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)}
		if s.Spec.Type != corev1.ServiceTypeClusterIP {
			p.NodePort = int32(30000 + 10*i + j)
		}
		s.Spec.Ports = append(s.Spec.Ports, p)
	}
	if len(s.Spec.Ports) == 1 {
		s.Spec.Ports[0].Name = ""
	}
	c.Services = append(c.Services, s)
	for k := range r.IntN(6) {
		c.addSlice(r, s, k)
	}
}

func (c *Cluster) addSlice(r *rand.Rand, s *corev1.Service, k int) {
	es := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: s.Namespace, Name: fmt.Sprintf("%s-%d", s.Name, k), Labels: map[string]string{"kubernetes.io/service-name": s.Name}}}
	es.AddressType = pick(r, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6)
	if chance(r, 15) {
		es.Labels["service.kubernetes.io/headless"] = "" // A1.3
	}
	for _, p := range s.Spec.Ports {
		if !chance(r, 8) {
			es.Ports = append(es.Ports, discoveryv1.EndpointPort{Name: ptr.To(p.Name), Protocol: ptr.To(p.Protocol), Port: pick(r, ptr.To(p.Port+8000), ptr.To(p.Port+8000), ptr.To[int32](8080))})
		}
	}
	hinted := r.IntN(3)
	for range 1 + r.IntN(5) {
		format := map[discoveryv1.AddressType]string{discoveryv1.AddressTypeIPv4: "10.244.0.%d", discoveryv1.AddressTypeIPv6: "fd44::%d"}[es.AddressType]
		e := discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf(format, 1+r.IntN(9))}}
		e.NodeName = pick(r, nil, ptr.To(ownNode), ptr.To("n1"), ptr.To("n2"))
		e.Conditions.Ready = pick(r, nil, ptr.To(true), ptr.To(false))
		e.Conditions.Serving = pick(r, nil, ptr.To(true), ptr.To(false))
		e.Conditions.Terminating = pick(r, nil, ptr.To(true), ptr.To(false))
		if hinted > 0 && !chance(r, 8) {
			e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: pick(r, "a", "b")}}}
			if hinted > 1 && !chance(r, 8) {
				e.Hints.ForNodes = []discoveryv1.ForNode{{Name: pick(r, ownNode, "n1")}}
			}
		}
		es.Endpoints = append(es.Endpoints, e)
	}
	c.Slices = append(c.Slices, es)
}

var (
	clients4 = strings.Fields("10.244.0.1 10.244.0.4 10.244.0.5 10.244.9.1 10.245.0.1 172.16.0.1 172.16.0.9 192.168.7.1 127.0.0.1 203.0.113.9 198.51.100.7 192.0.2.1 192.0.2.21 10.96.0.1")
	clients6 = strings.Fields("fd44::1 fd44::5 fd44:1::1 fd01::1 fd02::1 ::1 2001:db8::1 2001:db8:9::1 2001:db8:1::2 fd96::1")
	nodes    = strings.Fields("172.16.0.1 192.168.7.1 127.0.0.1 127.1.2.3 fd01::1 fd02::1 ::1 172.16.0.9 10.244.0.1 fe80::1")
)

// Question returns a connection that a client in or near the cluster might make.
func (c *Cluster) Question(r *rand.Rand) (protocol string, client netip.Addr, to netip.AddrPort) {
	s := pick(r, c.Services...)
	p := pick(r, s.Spec.Ports...)
	protocol = string(p.Protocol)
	if chance(r, 20) {
		protocol = pick(r, "TCP", "UDP", "SCTP")
	}
	addrs := append(append([]string{}, s.Spec.ClusterIPs...), s.Spec.ExternalIPs...)
	for _, in := range s.Status.LoadBalancer.Ingress {
		addrs = append(addrs, in.IP)
	}
	addr, port := pick(r, addrs...), p.Port
	if p.NodePort != 0 && chance(r, 4) {
		addr, port = pick(r, nodes...), p.NodePort
	}
	switch r.IntN(40) {
	case 0:
		port = pick(r, int32(443), 30000)
	case 1:
		addr = pick(r, "10.96.0.99", "fd96::99", "198.51.100.1")
	case 2:
		addr = pick(r, nodes...)
	}
	to = netip.AddrPortFrom(netip.MustParseAddr(addr), uint16(port))
	if to.Addr().Is4() {
		return protocol, netip.MustParseAddr(pick(r, clients4...)), to
	}
	return protocol, netip.MustParseAddr(pick(r, clients6...)), to
}
