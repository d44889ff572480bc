package tproxy

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

var sizes = []int{100, 300, 1000, 3000, 10000, 30000}

// clusterPlan has services as clusters have them: each with one steered port
// on one address, one in fifty refusing.
func clusterPlan(services int) redirect.Plan {
	var steer redirect.Builder[service.Destination, redirect.Target]
	var refuse redirect.Builder[service.Destination, struct{}]
	var ips redirect.Builder[netip.Addr, struct{}]
	a := netip.MustParseAddr("10.96.0.1")
	for i := range services {
		d := service.Destination{Addr: a, Port: 80, Protocol: service.TCP}
		if i%50 == 49 {
			refuse.Set(d, struct{}{})
		} else {
			steer.Set(d, redirect.Target{Port: uint16(1024 + i)})
		}
		ips.Set(a, struct{}{})
		a = a.Next()
	}
	return redirect.Plan{
		Steer: steer.Map(), Refuse: refuse.Map(), ClusterIPs: ips.Map(),
		Local: redirect.LocalOf(netip.MustParsePrefix("10.96.0.0/12")),
	}
}

// BenchmarkFirstSync is the time from a plan to its being in force, in a
// namespace with nothing in it.
func BenchmarkFirstSync(b *testing.B) {
	for _, n := range sizes {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			lab := netns.NewLab(b, 0)
			p := clusterPlan(n)
			for b.Loop() {
				r := must.Get(New(Options{Routes: route.Options{NetNS: lab.Node.FD()}}))(b)
				apply(b, r, p)
				b.StopTimer()
				must.OK(b, r.Close())
				b.StartTimer()
			}
		})
	}
}

// BenchmarkOneChange is the time until one service's change from steered to
// refused, or back, is in force.
func BenchmarkOneChange(b *testing.B) {
	for _, n := range sizes {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			lab := netns.NewLab(b, 0)
			r := newRedirector(b, lab.Node, Options{})
			p := clusterPlan(n)
			plans := [2]redirect.Plan{p, p}
			for d := range plans[1].Steer.Keys() {
				plans[1].Steer = plans[1].Steer.Without(d)
				plans[1].Refuse = plans[1].Refuse.With(d, struct{}{})
				break
			}
			apply(b, r, plans[0])
			for i := 1; b.Loop(); i++ {
				apply(b, r, plans[i%2])
			}
		})
	}
}

// BenchmarkVerify is the time of a look when nobody changed nftables
// (quiet=true), and when somebody changed a table of his own.
func BenchmarkVerify(b *testing.B) {
	for _, n := range sizes {
		for _, quiet := range []bool{true, false} {
			b.Run(fmt.Sprintf("services=%d/quiet=%v", n, quiet), func(b *testing.B) {
				lab := netns.NewLab(b, 0)
				r := newRedirector(b, lab.Node, Options{})
				apply(b, r, clusterPlan(n))
				for b.Loop() {
					if !quiet {
						r.filter.seen = 0
					}
					if repaired, err := r.Verify(); repaired || err != nil {
						b.Fatal(repaired, err)
					}
				}
			})
		}
	}
}
