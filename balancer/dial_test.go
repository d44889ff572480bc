package balancer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// behaviour is how an endpoint of the simulated world treats a connection: it
// answers after a time, refuses after a time, or drops it.
type behaviour struct {
	accepts time.Duration // -1 = never
	refuses time.Duration // -1 = never
}

var (
	accepts   = behaviour{0, -1}
	refuses   = behaviour{-1, 0}
	blackHole = behaviour{-1, -1}
)

func slow(d time.Duration) behaviour { return behaviour{d, -1} }

// attempt is one line of what happened.
type attempt struct {
	endpoint int
	at       time.Duration // since the connection's acceptance
	timeout  time.Duration
}

// dialOne simulates one connection. It returns the endpoint that answered, or -1,
// the attempts, and the duration.
func dialOne(b *Balancer, list []service.Endpoint, world func(endpoint int) behaviour) (int, []attempt, time.Duration) {
	var d Dial
	var tried []attempt
	var now time.Duration
	for {
		i, timeout, ok := b.Next(&d, list, conn(someone), int64(now))
		if !ok {
			return -1, tried, now
		}
		if i == Pause {
			now += timeout
			continue
		}
		tried = append(tried, attempt{i, now, timeout})
		if d.Attempts() != len(tried) {
			panic(fmt.Sprintf("%d attempts counted, %d made", d.Attempts(), len(tried)))
		}
		w := world(i)
		switch {
		case w.accepts >= 0 && w.accepts <= timeout:
			now += w.accepts
			b.Connected(&d, list[i].Addr, someone, int64(now))
			return i, tried, now
		case w.refuses >= 0 && w.refuses < timeout:
			now += w.refuses
		default:
			now += timeout
		}
		b.Failed(&d, list[i].Addr, someone, int64(now))
	}
}

func worldOf(behaviours ...behaviour) func(int) behaviour {
	return func(i int) behaviour { return behaviours[i] }
}

func timeouts(tried []attempt) []int64 {
	var list []int64
	for _, a := range tried {
		list = append(list, int64(a.timeout)/ms)
	}
	return list
}

// The plan of the retries: patience by timeouts only, and pauses after refusals.
func TestRetryPlan(t *testing.T) {
	for _, tt := range []struct {
		name     string
		world    []behaviour
		timeouts []int64 // ms
		total    time.Duration
	}{
		{"one that is silent", []behaviour{blackHole}, []int64{250, 500, 1000, 2000}, 3750 * time.Millisecond},
		{"one that refuses", []behaviour{refuses}, slices.Repeat([]int64{250}, 9), 3700 * time.Millisecond},
		{"two that refuse", []behaviour{refuses, refuses}, slices.Repeat([]int64{250}, 10), 3700 * time.Millisecond},
		{"two that are silent", []behaviour{blackHole, blackHole}, []int64{250, 500, 1000, 2000}, 3750 * time.Millisecond},
		{"six that refuse", []behaviour{refuses, refuses, refuses, refuses, refuses, refuses}, slices.Repeat([]int64{250}, 14), 3700 * time.Millisecond},
		{"six that are silent", []behaviour{blackHole, blackHole, blackHole, blackHole, blackHole, blackHole}, []int64{250, 500, 1000, 2000, 250, 250}, 4250 * time.Millisecond},
	} {
		got, tried, took := dialOne(New(Options{}), endpoints(len(tt.world)), worldOf(tt.world...))
		if got != -1 || !slices.Equal(timeouts(tried), tt.timeouts) || took != tt.total {
			t.Errorf("%s: answered %d after %v, timeouts %v; want %v, %v", tt.name, got, took, timeouts(tried), tt.total, tt.timeouts)
		}
	}
}

// A refusal counts as a timeout only after half of the timeout.
func TestLateRefusals(t *testing.T) {
	for _, tt := range []struct {
		after time.Duration
		want  []int64
	}{
		{100 * time.Millisecond, []int64{250, 250, 250, 250}},
		{200 * time.Millisecond, []int64{250, 500, 500, 500}},
		{400 * time.Millisecond, []int64{250, 500, 1000, 1000}},
	} {
		b := New(Options{})
		list := endpoints(4)
		_, tried, _ := dialOne(b, list, func(int) behaviour { return behaviour{-1, tt.after} })
		if got := timeouts(tried); !slices.Equal(got[:4], tt.want) {
			t.Errorf("refusals after %v: timeouts %v, want %v at first", tt.after, got, tt.want)
		}
	}
}

// Promise 1: as long as one candidate accepts, the connection succeeds. All others
// refuse, which costs no time, or drop, as many as the plan's total allows.
func TestPromise1OneCandidateAccepts(t *testing.T) {
	plan := DefaultPlan()
	mostSilent := len(plan.Timeouts) + int((plan.Total-3750*time.Millisecond)/plan.After) - 1
	r := rand.New(rand.NewPCG(1, 1))
	for _, algorithm := range []Algorithm{RoundRobin, Random} {
		for _, affinity := range []time.Duration{0, time.Hour} {
			for range 300 {
				n := 1 + r.IntN(120)
				silent := r.IntN(min(n, mostSilent+1))
				world := make([]behaviour, n)
				for i := range world {
					if world[i] = refuses; i < silent {
						world[i] = blackHole
					}
				}
				world[n-1] = accepts
				r.Shuffle(n, func(i, j int) { world[i], world[j] = world[j], world[i] })
				b := New(Options{Algorithm: algorithm, AffinityTimeout: affinity, Seed: r.Uint64() | 1})
				got, tried, took := dialOne(b, endpoints(n), worldOf(world...))
				if got < 0 || world[got] != accepts {
					t.Fatalf("%v, affinity %v: %d candidates, %d silent: answered by %d after %d attempts and %v", algorithm, affinity, n, silent, got, len(tried), took)
				}
				if silent <= 4 && took > 3750*time.Millisecond {
					t.Fatalf("%d silent ones cost %v", silent, took)
				}
			}
		}
	}
}

// Promise 1 for endpoints that are slow to answer: one that answers within the
// longest timeout is not lost because its turn came while patience was short
// and all others refused.
func TestPromise1SlowCandidate(t *testing.T) {
	for n := 1; n <= 8; n++ {
		for seed := range uint64(40) {
			for _, answersAfter := range []time.Duration{200 * time.Millisecond, 400 * time.Millisecond, 900 * time.Millisecond, 1900 * time.Millisecond} {
				world := make([]behaviour, n)
				for i := range world {
					world[i] = refuses
				}
				world[int(seed)%n] = slow(answersAfter)
				b := New(Options{Seed: seed + 1})
				got, tried, took := dialOne(b, endpoints(n), worldOf(world...))
				if got != int(seed)%n || took > 3750*time.Millisecond {
					t.Fatalf("one of %d answers after %v: answered %d after %v, %v", n, answersAfter, got, took, tried)
				}
			}
		}
	}
}

// Every untried candidate is tried before any is tried twice, and no attempt is
// made after the total.
func TestEveryCandidateOnceBeforeAnyTwice(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	all := []behaviour{refuses, blackHole, {-1, 60 * time.Millisecond}, {-1, 200 * time.Millisecond}, slow(700 * time.Millisecond)}
	for range 2000 {
		n := 1 + r.IntN(70)
		world := make([]behaviour, n)
		for i := range world {
			world[i] = all[r.IntN(len(all))]
		}
		b := New(Options{Algorithm: Algorithm(r.IntN(2)), AffinityTimeout: time.Duration(r.IntN(2)) * time.Hour, Seed: r.Uint64() | 1})
		got, tried, took := dialOne(b, endpoints(n), worldOf(world...))
		seen := make(map[int]bool)
		for k, a := range tried {
			if seen[a.endpoint] && len(seen) < n {
				t.Fatalf("attempt %d of %v repeats %d with %d of %d tried", k, tried, a.endpoint, len(seen), n)
			}
			seen[a.endpoint] = true
			if a.at >= 15*time.Second || a.at+a.timeout > 15*time.Second {
				t.Fatalf("attempt %d at %v with %v", k, a.at, a.timeout)
			}
		}
		if got < 0 && len(tried) < 4 && took < 15*time.Second {
			t.Fatalf("gave up after %d attempts and %v", len(tried), took)
		}
		if got < 0 && len(seen) < n && took < 15*time.Second {
			t.Fatalf("gave up after %v with %d of %d tried", took, len(seen), n)
		}
	}
}

// With several candidates none is tried twice in a row.
func TestRoundsAlternate(t *testing.T) {
	for _, world := range []behaviour{refuses, blackHole} {
		for n := 2; n <= 3; n++ {
			_, tried, _ := dialOne(New(Options{}), endpoints(n), func(int) behaviour { return world })
			for k := 1; k < len(tried); k++ {
				if tried[k].endpoint == tried[k-1].endpoint {
					t.Errorf("%d candidates: %v", n, tried)
				}
			}
		}
	}
}

// The candidates change at each attempt: addresses identify endpoints, not indexes.
func TestCandidatesChangeBetweenAttempts(t *testing.T) {
	b := New(Options{})
	all := endpoints(12)
	r := rand.New(rand.NewPCG(8, 8))
	for range 500 {
		var d Dial
		seen := make(map[string]bool)
		for k := range 12 {
			list := append([]service.Endpoint(nil), all...)
			r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
			if k < 8 { // some are missing for a while
				list = list[:8]
				fresh := slices.ContainsFunc(list, func(ep service.Endpoint) bool { return !seen[ep.Addr.String()] })
				if !fresh {
					continue
				}
			}
			i, _, ok := b.Next(&d, list, conn(someone), 0)
			if !ok {
				break
			}
			name := list[i].Addr.String()
			if seen[name] && len(seen) < 12 {
				t.Fatalf("%s again with %d of 12 tried", name, len(seen))
			}
			seen[name] = true
		}
	}

	// The only candidate goes and another comes.
	var d Dial
	if i, _, ok := b.Next(&d, all[:1], conn(someone), 0); !ok || i != 0 {
		t.Fatal("the first was not proposed")
	}
	if i, _, ok := b.Next(&d, all[1:2], conn(someone), 0); !ok || i != 0 {
		t.Fatal("the second was not proposed")
	}
	if _, _, ok := b.Next(&d, nil, conn(someone), 0); ok {
		t.Fatal("something was proposed of nothing")
	}
}

// An own plan is used as it is, and filled up where it is zero.
func TestOwnPlan(t *testing.T) {
	b := New(Options{Plan: Plan{Timeouts: []time.Duration{time.Second, time.Second}, Total: 2500 * time.Millisecond}})
	_, tried, took := dialOne(b, endpoints(5), func(int) behaviour { return blackHole })
	if want := []int64{1000, 1000, 250, 250}; !slices.Equal(timeouts(tried), want) || took != 2500*time.Millisecond {
		t.Errorf("timeouts %v in %v, want %v in 2.5s", timeouts(tried), took, want)
	}
	b.Configure(Options{Plan: Plan{Total: 300 * time.Millisecond}})
	_, tried, took = dialOne(b, endpoints(5), func(int) behaviour { return blackHole })
	if want := []int64{250, 50}; !slices.Equal(timeouts(tried), want) || took != 300*time.Millisecond {
		t.Errorf("timeouts %v in %v, want %v in 300ms", timeouts(tried), took, want)
	}
}

// An attempt that failed for a reason of our own is not held against the
// endpoint, nor against the plan's steps.
func TestExcuse(t *testing.T) {
	b := New(Options{AffinityTimeout: time.Hour})
	list := endpoints(1)
	var d Dial
	d.Excuse() // nothing yet
	now := time.Duration(0)
	for ; now < 14*time.Second; now += 400 * time.Millisecond {
		_, timeout, ok := b.Next(&d, list, conn(someone), int64(now))
		if !ok || timeout != 250*time.Millisecond || d.Affinity() != AffinityNew {
			t.Fatalf("at %v: timeout %v, affinity %d, ok %v", now, timeout, d.Affinity(), ok)
		}
		d.Excuse()
		d.Excuse() // of the same attempt
	}
	for i, want := range []time.Duration{250 * time.Millisecond, 500 * time.Millisecond} {
		_, timeout, ok := b.Next(&d, list, conn(someone), int64(now))
		if !ok || timeout != min(want, 15*time.Second-now) {
			t.Errorf("attempt %d of the endpoint's own: timeout %v, ok %v", i, timeout, ok)
		}
		now += timeout
	}
	if _, _, ok := b.Next(&d, list, conn(someone), int64(15*time.Second)); ok {
		t.Error("an attempt after the plan's total")
	}
}

// Local ports may be exhausted for one endpoint only: Next proposes the others
// first, even if the client is pinned to that endpoint, and then that endpoint
// again.
func TestExcusedEndpointDoesNotStandInTheWay(t *testing.T) {
	b := New(Options{AffinityTimeout: time.Hour})
	list := endpoints(3)
	b.Connected(&Dial{}, list[1].Addr, someone, 0)
	var d Dial
	tries := [3]int{}
	for k := range 9 {
		i, _, ok := b.Next(&d, list, conn(someone), 0)
		if !ok {
			t.Fatalf("gave up after %d attempts, %v", k, tries)
		}
		if k == 0 != (i == 1) && k < 3 {
			t.Errorf("attempt %d is on %d", k, i)
		}
		tries[i]++
		if i == 1 {
			d.Excuse()
		} else {
			b.Failed(&d, list[i].Addr, someone, 0)
		}
	}
	if tries[0] == 0 || tries[2] == 0 || tries[1] < 3 {
		t.Errorf("tries %v", tries)
	}
	check.Equalf(t, d.Attempts(), 9, "attempts")
}

// TestDialTimeoutsOfAService: the annotation's come in the place of the defaults.
func TestDialTimeoutsOfAService(t *testing.T) {
	opts := must.Get(Options{Plan: DefaultPlan()}.For(&service.Port{Annotations: map[string]string{"dial-timeouts": "2s, 3s"}}))(t)
	b, list := New(opts), endpoints(3)
	var d Dial
	now := time.Duration(0)
	for attempt, want := range []time.Duration{2 * time.Second, 3 * time.Second, 250 * time.Millisecond} {
		_, patience, ok := b.Next(&d, list, conn(someone), int64(now))
		if !ok || patience != want {
			t.Errorf("attempt %d has %s, want %s", attempt+1, patience, want)
		}
		now += patience
	}
	for _, wrong := range []string{"", "1", "0s", "16s", "1s,,2s", "1s,1s,1s,1s,1s,1s,1s,1s,1s,1s,1s,1s,1s,1s,1s,1s,1s"} {
		if list, err := parseTimeouts(wrong); err == nil {
			t.Errorf("%q: %v", wrong, list)
		}
	}
}
