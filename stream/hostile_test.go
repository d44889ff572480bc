package stream

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/race"
)

// oddAddresses are what an API server or a file may name.
var oddAddresses = []string{
	"240.1.2.3", "0.1.2.3", "0.0.0.0", "255.255.255.255", "255.255.255.254", "127.0.0.1", "127.83.76.1", "169.254.20.10", "224.0.0.1", "239.1.1.1",
	"10.1.0.1", "10.1.0.255", "10.1.0.0", "10.96.0.7", "10.96.0.1", "192.0.2.1", "010.001.000.001", "10.2.1.2",
	"::", "::1", "::5", "::ffff:10.1.0.1", "fe80::1", "fe80::1%lo", "ff02::1", "fd00:1::1", "fd00:96::7", "2001:db8::1", "64:ff9b::a01:1", "bad", "",
}

// hostile makes a random object that tries to spoil what is served.
func hostile(r *rand.Rand) service.Change {
	address := func() string { return oddAddresses[r.IntN(len(oddAddresses))] }
	// Nobody but the API server and administrators chooses cluster IPs and
	// nodes' addresses. With an endpoint's, they would take the endpoint away.
	trusted := func() string {
		for {
			if a := address(); a != "10.2.1.2" {
				return a
			}
		}
	}
	some := func(n int) (list []string) {
		for range r.IntN(n + 1) {
			list = append(list, address())
		}
		return list
	}
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "evil", Name: name} }
	port := func() int32 { return []int32{80, 30080, 1, 65535, 53, 8080}[r.IntN(6)] }
	protocol := func() corev1.Protocol { return []corev1.Protocol{"TCP", "UDP", "SCTP"}[r.IntN(3)] }
	var c service.Change
	switch r.IntN(8) {
	case 0:
		cidr := address() + []string{"/0", "/1", "/4", "/8", "/24", "/32", "/128"}[r.IntN(7)]
		c.ServiceCIDRs = []*networkingv1.ServiceCIDR{{ObjectMeta: metav1.ObjectMeta{Name: "evil"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{cidr}}}}
		return c
	case 1:
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: []string{"node", "evil"}[r.IntN(2)]}}
		for range r.IntN(4) {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: trusted()})
		}
		n.Spec.PodCIDRs = []string{address() + "/8"}
		c.Nodes = []*corev1.Node{n}
		return c
	}
	name := fmt.Sprintf("e%d", r.IntN(4))
	s := &corev1.Service{ObjectMeta: meta(name)}
	s.Spec.Type = []corev1.ServiceType{corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer}[r.IntN(3)]
	s.Spec.ClusterIP = trusted()
	s.Spec.ClusterIPs = []string{s.Spec.ClusterIP, trusted()}
	s.Spec.ExternalIPs, s.Spec.LoadBalancerSourceRanges = some(3), nil
	for _, a := range some(2) {
		s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, a+"/8")
	}
	for _, a := range some(2) {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: a})
	}
	for i := range 1 + r.IntN(3) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint(i), Port: port(), Protocol: protocol(), NodePort: []int32{0, 30081, 65535}[r.IntN(3)]})
	}
	if r.IntN(2) == 0 {
		s.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	}
	if r.IntN(2) == 0 {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	s.Spec.SessionAffinity = []corev1.ServiceAffinity{"", corev1.ServiceAffinityClientIP}[r.IntN(2)]
	s.Annotations = map[string]string{"sluice.dev/balancer": address(), "sluice.dev/topology-keys": address()}
	c.Services = []*corev1.Service{s}
	for i := range r.IntN(3) {
		es := &discoveryv1.EndpointSlice{ObjectMeta: meta(fmt.Sprintf("%s-%d", name, i)), AddressType: []discoveryv1.AddressType{"IPv4", "IPv6", "FQDN"}[r.IntN(3)]}
		es.Labels = map[string]string{discoveryv1.LabelServiceName: name}
		for i := range 3 {
			es.Ports = append(es.Ports, discoveryv1.EndpointPort{Name: ptr.To(fmt.Sprint(i)), Port: ptr.To(port()), Protocol: ptr.To(protocol())})
		}
		for _, a := range some(4) {
			es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, NodeName: []*string{nil, ptr.To("node"), ptr.To("other")}[r.IntN(3)]})
		}
		c.EndpointSlices = append(c.EndpointSlices, es)
	}
	return c
}

// paper is a Redirector that puts plans nowhere, and refuses those that others
// refuse.
type paper struct {
	redirect.Redirector
	traits redirect.Traits
	plan   redirect.Plan
}

func (p *paper) Traits() redirect.Traits { return p.traits }
func (p *paper) Close() error            { return nil }
func (p *paper) Leave()                  {}

func (p *paper) Apply(to redirect.Plan) error {
	c := redirect.Diff(&p.plan, &to)
	if err := c.Validate(&to); err != nil {
		return err
	}
	p.plan = to
	return nil
}

// TestNoObjectKeepsOthersFromBeingServed gives a node one object after another
// of those that a tenant could write, valid or not, on addresses that nobody can
// have, that are the node's, or other Services'. Whatever they say, the rest is
// served, and the next change comes into force.
func TestNoObjectKeepsOthersFromBeingServed(t *testing.T) {
	netns.Require(t)
	for _, each := range []bool{false, true} {
		t.Run(fmt.Sprintf("bind each %t", each), func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			steer := &paper{traits: redirect.Traits{BindEach: each}}
			host := []netip.Addr{lab.Node.IPv4, lab.Node.IPv6, netip.MustParseAddr("169.254.20.10"), netip.MustParseAddr("fe80::1"), netip.MustParseAddr("240.9.9.9")}
			n := newNode(t, lab, func(o *setup) {
				check.OK(t, o.Redirector.Close())
				o.Redirector = steer
				o.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("0.0.0.0/0")}
				o.HostAddresses = func() []netip.Addr { return host }
			})
			endpoint := netip.MustParseAddrPort("10.2.1.2:8080")
			for i := range race.Fewer(3000) {
				r := rand.New(rand.NewPCG(12, uint64(i)))
				attack := hostile(r)
				err := lab.Node.Do(func() error {
					return n.manager.Apply(policy.Compile(n.server.state.Load().table, n.store.Apply(attack), n.policy))
				})
				must.OKf(t, err, "round %d, after %s", i, text(attack))
				name := fmt.Sprintf("web%d", i%8)
				ip := fmt.Sprintf("10.96.1.%d", 1+i%200)
				n.apply(nodePort(web(name, ip, endpoint), int32(30100+i%8)))
				dst := service.Destination{Addr: netip.MustParseAddr(ip), Port: 80, Protocol: service.TCP}
				if !steer.plan.Steer.Has(dst) {
					t.Fatalf("round %d, after %s: %s is not steered", i, text(attack), ip)
				}
				dst = service.Destination{Addr: lab.Node.IPv4, Port: uint16(30100 + i%8), Protocol: service.TCP}
				if !steer.plan.Own.Has(dst) {
					t.Fatalf("round %d, after %s: the node port of %s is not served", i, text(attack), name)
				}
			}
		})
	}
}

// text gives a change for a line of a test's log.
func text(c service.Change) string {
	b, err := json.Marshal(c)
	return fmt.Sprint(string(b), err)
}
