package stream

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
)

// BenchmarkApply measures what it takes to put one change in force, without
// steering, beside so many services.
func BenchmarkApply(b *testing.B) {
	netns.Require(b)
	for _, services := range []int{100, 300, 1000, 3000, 10000, 30000} {
		lab := netns.NewLab(b, 1)
		n := newNode(b, lab, func(o *setup) {
			o.Redirector.(*spy).Redirector = nowhere{}
			o.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}
		})
		var all service.Change
		ep := netip.AddrPortFrom(lab.Backends[0].IPv4, 8080)
		for i := range services {
			c := web(fmt.Sprintf("s%d", i), fmt.Sprintf("10.96.%d.%d", i/250, i%250+1), ep)
			all.Services = append(all.Services, c.Services...)
			all.EndpointSlices = append(all.EndpointSlices, c.EndpointSlices...)
		}
		n.apply(all)
		run := func(what string, changes ...service.Change) {
			b.Run(fmt.Sprintf("change=%s/services=%d", what, services), func(b *testing.B) {
				for i := 0; b.Loop(); i++ {
					b.StopTimer()
					table := policy.Compile(n.server.state.Load().table, n.store.Apply(changes[i%len(changes)]), n.policy)
					b.StartTimer()
					must.OK(b, n.manager.Apply(table))
				}
			})
		}
		run("endpoint",
			web("s7", "10.96.0.8", netip.AddrPortFrom(lab.Backends[0].IPv4, 8081)),
			web("s7", "10.96.0.8", netip.AddrPortFrom(lab.Backends[0].IPv4, 8080)))
		run("service", web("new", "10.100.0.1", ep), objects.Gone("new", 1))
	}
}
