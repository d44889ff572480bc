package iptables

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// The edits from one plan to the next lead from the lists of the one to those of
// the other, and keep count of them. A destination is dropped after its cluster IP,
// whose other ports refuse.
func TestEditsLeadFromPlanToPlan(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var from redirect.Plan
	have := listed(&from)
	count := setSizes{}
	for i := range 2000 {
		to := randomPlan(random)
		c := redirect.Diff(&from, &to)
		if c.Rehomes(&from, &to) {
			continue // compared with what there is
		}
		e := editsOf(&c, &from, &to)
		count = count.after(&e)
		for _, x := range e.add {
			if have[x] {
				t.Fatalf("plan %d: %+v is added again", i, x)
			}
			have[x] = true
		}
		gone := map[netip.Addr]bool{}
		for _, x := range e.drop {
			if !have[x] {
				t.Fatalf("plan %d: %+v is dropped, and was not there", i, x)
			}
			if x.list == listCluster && gone[x.element.prefix.Addr()] {
				t.Fatalf("plan %d: %+v is dropped after a destination", i, x)
			}
			gone[x.element.prefix.Addr()] = gone[x.element.prefix.Addr()] || x.element.port != 0 && x.list != listForeign
			delete(have, x)
		}
		if want := listed(&to); !reflect.DeepEqual(have, want) {
			t.Fatalf("plan %d: got %v, want %v", i, have, want)
		}
		sum := 0
		for _, n := range count {
			sum += n
		}
		must.Equalf(t, sum, len(have), "plan %d: elements are counted, there are %d", i, len(have))
		from = to
	}
}

// listed is what a plan's lists hold, the obvious way.
func listed(p *redirect.Plan) map[edit]bool {
	all := map[edit]bool{}
	on := func(l list, e element) { all[edit{service.FamilyOf(e.prefix.Addr()), l, e}] = true }
	destinations := func(l list, set redirect.Set[service.Destination]) {
		for d := range set.Keys() {
			on(l, destination(d))
			if l != listOwn && l != listLinger && p.NonLocal.Has(d.Addr) {
				on(listForeign, destination(d))
			}
		}
	}
	for d, target := range p.Steer.All() {
		destinations(listener{d.Protocol, target.Port}.list(), redirect.SetOf(d))
	}
	destinations(listRefuse, p.Refuse)
	destinations(listSilent, p.Silent)
	destinations(listLinger, p.Lingering)
	destinations(listOwn, p.Own)
	for a := range p.ClusterIPs.Keys() {
		on(listCluster, address(a))
	}
	for l := range p.Local.Keys() {
		on(listLocal, element{prefix: l})
	}
	return all
}

// randomPlan is of a few addresses and ports, so that they meet often.
func randomPlan(random *rand.Rand) (p redirect.Plan) {
	for i, a := range []string{"10.96.0.1", "10.96.0.2", "192.0.2.1", "fd01::1", "2001:db8::1"} {
		addr := netip.MustParseAddr(a)
		foreign := i == 2 || i == 4
		if foreign {
			p.NonLocal = p.NonLocal.With(addr, struct{}{})
		} else if random.IntN(3) > 0 {
			p.Local = p.Local.With(netip.PrefixFrom(addr, addr.BitLen()), struct{}{})
			p.ClusterIPs = p.ClusterIPs.With(addr, struct{}{})
		}
		for port := range uint16(4) {
			d := service.Destination{Addr: addr, Port: 80 + port, Protocol: []service.Protocol{service.TCP, service.UDP}[random.IntN(2)]}
			switch random.IntN(6) {
			case 0, 1:
				p.Steer = p.Steer.With(d, redirect.Target{Port: uint16(1 + random.IntN(3)), FD: random.IntN(2)})
			case 2:
				p.Refuse = p.Refuse.With(d, struct{}{})
			case 3:
				p.Silent = p.Silent.With(d, struct{}{})
			case 4:
				if foreign {
					p.Lingering = p.Lingering.With(d, struct{}{})
				} else {
					p.Own = p.Own.With(d, struct{}{})
				}
			}
		}
	}
	return p
}

// With ipset, a change of destinations is one call of one program, also when a
// listener has nothing to do for a while, and what is the same is none.
func TestChangeIsOneCall(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		if opts.NoSets {
			return // writes the rules anew
		}
		lab := netns.NewLab(t, 0)
		f := steering.NewFront(t, lab.Node, "front")
		r := newOne(t, lab.Node, opts)
		web, api := tcp("10.96.0.10:80"), tcp("[fd01::10]:80")
		served, none := steering.Plan(steering.Steer(f, web, api)), steering.Plan(steering.Refuse(web, api))
		apply(t, r, served)

		calls := filepath.Join(t.TempDir(), "calls")
		script := calls + ".sh"
		ipset := r.tools.ipset
		// The test of the other variant starts programs meanwhile. One that has the open file
		// until its exec would make ours fail: ETXTBSY.
		syscall.ForkLock.RLock()
		err := os.WriteFile(script, []byte("#!/bin/sh\necho \"$@\" >> "+calls+"\nexec "+ipset+" \"$@\"\n"), 0o700)
		syscall.ForkLock.RUnlock()
		must.OK(t, err)
		was := *r.tools
		r.tools.ipset, r.tools.programs = script, map[string]string{}
		for i, c := range []struct {
			plan  redirect.Plan
			calls int
			want  string
		}{
			{none, 1, steering.Refused}, {none, 0, steering.Refused}, {served, 1, f.Says(web)},
			{steering.Plan(steering.Steer(f, web, api, tcp("10.96.0.11:80")), steering.Silent(tcp("10.96.0.12:80"))), 1, f.Says(web)},
			{served, 1, f.Says(web)},
		} {
			apply(t, r, c.plan)
			text, _ := os.ReadFile(calls)
			_ = os.Remove(calls)
			if got := strings.Count(string(text), "\n"); got != c.calls {
				t.Errorf("step %d: %d calls, want %d:\n%s", i, got, c.calls, text)
			}
			check.Equalf(t, steering.Reach(t, lab.Client, web, c.want), c.want, "step %d", i)
		}
		*r.tools = was
		if repaired, err := r.Verify(); repaired || err != nil {
			t.Errorf("verified: repaired %v, %v", repaired, err)
		}
	})
}
