package node

import (
	"maps"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// TestShares: after endpoints came, what the fuller ones have beyond an even share may be
// closed, a part in each step; clients that have not come back count. It ends when all have
// an even share, one by weights if the algorithm knows them, or after ten minutes. An algorithm
// that gives all clients the same endpoint closes none.
func TestShares(t *testing.T) {
	a, b, c := netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("10.0.0.2:80"), netip.MustParseAddrPort("10.0.0.3:80")
	name := service.PortName{Name: service.Name{Namespace: "default", Name: "web"}, Protocol: service.TCP}
	connections := conntrack.NewTable(conntrack.Options{})
	loads := connections.Counters(name).Loads()
	set := func(counts map[netip.AddrPort]int) {
		for at, n := range counts {
			l := loads.Of(at)
			for ; l.Open() < n; l.Begin() {
			}
			for ; l.Open() > n; l.End() {
			}
		}
	}
	r, now := newRebalancer(balancer.Options{}), time.Now()
	defer r.timer.Stop()
	weights := map[netip.AddrPort]uint16{a: 1, b: 2, c: 3}
	algorithm := "round-robin"
	endpoints := func(list ...netip.AddrPort) {
		p := &service.Port{Name: name, Rebalance: time.Second, Annotations: map[string]string{"balancer": algorithm}}
		p.Families[service.IPv4].Exists = true
		for _, at := range list {
			p.Families[service.IPv4].Endpoints = append(p.Families[service.IPv4].Endpoints, service.Endpoint{Addr: at, Ready: true, Serving: true, Weight: weights[at]})
		}
		r.update(policy.Compile(nil, &service.Snapshot{Ports: []*service.Port{p}}, policy.Config{}), connections, now)
	}
	// want takes a step: the surplus of each endpoint, and how many may be closed in all.
	want := func(what string, most int, surplus map[netip.AddrPort]int) {
		t.Helper()
		now = now.Add(time.Second)
		s := r.next(now, zerolog.Nop())[name]
		r.busy.Store(false)
		switch {
		case s == nil && surplus == nil:
		case s == nil || !maps.Equal(s.surplus, surplus) || s.most != most:
			t.Errorf("%s: %+v, want %d of %v", what, s, most, surplus)
		}
	}
	set(map[netip.AddrPort]int{a: 150, b: 50})
	endpoints(a, b)
	want("the annotation came, or a process that took over", 0, nil)
	set(map[netip.AddrPort]int{a: 100, b: 100})
	want("nothing came", 0, nil)
	endpoints(a)
	want("one went", 0, nil)
	endpoints(a, b, c)
	set(map[netip.AddrPort]int{a: 120, b: 120})
	now = now.Add(time.Hour)
	endpoints(a, b)
	endpoints(a, b, c)
	want("one came", 12, map[netip.AddrPort]int{a: 40, b: 40})
	set(map[netip.AddrPort]int{a: 100, b: 120})
	want("clients are on the way", 12, map[netip.AddrPort]int{a: 20, b: 40})
	set(map[netip.AddrPort]int{a: 80, b: 80})
	want("clients stay away", 0, nil)
	set(map[netip.AddrPort]int{a: 92, b: 90, c: 40})
	want("they came back unevenly", 12, map[netip.AddrPort]int{a: 12, b: 10})
	set(map[netip.AddrPort]int{a: 84, b: 84, c: 72})
	want("nearly even", 0, nil)
	set(map[netip.AddrPort]int{a: 200})
	want("uneven for another reason", 0, nil)
	endpoints(a, b)
	endpoints(a, b, c)
	now = now.Add(rebalanceTime)
	want("ten minutes later", 0, nil)
	for _, algorithm = range []string{"weighted-round-robin", "weighted-least-connections"} {
		set(map[netip.AddrPort]int{a: 200, b: 400, c: 0})
		endpoints(a, b)
		endpoints(a, b, c)
		want("one came, by weights", 30, map[netip.AddrPort]int{a: 100, b: 200})
		set(map[netip.AddrPort]int{a: 100, b: 200, c: 300})
		want("even by weights", 0, nil)
	}
	algorithm = "destination-hash"
	set(map[netip.AddrPort]int{a: 200, b: 400, c: 0})
	endpoints(a, b)
	endpoints(a, b, c)
	want("one came, and all clients get the same", 0, nil)
}

// TestChangesPutNoStepOff: the next step comes after a second, also if some Service changes
// more often, and again after other endpoints came.
func TestChangesPutNoStepOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		connections := conntrack.NewTable(conntrack.Options{})
		r := newRebalancer(balancer.Options{})
		defer r.timer.Stop()
		update := func(endpoints int) {
			p := &service.Port{Name: service.PortName{Name: service.Name{Namespace: "default", Name: "web"}}, Rebalance: time.Second}
			p.Families[service.IPv4].Exists = true
			for i := range endpoints {
				at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80)
				p.Families[service.IPv4].Endpoints = append(p.Families[service.IPv4].Endpoints, service.Endpoint{Addr: at, Ready: true, Serving: true})
			}
			r.update(policy.Compile(nil, &service.Snapshot{Ports: []*service.Port{p}}, policy.Config{}), connections, time.Now())
			time.Sleep(rebalanceStep * 6 / 10)
		}
		update(1)
		for endpoints := 2; endpoints < 4; endpoints++ {
			update(endpoints)
			update(endpoints)
			select {
			case now := <-r.timer.C:
				r.next(now, zerolog.Nop())
			default:
				t.Errorf("%d endpoints: the step is put off", endpoints)
			}
		}
	})
}
