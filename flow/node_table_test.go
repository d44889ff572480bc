package flow

import (
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestNodeClientsAreTheTables: the table decides about the node's own clients as policy says, and
// leaves to userspace what holds for them alone (A3.6). The endpoint sees the client's own port of TCP.
func TestNodeClientsAreTheTables(t *testing.T) {
	t.Parallel()
	lab := localNode(t, 1)
	must.OK(t, lab.Node.AddLocalRoute(netip.MustParsePrefix(balancer4+"/32")))
	lab.Backends[0].WitnessTCP(t, 8080)
	lab.Backends[0].WitnessUDP(t, 8080)
	n := newNode(t, lab, nil)
	endpoint4, endpoint6 := at(lab.Backends[0].IPv4, 8080), at(lab.Backends[0].IPv6, 8080)
	n.apply(svc(vip4, nil, endpoint4))
	n.apply(named("six", svc(vip6, nil, endpoint6)))
	n.servesNode()
	const times = 3
	expect := func(what string, table, asked uint64, network string, own netip.Addr, to, sees string) {
		t.Helper()
		n.expectDecided(what, table, asked, func() {
			for range times {
				c := n.dialFrom(network, own, at(netip.MustParseAddr(to), 80))
				said := n.say(c)
				server, peer, _ := strings.Cut(said, " ")
				if seen, err := netip.ParseAddrPort(peer); server != "b1:8080" || err != nil || seen.Addr().String() != sees || !isPortOf(c, seen.Port()) {
					t.Errorf("%s: %q, want b1 to see %s", what, said, sees)
				}
				_ = c.Close()
			}
		})
	}
	own4, own6 := lab.Node.IPv4.String(), lab.Node.IPv6.String()
	expect("TCP", times, 0, "tcp", lab.Node.IPv4, vip4, own4)
	expect("TCP over IPv6", times, 0, "tcp", lab.Node.IPv6, vip6, own6)
	expect("UDP", times, 0, "udp", lab.Node.IPv4, vip4, own4)
	expect("from the Service's own address", times, 0, "tcp", netip.MustParseAddr(vip4), vip4, "10.2.1.1")
	n.config.MasqueradeAll = true
	n.apply(svc(vip4, nil, endpoint4))
	n.apply(named("six", svc(vip6, nil, endpoint6)))
	expect("hidden", times, 0, "tcp", lab.Node.IPv4, vip4, "10.2.1.1")
	expect("hidden, over IPv6", times, 0, "tcp", lab.Node.IPv6, vip6, "fd00:2:1::1")
	n.config.MasqueradeAll = false
	for policy, sees := range map[corev1.ServiceExternalTrafficPolicy]string{corev1.ServiceExternalTrafficPolicyCluster: "10.2.1.1", corev1.ServiceExternalTrafficPolicyLocal: own4} {
		table := map[bool]uint64{true: 0, false: times}[sees == own4]
		n.apply(svc(vip4, func(s *corev1.Service) {
			balanced(balancer4)(s)
			s.Spec.ExternalTrafficPolicy = policy
		}, endpoint4))
		expect("policy "+string(policy), table, times-table, "tcp", lab.Node.IPv4, balancer4, sees)
	}
	setHiding(n.server.kernel, bpf.KernelHidingHIDES, false)
	expect("some ports are kept", 0, times, "tcp", lab.Node.IPv4, vip4, own4)
}
