package tproxy

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// describePlan is what Dump must say when a plan is in force: an obvious way
// to the same text that does not go by the kernel.
func describePlan(p redirect.Plan, source map[bool]string) string {
	lines := map[string][]string{}
	add := func(what string, v6 bool, order, text string) {
		key := what + "4"
		if v6 {
			key = what + "6"
		}
		lines[key] = append(lines[key], order+"|  "+what+" "+text)
	}
	order := func(d service.Destination) string {
		return fmt.Sprintf("%x %05d %d", d.Addr.As16(), d.Port, d.Protocol)
	}
	for d, t := range p.Steer.All() {
		listen := redirect.ListenIPv4
		if d.Addr.Is6() {
			listen = redirect.ListenIPv6
		}
		what := "steer"
		if p.NonLocal.Has(d.Addr) {
			what = "take"
		}
		add(what, d.Addr.Is6(), order(d), d.String()+" to "+netip.AddrPortFrom(listen, t.Port).String())
	}
	for d := range p.Refuse.Keys() {
		add("refuse", d.Addr.Is6(), order(d), d.String())
	}
	for d := range p.Silent.Keys() {
		add("silent", d.Addr.Is6(), order(d), d.String())
	}
	for a := range p.ClusterIPs.Keys() {
		add("cluster", a.Is6(), fmt.Sprintf("%x", a.As16()), a.String())
	}
	for a := range p.NonLocal.Keys() {
		add("foreign", a.Is6(), fmt.Sprintf("%x", a.As16()), a.String())
	}
	for d := range p.Own.Keys() {
		add("own", d.Addr.Is6(), order(d), d.String())
	}
	var routes4, routes6, steer4, steer6 []string
	for _, l := range redirect.Ranges(p.Local) {
		v6 := l.Addr().Is6()
		add("local", v6, fmt.Sprintf("%x", l.Addr().As16()), l.String())
		route := "route local " + l.String() + " dev lo proto 83 src " + source[v6]
		if v6 {
			routes6 = append(routes6, route)
		} else {
			routes4 = append(routes4, route)
		}
	}
	var text strings.Builder
	fmt.Fprintf(&text, "table inet sluice: %d chains, %d rules\n", len(makeChains(nil, numbers{})), len(makeRules(0, numbers{})))
	for _, what := range kindNames {
		for _, digit := range []string{"4", "6"} {
			list := lines[what+digit]
			slices.Sort(list)
			for _, l := range list {
				_, l, _ = strings.Cut(l, "|")
				fmt.Fprintln(&text, l)
			}
		}
	}
	slices.Sort(routes4)
	slices.Sort(routes6)
	for a := range p.NonLocal.Keys() {
		route := "route local " + netip.PrefixFrom(a, a.BitLen()).String() + " dev lo table 8376 proto 83 src " + source[a.Is6()]
		if a.Is6() {
			steer6 = append(steer6, route)
		} else {
			steer4 = append(steer4, route)
		}
	}
	slices.Sort(steer4)
	slices.Sort(steer6)
	replies := "route local default dev lo table 8377 proto 83"
	for _, l := range slices.Concat(routes4, routes6, steer4, steer6, []string{replies, replies}) {
		fmt.Fprintln(&text, l)
	}
	for f, rule := range []string{"rule", "rule -6"} {
		if p.NonLocal.Len() > 0 {
			fmt.Fprintln(&text, rule, "fwmark 0x1000/0x1000 lookup 8376 proto 83 priority 83")
		}
		for _, match := range []string{"TCP dport 10000-29999", "UDP dport 10000-29999", []string{"icmp", "ipv6-icmp"}[f]} {
			fmt.Fprintln(&text, rule, "fwmark 0x2000/0x2000 ipproto", match, "lookup 8377 proto 83 priority 83")
		}
	}
	return text.String()
}

// randomPlan has few addresses, so that plans overlap, and ranges that lie
// next to each other and within each other.
func randomPlan(rnd *rand.Rand) redirect.Plan {
	p := steering.Plan()
	p.Local = redirect.LocalOf()
	for i := range byte(24) {
		a := netip.AddrFrom4([4]byte{10, 96, 0, i})
		if i >= 12 {
			a = netip.MustParseAddr(fmt.Sprintf("fd01::%x", i))
		}
		for port := range uint16(2) {
			for _, protocol := range []service.Protocol{service.TCP, service.UDP, service.SCTP} {
				d := service.Destination{Addr: a, Port: 80 + port*256, Protocol: protocol}
				switch n := rnd.IntN(6); {
				case n == 0 && protocol != service.SCTP:
					p.Steer = p.Steer.With(d, redirect.Target{Port: 1000 + uint16(rnd.IntN(2))})
				case n == 1:
					p.Refuse = p.Refuse.With(d, struct{}{})
				case n == 2:
					p.Silent = p.Silent.With(d, struct{}{})
				}
			}
		}
		if rnd.IntN(2) == 0 {
			p.ClusterIPs = p.ClusterIPs.With(a, struct{}{})
		}
		for port := range uint16(3) {
			if rnd.IntN(4) == 0 {
				p.Own = p.Own.With(service.Destination{Addr: a, Port: 30000 + port, Protocol: service.Protocol(1 + rnd.IntN(3))}, struct{}{})
			}
		}
		if rnd.IntN(3) == 0 {
			p.Local = redirect.LocalOf(append(redirect.Ranges(p.Local), netip.PrefixFrom(a, a.BitLen()-rnd.IntN(4)).Masked())...)
		}
	}
	for i := range byte(24) {
		a := netip.AddrFrom4([4]byte{10, 96, 0, i})
		if i >= 12 {
			a = netip.MustParseAddr(fmt.Sprintf("fd01::%x", i))
		}
		if redirect.IsLocal(p.Local, a) || rnd.IntN(2) == 0 {
			continue
		}
		p.NonLocal = p.NonLocal.With(a, struct{}{})
		if rnd.IntN(2) == 0 {
			p.Lingering = p.Lingering.With(service.Destination{Addr: a, Port: 85, Protocol: service.TCP}, struct{}{})
		}
	}
	return p
}

// The kernel's tables are always those of the last plan, whichever way led
// there: changes, or a new fill in one transaction or in several.
func TestAnyPlanAfterAnyOther(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 0)
	r := newRedirector(t, lab.Node, Options{})
	source := map[bool]string{false: lab.Node.IPv4.String(), true: lab.Node.IPv6.String()}
	rnd := rand.New(rand.NewPCG(3, 5))
	for i := range 150 {
		p := randomPlan(rnd)
		if rnd.IntN(10) == 0 {
			r.filter.synced = false
		}
		apply(t, r, p)
		got, err := Dump(r.opts)
		if want := describePlan(p, source); err != nil || got != want {
			t.Fatalf("plan %d, %v: in force:\n%s\nwant:\n%s", i, err, got, want)
		}
		if repaired, err := r.Verify(); repaired || err != nil {
			t.Fatalf("plan %d: verify: %v, %v", i, repaired, err)
		}
	}
}

func TestLargePlanInSeveralTransactions(t *testing.T) {
	lab := netns.NewLab(t, 0)
	r := newRedirector(t, lab.Node, Options{})
	source := map[bool]string{false: lab.Node.IPv4.String(), true: lab.Node.IPv6.String()}
	r.filter.limit = 100 << 10
	for _, services := range []int{9000, 12000, 10} {
		p := bigPlan(steering.NewFront(t, lab.Node, "front"), services)
		apply(t, r, p)
		got, err := Dump(r.opts)
		if want := describePlan(p, source); err != nil || got != want {
			steering.Same(t, want, got)
			t.Fatalf("%d services: %v", services, err)
		}
	}
	if c, err := r.filter.reader.contents(DefaultTable); err != nil || len(c.sets) != int(kinds)*int(versions) {
		t.Errorf("sets left: %v, %v", c.sets, err)
	}
}

// A transaction that the socket's buffer has no room for is made again as
// several: what happens where the buffer may not be made larger.
func TestSendBufferSmallerThanThePlan(t *testing.T) {
	lab := netns.NewLab(t, 0)
	r := newRedirector(t, lab.Node, Options{})
	r.filter.reset()
	r.filter.sendBuffer = 100 << 10
	p := bigPlan(steering.NewFront(t, lab.Node, "front"), 5000)
	apply(t, r, p)
	if r.filter.limit >= sendBuffer {
		t.Errorf("limit is still %d", r.filter.limit)
	}
	if repaired, err := r.Verify(); repaired || err != nil {
		t.Errorf("verify: %v, %v", repaired, err)
	}
}

// While plans change and the table is filled anew, a client that connects all
// the time to a service that is in all of them reaches its listener each time:
// never the host's own server on that port, never what the default route leads
// to.
func TestNoGapBetweenPlans(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Node.EchoTCP(t, 80)
	outside := lab.Backends[0]
	outside.EchoTCP(t, 80)
	must.OK(t, lab.Node.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), outside.IPv4))
	elsewhere := newRedirector(t, outside, Options{}) // for its routes: it has all of them
	apply(t, elsewhere, steering.Plan())
	must.OK(t, must.Err(elsewhere.filter.remove()))

	f := steering.NewFront(t, lab.Node, "front")
	web := tcp("10.96.0.10:80")
	r := newRedirector(t, lab.Node, Options{})
	apply(t, r, steering.Plan(steering.Steer(f, web)))
	type answer struct{ from, got string }
	answers := map[answer]int{}
	stop, done := make(chan struct{}), make(chan map[answer]int)
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		go func() {
			got := map[answer]int{}
			for {
				select {
				case <-stop:
					done <- got
					return
				default:
					got[answer{from.Name(), steering.Reach(t, from, web, "")}]++
				}
			}
		}()
	}
	rnd := rand.New(rand.NewPCG(7, 11))
	for i := range 300 {
		p := randomPlan(rnd)
		steering.Steer(f, web)(&p)
		p.Refuse = p.Refuse.Without(web)
		p.Silent = p.Silent.Without(web)
		switch rnd.IntN(3) {
		case 0:
			p.Local = redirect.LocalOf(append(redirect.Ranges(p.Local), netip.MustParsePrefix("10.96.0.0/16"))...)
		case 1:
			p.Local = redirect.LocalOf(append(redirect.Ranges(p.Local), netip.MustParsePrefix("10.96.0.10/32"))...)
		default:
			p.Local = redirect.LocalOf(append(redirect.Ranges(p.Local), netip.MustParsePrefix("10.96.0.0/12"))...)
		}
		p.NonLocal, p.Lingering = redirect.Set[netip.Addr]{}, redirect.Set[service.Destination]{}
		if i%10 == 0 {
			r.filter.synced = false
		}
		apply(t, r, p)
	}
	close(stop)
	for range 2 {
		for a, n := range <-done {
			answers[a] += n
		}
	}
	for a, n := range answers {
		check.Equalf(t, a.got, f.Says(web), "from %s: %d times", a.from, n)
	}
	t.Logf("%v", answers)
}

// A port without endpoints refuses as soon as the plan is applied, which takes
// milliseconds; the promise is 100 ms.
func TestRefusesAtOnce(t *testing.T) {
	lab := netns.NewLab(t, 0)
	f := steering.NewFront(t, lab.Node, "front")
	r := newRedirector(t, lab.Node, Options{})
	web := tcp("10.96.0.10:80")
	with, without := bigPlan(f, 5000), bigPlan(f, 5000)
	without.Steer = without.Steer.Without(web)
	without.Refuse = without.Refuse.With(web, struct{}{})
	apply(t, r, with)
	var took []time.Duration
	for range 20 {
		must.Equal(t, steering.Reach(t, lab.Client, web, ""), f.Says(web))
		start := time.Now()
		apply(t, r, without)
		took = append(took, time.Since(start))
		must.Equal(t, steering.Reach(t, lab.Client, web, ""), "refused")
		apply(t, r, with)
	}
	slices.Sort(took)
	t.Logf("one change among 5000 services: median %v, slowest %v", took[len(took)/2], took[len(took)-1])
	if took[0] > 100*time.Millisecond { // the rest is what else the machine had to do
		t.Errorf("a change took %v", took[0])
	}
}

func TestOptionsThatCannotBe(t *testing.T) {
	for _, o := range []Options{
		{Table: "two words"},
		{Table: strings.Repeat("x", 300)},
		{Routes: route.Options{NodeIPs: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")}}},
		{Routes: route.Options{NodeIPs: make([]netip.Addr, 1)}},
	} {
		if r, err := New(o); err == nil {
			_ = r.Close()
			t.Errorf("%+v: no error", o)
		}
	}
}

// A range that somebody else has a route for in another way is not taken.
func TestRouteOfSomebodyElse(t *testing.T) {
	lab := netns.NewLab(t, 0)
	somebodyElses(t, lab.Node.Namespace)
	r := newRedirector(t, lab.Node, Options{})
	p := steering.Plan()
	p.Local = redirect.LocalOf(append(redirect.Ranges(p.Local), netip.MustParsePrefix("10.200.0.0/16"))...) // local already
	apply(t, r, p)
	p.Local = redirect.LocalOf(netip.MustParsePrefix("10.1.0.255/32")) // the broadcast address of an interface
	var clash *redirect.ClashError
	if err := r.Apply(p); !errors.As(err, &clash) {
		t.Errorf("got %v, want a clash", err)
	}
}
