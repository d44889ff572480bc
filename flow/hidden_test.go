package flow

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestHiddenClientsAreTheTables: the table hides clients as policy says (A3.8), behind the address
// that the kernel uses towards the endpoint and a free port: of TCP, the client's own. A client may
// reuse its port at once. Records have the address that the endpoint sees.
func TestHiddenClientsAreTheTables(t *testing.T) {
	lab := netns.NewLab(t, 2)
	nodes := [][]netip.Addr{{netip.MustParseAddr("10.2.1.1"), netip.MustParseAddr("fd00:2:1::1")}, {netip.MustParseAddr("10.2.2.1"), netip.MustParseAddr("fd00:2:2::1")}}
	for _, b := range lab.Backends {
		b.WitnessTCP(t, 8080)
		b.WitnessUDP(t, 8080)
	}
	n := newNode(t, lab, nil)
	outside := func(ip string) func(*corev1.Service) {
		return func(s *corev1.Service) {
			balanced(ip)(s)
			s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
		}
	}
	n.apply(svc(vip4, outside(balancer4), at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)))
	n.apply(named("six", svc(vip6, outside(balancer6), at(lab.Backends[0].IPv6, 8080), at(lab.Backends[1].IPv6, 8080))))
	const times, port = 6, 40001
	sources := make(map[netip.AddrPort]bool)
	for family, to := range []string{balancer4 + ":80", "[" + balancer6 + "]:80"} {
		seen := func(c net.Conn, said string) {
			t.Helper()
			name, source, _ := strings.Cut(said, " ")
			sees, err := netip.ParseAddrPort(source)
			which := map[string]int{"b1:8080": 0, "b2:8080": 1}[name]
			if err != nil || sees.Addr() != nodes[which][family] || !isPortOf(c, sees.Port()) {
				t.Errorf("%s: %q, %v", to, said, err)
			}
			sources[sees] = true
		}
		n.expectDecided("UDP to "+to, times, 0, func() {
			for range times {
				c := must.Get(lab.Client.Dial("udp", to))(t)
				defer c.Close()
				said := must.Get(question(c))(t)
				seen(c, said)
			}
		})
		n.expectDecided("TCP from one port to "+to, times, 0, func() {
			for range times {
				c := dialFrom(t, lab.Client, port, to)
				said := must.Get(netns.AskOn(c))(t)
				seen(c, said)
				_ = c.(*net.TCPConn).SetLinger(0)
				_ = c.Close()
				// The next SYN must not overtake the RST on another CPU.
				wait.True(t, "the RST has passed", func() bool { return n.openConnections() == 0 })
			}
		})
	}
	for _, r := range n.wait(t, 2*times) {
		if r.End != conntrack.ClientReset || r.Source != policy.SourceNode || !sources[r.SourceAddr] {
			t.Errorf("%+v", r)
		}
	}
}

// TestTableFindsOneOfFewPorts: where six ports in ten are none that a session may have, the table still
// finds one for each hidden client.
func TestTableFindsOneOfFewPorts(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessUDP(t, 8080)
	last := uint16(bpf.FirstPort + (bpf.LastPort-bpf.FirstPort)*6/10)
	n := newNode(t, lab, func(o *Options) { o.ReplyPorts = [2]uint16{bpf.FirstPort, last} })
	n.config.MasqueradeAll = true
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	const sessions = 300
	n.expectDecided("sessions", sessions, 0, func() {
		for range sessions {
			c, err := lab.Client.Dial("udp", vip4+":80")
			must.OK(t, err)
			defer c.Close()
			said, err := question(c)
			must.OK(t, err)
			_, source, _ := strings.Cut(said, " ")
			if sees, err := netip.ParseAddrPort(source); err != nil || sees.Port() <= last || sees.Port() > bpf.LastPort {
				t.Fatalf("%q, %v", said, err)
			}
		}
	})
}

// TestPodsPassPolicyLocal: by a Service's external addresses, pods reach endpoints on other nodes
// despite policy Local, with their own address. Other clients do not (A3.5, A3.6). The table decides
// that.
func TestPodsPassPolicyLocal(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessTCP(t, 8080)
	n := newNode(t, lab, nil)
	services := onNode("elsewhere", svc(vip4, balanced(balancer4), at(lab.Backends[0].IPv4, 8080)))
	n.apply(services)
	n.expectDecided("a pod", 1, 0, func() {
		if said, err := lab.Client.Ask("tcp", balancer4+":80"); err != nil || !strings.HasPrefix(said, "b1:8080 "+lab.Client.IPv4.String()) {
			t.Errorf("%q, %v", said, err)
		}
	})
	n.config.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.77.0.0/16")}
	n.apply(services)
	n.expectDecided("no pod", 0, 1, func() {
		if !n.isDropped(balancer4 + ":80") {
			t.Error("it is answered")
		}
	})
}

// openConnections counts the TCP connections that BPF knows.
func (n *node) openConnections() (count int) {
	for i := range n.server.kernel.Flows {
		if k := &n.server.kernel.Flows[i]; k.Protocol == 6 && k.State == bpf.KernelStateOPEN {
			count++
		}
	}
	return count
}
