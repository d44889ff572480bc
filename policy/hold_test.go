package policy

import (
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// TestHold: without endpoints, a Service's connections are held in place of refused, except
// from clients outside of its source ranges; listening sockets are open for that. With an
// endpoint, nothing is different.
func TestHold(t *testing.T) {
	const in, out = "192.0.2.1", "203.0.113.1"
	for _, tt := range []struct {
		what          string
		hold          time.Duration
		local         bool
		ready, here   bool // an endpoint, on this node
		cluster       Action
		inside        Action
		outside       Action
		steer, extern Action
	}{
		{"no hold", 0, false, false, false, Refuse, Refuse, Refuse, Refuse, Refuse},
		{"held", time.Second, false, false, false, Hold, Hold, Drop, Accept, Accept},
		{"held, policy Local", time.Second, true, false, false, Hold, Hold, Drop, Accept, Accept},
		{"served", time.Second, false, true, false, Accept, Accept, Drop, Accept, Accept},
		{"served elsewhere", time.Second, true, true, false, Accept, Drop, Drop, Accept, Accept},
		{"served here", time.Second, true, true, true, Accept, Accept, Drop, Accept, Accept},
	} {
		p := &service.Port{Name: service.PortName{Name: service.Name{Namespace: "shop", Name: "cart"}, Protocol: service.TCP}, Type: service.TypeLoadBalancer, Port: 80, Hold: tt.hold, ExternalLocal: tt.local}
		v := &p.Families[service.IPv4]
		v.Exists, v.ClusterIP = true, netip.MustParseAddr("10.96.0.1")
		v.LoadBalancerIPs = []netip.Addr{netip.MustParseAddr("198.51.100.1")}
		v.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
		if tt.ready {
			v.Endpoints = []service.Endpoint{{Addr: netip.MustParseAddrPort("10.1.0.1:80"), Ready: true, Serving: true, Local: tt.here}}
		}
		table := Compile(nil, &service.Snapshot{Ports: []*service.Port{p}}, Config{NodeName: "node"})
		ip := netip.MustParseAddrPort("10.96.0.1:80")
		lb := netip.MustParseAddrPort("198.51.100.1:80")
		got := []Action{
			table.Resolve(service.TCP, netip.MustParseAddr(out), ip).Action,
			table.Resolve(service.TCP, netip.MustParseAddr(in), lb).Action,
			table.Resolve(service.TCP, netip.MustParseAddr(out), lb).Action,
			table.Steering(service.Destination{Addr: ip.Addr(), Port: 80, Protocol: service.TCP}),
			table.Steering(service.Destination{Addr: lb.Addr(), Port: 80, Protocol: service.TCP}),
		}
		for i, want := range []Action{tt.cluster, tt.inside, tt.outside, tt.steer, tt.extern} {
			check.Equalf(t, got[i], want, "%s: case %d", tt.what, i)
		}
		if tt.hold == 0 {
			continue
		}
		for _, client := range []string{in, out} {
			for _, vip := range []netip.AddrPort{ip, lb} {
				allowed, limited := table.Admission(service.Destination{Addr: vip.Addr(), Port: 80, Protocol: service.TCP})
				drops := table.Resolve(service.TCP, netip.MustParseAddr(client), vip).Action == Drop
				if drops != (limited && !contains(allowed, netip.MustParseAddr(client))) {
					t.Errorf("%s: %s is dropped at %s: %t, and admission says %v, %t", tt.what, client, vip, drops, allowed, limited)
				}
			}
		}
	}
}
