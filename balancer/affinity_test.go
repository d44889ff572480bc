package balancer

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/race"
)

const second = int64(time.Second)

// connect simulates a connection of the client at a time at which the endpoints in
// dead do not answer. It returns the address of the endpoint that answered.
func connect(t *testing.T, b *Balancer, list []service.Endpoint, who netip.Addr, now int64, dead ...service.Endpoint) (netip.AddrPort, Affinity) {
	t.Helper()
	var d Dial
	for {
		i, pause, ok := b.Next(&d, list, conn(who), now)
		if !ok {
			return netip.AddrPort{}, d.Affinity()
		}
		if i == Pause {
			now += int64(pause)
			continue
		}
		ep := list[i].Addr
		if slices.ContainsFunc(dead, func(e service.Endpoint) bool { return e.Addr == ep }) {
			b.Failed(&d, ep, who, now)
			continue
		}
		b.Connected(&d, ep, who, now)
		return ep, d.Affinity()
	}
}

func expect(t *testing.T, what string, ep netip.AddrPort, got Affinity, wantEP netip.AddrPort, want Affinity) {
	t.Helper()
	if ep != wantEP || got != want {
		t.Errorf("%s: %v, affinity %d; want %v, %d", what, ep, got, wantEP, want)
	}
}

func without(list []service.Endpoint, ep netip.AddrPort) []service.Endpoint {
	return slices.DeleteFunc(slices.Clone(list), func(e service.Endpoint) bool { return e.Addr == ep })
}

func TestA5_1KeyIsTheClientsAddress(t *testing.T) {
	b := New(Options{AffinityTimeout: time.Hour})
	list := endpoints(50)
	pins := make(map[netip.Addr]netip.AddrPort)
	for i := range 200 {
		who := client(i)
		ep, got := connect(t, b, list, who, 0)
		must.Equalf(t, got, AffinityNew, "client %v at first", who)
		pins[who] = ep
	}
	for range 15 { // A5.8: 15 hits in a row
		for who, want := range pins {
			ep, got := connect(t, b, list, who, 0)
			expect(t, who.String(), ep, got, want, AffinityHit)
		}
	}
	// The families of one client's addresses are clients of their own.
	v6 := netip.MustParseAddr("fd00::9")
	list6 := endpoints6(50)
	want, got := connect(t, b, list6, v6, 0)
	check.Equalf(t, got, AffinityNew, "IPv6 client: affinity")
	ep, got := connect(t, b, list6, v6, 0)
	expect(t, "IPv6 client", ep, got, want, AffinityHit)
}

func TestA5_2WindowSlides(t *testing.T) {
	b := New(Options{AffinityTimeout: 10 * time.Second})
	list := endpoints(50)
	want, _ := connect(t, b, list, someone, 0)
	now := int64(0)
	for range 20 { // each connection begins the window anew
		now += 10*second - 1
		ep, got := connect(t, b, list, someone, now)
		expect(t, fmt.Sprint("at ", time.Duration(now)), ep, got, want, AffinityHit)
	}
	now += 10 * second
	if _, got := connect(t, b, list, someone, now); got != AffinityNew {
		t.Errorf("after the window: affinity %d", got)
	}
	check.Equalf(t, b.Pins(), PinStats{Pins: 1, Expired: 1}, "stats")
}

func TestA5_3PinnedEndpointIsNoCandidate(t *testing.T) {
	b := New(Options{AffinityTimeout: time.Hour})
	list := endpoints(5)
	old, _ := connect(t, b, list, someone, 0)
	rest := without(list, old)
	want, got := connect(t, b, rest, someone, 1)
	if want == old || got != AffinityMoved {
		t.Errorf("moved to %v, affinity %d", want, got)
	}
	// The new pin holds, also when the old one is a candidate again.
	for _, candidates := range [][]service.Endpoint{rest, list, rest} {
		ep, got := connect(t, b, candidates, someone, 2)
		expect(t, "afterwards", ep, got, want, AffinityHit)
	}
}

// The fresh choice after a pin was lost is not always the same one.
func TestA5_3FreshChoiceIsSpread(t *testing.T) {
	b := New(Options{AffinityTimeout: time.Hour, Algorithm: Random, Seed: 5})
	list := endpoints(5)
	counts := make([]int, 5)
	for i := range 5000 {
		who := client(i)
		old, _ := connect(t, b, list[:1], who, 0)
		ep, _ := connect(t, b, without(list, old), who, 0)
		counts[slices.IndexFunc(list, func(e service.Endpoint) bool { return e.Addr == ep })]++
	}
	uniform(t, "second choices", counts[1:])
}

func TestA5_5SwitchedOffAndOn(t *testing.T) {
	b := New(Options{AffinityTimeout: time.Hour})
	list := endpoints(4)
	connect(t, b, list, someone, 0)
	b.Configure(Options{})
	check.Equalf(t, b.Pins().Pins, 0, "pins without affinity")
	seen := make(map[netip.AddrPort]bool)
	for range 8 {
		ep, got := connect(t, b, list, someone, 1)
		check.Equalf(t, got, AffinityNone, "without affinity: affinity")
		seen[ep] = true
	}
	if len(seen) != 4 { // A5.8: the switch is seen at once
		t.Errorf("without affinity %d of 4 endpoints are used", len(seen))
	}
	b.Configure(Options{AffinityTimeout: time.Hour})
	want, got := connect(t, b, list, someone, 2)
	check.Equalf(t, got, AffinityNew, "switched on again: affinity")
	ep, got := connect(t, b, list, someone, 3)
	expect(t, "switched on again", ep, got, want, AffinityHit)
}

func TestA5_5TimeoutChanges(t *testing.T) {
	b := New(Options{AffinityTimeout: 100 * time.Second})
	list := endpoints(50)
	want, _ := connect(t, b, list, someone, 0)
	b.Configure(Options{AffinityTimeout: 10 * time.Second})
	ep, got := connect(t, b, list, someone, 9*second)
	expect(t, "within the shorter window", ep, got, want, AffinityHit)
	if _, got = connect(t, b, list, someone, 19*second); got != AffinityNew {
		t.Errorf("after the shorter window: affinity %d", got)
	}
	want, _ = connect(t, b, list, someone, 20*second)
	b.Configure(Options{AffinityTimeout: 1000 * time.Second})
	ep, got = connect(t, b, list, someone, 1019*second)
	expect(t, "within the longer window", ep, got, want, AffinityHit)
}

func TestA5_7FailingEndpointLosesThePin(t *testing.T) {
	b := New(Options{AffinityTimeout: time.Hour})
	list := endpoints(4)
	old, _ := connect(t, b, list, someone, 0)
	dead := list[slices.IndexFunc(list, func(e service.Endpoint) bool { return e.Addr == old })]
	want, got := connect(t, b, list, someone, 1, dead)
	if want == old || got != AffinityMoved {
		t.Errorf("pinned endpoint dead: %v, affinity %d", want, got)
	}
	for range 5 {
		ep, got := connect(t, b, list, someone, 2)
		expect(t, "after the retry", ep, got, want, AffinityHit)
	}

	// None answers: no pin stays behind.
	if ep, _ := connect(t, b, list, someone, 3, list...); ep.IsValid() {
		t.Fatal("a dead endpoint answered")
	}
	check.Equalf(t, b.Pins().Pins, 0, "pins after all have failed")
	if _, got := connect(t, b, list, someone, 4); got != AffinityNew {
		t.Errorf("after all have failed: affinity %d", got)
	}
}

// The outcome that the record gets.
func TestAffinityOutcomes(t *testing.T) {
	list := endpoints(2)
	pinTo := func(b *Balancer, i int) { b.Connected(&Dial{}, list[i].Addr, someone, 0) }
	for _, tt := range []struct {
		name     string
		pinned   int // -1 = not at all
		list     []service.Endpoint
		failures int
		want     Affinity
	}{
		{"not pinned", -1, list, 0, AffinityNew},
		{"not pinned, the first fails", -1, list, 1, AffinityNew},
		{"pinned", 0, list, 0, AffinityHit},
		{"pinned, fails", 0, list, 1, AffinityMoved},
		{"pinned, fails, the other too, back", 0, list, 2, AffinityHit},
		{"pinned, not a candidate", 0, list[1:], 0, AffinityMoved},
		{"pinned, not a candidate, fails", 0, list[1:], 1, AffinityMoved},
		{"pinned, alone, fails once", 0, list[:1], 1, AffinityHit},
	} {
		b := New(Options{AffinityTimeout: time.Hour})
		if tt.pinned >= 0 {
			pinTo(b, tt.pinned)
		}
		var d Dial
		now := int64(0)
		for range tt.failures {
			i, _, _ := b.Next(&d, tt.list, conn(someone), now)
			b.Failed(&d, tt.list[i].Addr, someone, now)
		}
		i, pause, ok := b.Next(&d, tt.list, conn(someone), now)
		if i == Pause {
			i, _, ok = b.Next(&d, tt.list, conn(someone), now+int64(pause))
		}
		if !ok || i == Pause || d.Affinity() != tt.want {
			t.Errorf("%s: affinity %d, want %d", tt.name, d.Affinity(), tt.want)
		}
	}
}

// A client opens several connections at once: those that are chosen while the first
// is dialing follow it. A failure of one of them does not drop a pin that another
// one has moved meanwhile.
func TestConnectionsAtTheSameTime(t *testing.T) {
	b := New(Options{AffinityTimeout: time.Hour})
	list := endpoints(10)
	var d1, d2, d3 Dial
	i1, _, _ := b.Next(&d1, list, conn(someone), 0)
	i2, _, _ := b.Next(&d2, list, conn(someone), 0)
	if i1 != i2 || d2.Affinity() != AffinityHit {
		t.Fatalf("the second went to %d, the first to %d", i2, i1)
	}
	b.Failed(&d1, list[i1].Addr, someone, 0)
	i1, _, _ = b.Next(&d1, list, conn(someone), 0)
	b.Failed(&d2, list[i2].Addr, someone, 0)
	i2, _, _ = b.Next(&d2, list, conn(someone), 0)
	if i1 != i2 || d2.Affinity() != AffinityMoved {
		t.Errorf("after the failure the second went to %d, the first to %d", i2, i1)
	}
	b.Connected(&d1, list[i1].Addr, someone, 0)
	if i3, _, _ := b.Next(&d3, list, conn(someone), 0); i3 != i1 || d3.Affinity() != AffinityHit {
		t.Errorf("the third went to %d, the first to %d", i3, i1)
	}
}

func TestOldestPinGoesFirst(t *testing.T) {
	b := New(Options{AffinityTimeout: time.Hour, MaxPins: 3})
	list := endpoints(50)
	pins := make(map[int]netip.AddrPort)
	for i := range 3 {
		pins[i], _ = connect(t, b, list, client(i), int64(i))
	}
	connect(t, b, list, client(0), 3) // now 1 is the oldest
	connect(t, b, list, client(3), 4)
	check.Equalf(t, b.Pins(), PinStats{Pins: 3, Evicted: 1}, "stats")
	for _, i := range []int{0, 2} {
		ep, got := connect(t, b, list, client(i), 5)
		expect(t, fmt.Sprint("client ", i), ep, got, pins[i], AffinityHit)
	}
	if _, got := connect(t, b, list, client(1), 6); got != AffinityNew {
		t.Errorf("the oldest: affinity %d", got)
	}
}

// The bound holds, whatever the clients.
func TestPinsAreBounded(t *testing.T) {
	for _, maxPins := range []int{1, 2, 100, 3000, DefaultMaxPins} {
		b := New(Options{AffinityTimeout: time.Hour, MaxPins: maxPins})
		list := endpoints(2)
		for i := range maxPins + maxPins/4 + 10 {
			var d Dial
			who := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
			b.Next(&d, list, conn(who), int64(i))
		}
		stats := b.Pins()
		if stats.Pins > maxPins || stats.Pins < maxPins*9/10 || stats.Evicted == 0 {
			t.Errorf("at most %d pins: %+v", maxPins, stats)
		}
	}
}

// modelPin and model are an obvious affinity table: a list in the order of use.
type modelPin struct {
	who  netip.Addr
	ep   netip.AddrPort
	used int64
}

type model struct {
	pins             []modelPin // the one used longest ago first
	limit            int
	window           int64
	evicted, expired uint64
}

func (m *model) find(who netip.Addr) int {
	return slices.IndexFunc(m.pins, func(p modelPin) bool { return p.who == who })
}

// lookup returns the endpoint of a pin that has not expired.
func (m *model) lookup(who netip.Addr, now int64) (netip.AddrPort, bool) {
	i := m.find(who)
	if i < 0 {
		return netip.AddrPort{}, false
	}
	if now-m.pins[i].used >= m.window {
		m.pins = slices.Delete(m.pins, i, i+1)
		m.expired++
		return netip.AddrPort{}, false
	}
	return m.pins[i].ep, true
}

func (m *model) set(who netip.Addr, ep netip.AddrPort, now int64) {
	if i := m.find(who); i >= 0 {
		m.pins = slices.Delete(m.pins, i, i+1)
	} else {
		for k := 0; k < 2 && len(m.pins) > 0 && now-m.pins[0].used >= m.window; k++ {
			m.pins = m.pins[1:]
			m.expired++
		}
		if len(m.pins) == m.limit {
			m.pins = m.pins[1:]
			m.evicted++
		}
	}
	m.pins = append(m.pins, modelPin{who, ep, now})
}

func (m *model) drop(who netip.Addr, ep netip.AddrPort) {
	if i := m.find(who); i >= 0 && m.pins[i].ep == ep {
		m.pins = slices.Delete(m.pins, i, i+1)
	}
}

// The table against the model, by random operations.
func TestAffinityAgainstModel(t *testing.T) {
	for seed := range uint64(race.Fewer(60)) {
		r := rand.New(rand.NewPCG(seed, 1))
		m := &model{limit: 1 + r.IntN(20), window: 50}
		opts := Options{AffinityTimeout: 50, MaxPins: m.limit, Algorithm: Algorithm(r.IntN(2))}
		b := New(opts)
		all := append(endpoints(6), endpoints6(6)...)
		now := int64(0)
		for step := range 3000 {
			now += int64(r.IntN(4))
			who := client(r.IntN(30))
			switch r.IntN(40) {
			case 0: // A5.5
				if m.window = int64(20 + r.IntN(80)); r.IntN(4) == 0 {
					m.window, m.pins = 0, nil
				}
				opts.AffinityTimeout = time.Duration(m.window)
				b.Configure(opts)
			case 1, 2, 3, 4, 5, 6:
				if ep := all[r.IntN(len(all))].Addr; m.window > 0 {
					b.Failed(&Dial{}, ep, who, now)
					m.drop(who, ep)
				}
			default:
				candidates := make([]service.Endpoint, 0, len(all))
				for _, ep := range all {
					if r.IntN(3) > 0 {
						candidates = append(candidates, ep)
					}
				}
				if len(candidates) == 0 {
					continue
				}
				var d Dial
				i, _, ok := b.Next(&d, candidates, conn(who), now)
				if !ok {
					t.Fatalf("seed %d, step %d: nothing proposed", seed, step)
				}
				ep := candidates[i].Addr
				want := AffinityNone
				if m.window > 0 {
					pinned, found := m.lookup(who, now)
					among := slices.ContainsFunc(candidates, func(e service.Endpoint) bool { return e.Addr == pinned })
					switch {
					case !found:
						want = AffinityNew
					case !among:
						want = AffinityMoved
					default:
						want = AffinityHit
						must.Equalf(t, ep, pinned, "seed %d, step %d: the endpoint of %v, which is pinned", seed, step, who)
					}
					m.set(who, ep, now)
				}
				must.Equalf(t, d.Affinity(), want, "seed %d, step %d: affinity", seed, step)
				if other := all[r.IntN(len(all))].Addr; r.IntN(3) == 0 { // one that the model did not expect
					b.Connected(&d, other, who, now)
					if m.window > 0 {
						m.set(who, other, now)
					}
				}
			}
			must.Equalf(t, b.Pins(), (PinStats{len(m.pins), m.evicted, m.expired}), "seed %d, step %d", seed, step)
		}
		if c := b.config.Load(); c.pins != nil {
			sameOrder(t, c.pins, m.pins)
		}
	}
}

// sameOrder compares the order of use, from both ends.
func sameOrder(t *testing.T, table *pinTable, want []modelPin) {
	t.Helper()
	s := &table.shards[0]
	var forward, backward []clientKey
	for at := s.oldest; at != none; at = s.pins[at].prev {
		forward = append(forward, s.pins[at].client)
	}
	for at := s.newest; at != none; at = s.pins[at].next {
		backward = append(backward, s.pins[at].client)
	}
	slices.Reverse(backward)
	var keys []clientKey
	for _, p := range want {
		keys = append(keys, p.who.As16())
	}
	if !slices.Equal(forward, keys) || !slices.Equal(backward, keys) {
		t.Errorf("order of use %v and %v, want %v", forward, backward, keys)
	}
}

// Two loops and a configuration that changes meanwhile; for the race detector.
func TestTwoLoops(t *testing.T) {
	b := New(Options{AffinityTimeout: time.Hour, MaxPins: 64})
	list := endpoints(8)
	var wg sync.WaitGroup
	for loop := range 2 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(loop), 0))
			for now := range int64(20000) {
				var d Dial
				who := client(r.IntN(100))
				candidates := list[r.IntN(4):]
				for {
					i, _, ok := b.Next(&d, candidates, conn(who), now)
					if !ok || i == Pause {
						break
					}
					if r.IntN(4) > 0 {
						b.Connected(&d, candidates[i].Addr, who, now)
						break
					}
					b.Failed(&d, candidates[i].Addr, who, now)
				}
			}
		})
	}
	wg.Go(func() {
		for i := range 200 {
			b.Configure(Options{AffinityTimeout: time.Duration(i%3) * time.Hour, MaxPins: 64, Algorithm: Algorithm(i % 2)})
			b.Pins()
		}
	})
	wg.Wait()
	b.Configure(Options{})
	check.Equalf(t, b.Pins().Pins, 0, "pins counted in no table")
}

// After a hit, nothing is allocated: neither for the connection nor in the table.
func TestNoAllocation(t *testing.T) {
	list := endpoints(100)
	for _, opts := range []Options{{}, {Algorithm: Random}, {AffinityTimeout: time.Hour}} {
		b := New(opts)
		connect(t, b, list, someone, 0)
		if n := testing.AllocsPerRun(100, func() {
			var d Dial
			i, _, _ := b.Next(&d, list, conn(someone), 1)
			b.Connected(&d, list[i].Addr, someone, 1)
		}); n != 0 {
			t.Errorf("%+v: %v allocations", opts, n)
		}
	}
}
