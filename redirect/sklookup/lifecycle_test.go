package sklookup

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

var (
	web4 = service.Destination{Addr: netip.MustParseAddr("10.96.0.10"), Port: 80, Protocol: service.TCP}
	web6 = service.Destination{Addr: netip.MustParseAddr("fd01::10"), Port: 80, Protocol: service.TCP}
)

// bigPlan has so many services with an address of each family, web4 and web6
// among them.
func bigPlan(f *steering.Front, services int) redirect.Plan {
	p := steering.Plan(steering.Steer(f, web4, web6))
	for i := range services - 1 {
		n := i + 256
		for _, a := range []netip.Addr{
			netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)}),
			netip.MustParseAddr(fmt.Sprintf("fd01::%x", n)),
		} {
			steering.Steer(f, service.Destination{Addr: a, Port: 80, Protocol: service.TCP})(&p)
		}
	}
	p.Local = redirect.LocalOf(netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd01::/108"))
	return p
}

// Whatever somebody does to the program, its maps or its sockets is repaired,
// and connections live through it.
func TestVerifyRepairs(t *testing.T) {
	lab := netns.NewLab(t, 0)
	front := steering.NewFront(t, lab.Node, "front")
	r := newRedirector(t, lab.Node)
	defer r.Close()
	plan := steering.Plan(steering.Steer(front, web4, web6), steering.Silent(service.Destination{Addr: web4.Addr, Port: 81, Protocol: service.TCP}))
	must.OK(t, r.Apply(plan))
	held := []*steering.Held{steering.Hold(t, lab.Client, web4), steering.Hold(t, lab.Node, web6)}
	for _, c := range []struct {
		name string
		do   func() error
	}{
		{"detached", func() error { return r.link.Detach() }},
		{"a destination removed", func() error { return r.tables.deleteDestination(web4) }},
		{"a destination with another socket", func() error { return r.tables.setDestination(web6, silentTCP6) }},
		{"a destination added", func() error {
			return r.tables.setDestination(service.Destination{Addr: lab.Node.IPv4, Port: 22, Protocol: service.TCP}, refused)
		}},
		{"a cluster IP removed", func() error { return r.tables.deleteRange(single(web4.Addr)) }},
		{"a range added", func() error { return r.tables.setRange(netip.MustParsePrefix("10.1.0.0/24"), refused) }},
		{"a listening socket removed", func() error { return r.tables.deleteSocket(firstSlot) }},
		{"the silent socket removed", func() error { return r.tables.deleteSocket(silentTCP4) }},
	} {
		must.OKf(t, c.do(), "%s", c.name)
		r.unread = 0
		if repaired, err := r.Verify(); !repaired || err != nil {
			t.Errorf("%s: verify: %v, %v", c.name, repaired, err)
		}
		r.unread = 0
		if repaired, err := r.Verify(); repaired || err != nil {
			t.Errorf("%s: verify once more: %v, %v", c.name, repaired, err)
		}
		for _, d := range []service.Destination{web4, web6} {
			steering.Expect(t, lab.Client, d, front.Says(d), c.name)
		}
		for _, h := range held {
			h.Works(t, c.name)
		}
	}
}

// A listener without a descriptor cannot be steered to.
func TestPlanWithoutADescriptor(t *testing.T) {
	r := newRedirector(t, netns.NewLab(t, 0).Node)
	defer r.Close()
	check.Error(t, r.Apply(steering.Plan(func(p *redirect.Plan) { p.Steer = p.Steer.With(web4, redirect.Target{Port: 1}) })), "no descriptor")
}

// A plan that is too large is an error that says so, and the next one that fits
// is put in force.
func TestMapsThatAreFull(t *testing.T) {
	lab := netns.NewLab(t, 0)
	front := steering.NewFront(t, lab.Node, "front")
	opts := optionsOf(lab.Node)
	opts.MaxDestinations = 16
	r := must.Get(New(opts))(t)
	defer r.Close()
	for range 2 {
		must.OK(t, r.Apply(bigPlan(front, 8)))
		check.Errorf(t, r.Apply(bigPlan(front, 100)), "have room for 16 destinations of each family", "too many")
	}
	must.OK(t, r.Apply(bigPlan(front, 4)))
	steering.Expect(t, lab.Client, web4, front.Says(web4))
}

// mostSlower is how much more processor time a single change may take with 10,000
// services than with 10.
const mostSlower = 10

// processorTime is what this process has used. Other programs do not change it.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var at unix.Timespec
	must.OK(t, unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &at))
	return time.Duration(at.Nano())
}

// A single change must not cost more the more services there are.
func TestManyServices(t *testing.T) {
	const many, few = 10000, 10
	lab := netns.NewLab(t, 0)
	front, other := steering.NewFront(t, lab.Node, "front"), steering.NewFront(t, lab.Node, "other")
	apply := func(r *Redirector, p redirect.Plan) time.Duration {
		t.Helper()
		start := processorTime(t)
		must.OK(t, r.Apply(p))
		return processorTime(t) - start
	}
	// changes gives the median time of a change to a plan, and back.
	changes := func(r *Redirector, with redirect.Plan) time.Duration {
		without := with
		without.Steer = without.Steer.Without(web4)
		without.Refuse = without.Refuse.With(web4, struct{}{})
		var took []time.Duration
		for range 10 {
			took = append(took, apply(r, without), apply(r, with))
		}
		slices.Sort(took)
		return took[len(took)/2]
	}
	small, large, moved := bigPlan(front, few), bigPlan(front, many), bigPlan(other, many)
	r := newRedirector(t, lab.Node)
	defer r.Close()
	var ratios []float64
	var first, quick, slow time.Duration
	for range 3 {
		apply(r, small)
		quick = changes(r, small)
		first = apply(r, large)
		slow = changes(r, large)
		ratios = append(ratios, float64(slow)/float64(quick))
	}
	slices.Sort(ratios)
	if got := ratios[len(ratios)/2]; got > mostSlower {
		t.Errorf("one change with %d services takes %.1f times what it takes with %d (%v and %v at last), want at most %d times",
			many, got, few, slow, quick, mostSlower)
	}
	r.unread = 0
	start := processorTime(t)
	if repaired, err := r.Verify(); repaired || err != nil {
		t.Errorf("verify: %v, %v", repaired, err)
	}
	verify := processorTime(t) - start
	t.Logf("%d services of two families, processor time: first %v, one change %v, %.1f times that of %d services, verify %v, all to other sockets %v",
		many, first, slow, ratios[len(ratios)/2], few, verify, apply(r, moved))
	for d, f := range map[service.Destination]*steering.Front{web4: other, web6: other} {
		steering.Expect(t, lab.Client, d, f.Says(d))
	}
}
