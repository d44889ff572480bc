package balancer

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/race"
)

// world is endpoints that change with time, for many connections of one
// balancer.
type world struct {
	b    *Balancer
	list []service.Endpoint
	at   func(endpoint int, now time.Duration) behaviour
}

// connect plays one connection that begins at a time: the endpoint that
// answered, or -1, what was tried, and how long it took.
func (w *world) connect(start time.Duration, who netip.Addr) (answered int, tried []attempt, took time.Duration) {
	var d Dial
	for now := start; ; {
		i, wait, ok := w.b.Next(&d, w.list, conn(who), int64(now))
		if !ok {
			return -1, tried, now - start
		}
		if i == Pause {
			now += wait
			continue
		}
		tried = append(tried, attempt{i, now - start, wait})
		switch is := w.at(i, now); {
		case is.accepts >= 0 && is.accepts <= wait:
			w.b.Connected(&d, w.list[i].Addr, who, int64(now+is.accepts))
			return i, tried, now + is.accepts - start
		case is.refuses >= 0 && is.refuses < wait:
			now += is.refuses
		default:
			now += wait
		}
		w.b.Failed(&d, w.list[i].Addr, who, int64(now))
	}
}

func times(tried []attempt) (list []time.Duration) {
	for _, a := range tried {
		list = append(list, a.at)
	}
	return list
}

// Endpoints that refuse are tried again until shortly before the plan's 3.75 s
// are over.
func TestRefusalsAreSpacedOut(t *testing.T) {
	want := []time.Duration{0, 50, 150, 350, 750, 1500, 2250, 3000, 3700}
	for i := range want {
		want[i] *= time.Millisecond
	}
	w := world{New(Options{}), endpoints(1), func(int, time.Duration) behaviour { return refuses }}
	for start := time.Duration(0); start < time.Minute; start += 7 * time.Second {
		answered, tried, took := w.connect(start, someone)
		if got := times(tried); answered >= 0 || !slices.Equal(got, want) || took != 3700*time.Millisecond {
			t.Errorf("at %v: answered %d after %v, attempts at %v, want %v", start, answered, took, got, want)
		}
	}
}

// Promise 1: a restart of all endpoints at once, for less than the plan's time,
// fails no connection, whenever it begins.
func TestPromise1RestartOfAllEndpointsFailsNoConnection(t *testing.T) {
	for n := 1; n <= 3; n++ {
		for _, affinity := range []time.Duration{0, time.Hour} {
			w := world{New(Options{AffinityTimeout: affinity}), endpoints(n), nil}
			const down = 600 * time.Millisecond
			w.at = func(_ int, now time.Duration) behaviour {
				if now%(10*time.Second) < down {
					return refuses
				}
				return accepts
			}
			for start := time.Duration(0); start < time.Minute; start += 13 * time.Millisecond {
				answered, tried, took := w.connect(start, client(int(start/time.Millisecond)))
				if answered < 0 || took > 800*time.Millisecond {
					t.Fatalf("%d endpoints, affinity %v, at %v: answered %d after %v, %v", n, affinity, start, answered, took, tried)
				}
			}
		}
	}
}

// The only endpoint that lives restarts beside one that is silent.
func TestPromise1RestartBesideASilentEndpoint(t *testing.T) {
	for seed := range uint64(50) {
		w := world{New(Options{Seed: seed + 1}), endpoints(2), func(i int, now time.Duration) behaviour {
			if i == 0 {
				return blackHole
			}
			if now < 600*time.Millisecond {
				return refuses
			}
			return accepts
		}}
		if answered, tried, took := w.connect(0, someone); answered != 1 || took > 2*time.Second {
			t.Errorf("seed %d: answered %d after %v, %v", seed, answered, took, tried)
		}
	}
}

// Beside an endpoint that drops, few connections wait for its timeout, however many
// come. When it answers again, it soon gets its share.
func TestSilentEndpointDelaysFewConnections(t *testing.T) {
	for _, n := range []int{2, 3, 10, race.Fewer(1000)} {
		for _, algorithm := range []Algorithm{RoundRobin, Random} {
			silent := true
			w := world{New(Options{Algorithm: algorithm}), endpoints(n), func(i int, _ time.Duration) behaviour {
				if i == 0 && silent {
					return blackHole
				}
				return accepts
			}}
			delayed, now := 0, time.Duration(0)
			for range 200 * n / 2 {
				now += 100 * time.Millisecond * 2 / time.Duration(n)
				answered, _, took := w.connect(now, someone)
				if answered <= 0 {
					t.Fatalf("answered %d", answered)
				}
				if took > 0 {
					delayed++
				}
			}
			// 20 s: after 0, 0.5, 1.5, 3.5, 7.5 and 15.5 s at the earliest.
			if delayed < 1 || delayed > 6 {
				t.Errorf("%v, %d endpoints: %d connections were delayed", algorithm, n, delayed)
			}
			silent = false
			now += longestSuspicion
			counts := make([]int, n)
			for range 100 * n {
				now += time.Millisecond
				answered, _, _ := w.connect(now, someone)
				counts[answered]++
			}
			if counts[0] < 50 {
				t.Errorf("%v, %d endpoints: %d of %d connections went to the one that is back", algorithm, n, counts[0], 100*n)
			}
		}
	}
}

// Endpoints that failed for others are tried if there are no others: at once by
// each connection, and each endpoint has a chance.
func TestSuspectsAreTriedWhenAllAre(t *testing.T) {
	for _, n := range []int{1, 2, 5} {
		alive := -1
		w := world{New(Options{}), endpoints(n), func(i int, _ time.Duration) behaviour {
			if i == alive {
				return accepts
			}
			return refuses
		}}
		if answered, _, _ := w.connect(0, someone); answered >= 0 {
			t.Fatal("one that refuses has answered")
		}
		// All are suspected now, and one of them comes back.
		now := 3700*time.Millisecond + 1
		for k := range 40 * n {
			alive = k % n
			answered, tried, took := w.connect(now, client(k))
			if answered != alive || took > 3*time.Second || tried[0].at != 0 {
				t.Fatalf("%d endpoints: answered %d after %v, %v; want %d", n, answered, took, tried, alive)
			}
			now += took
		}
	}
}

// One connection's attempts are bounded, and a thousand endpoints that refuse
// cost a few attempts for each connection.
func TestAttemptsOfOneConnectionAreBounded(t *testing.T) {
	for _, n := range []int{100, 1000} {
		w := world{New(Options{}), endpoints(n), func(int, time.Duration) behaviour { return refuses }}
		most, total := 0, 0
		connections := race.Fewer(500)
		for k := range connections {
			answered, tried, took := w.connect(time.Duration(k)*10*time.Millisecond, someone)
			if answered >= 0 || took != 3700*time.Millisecond {
				t.Fatalf("%d endpoints: answered %d after %v", n, answered, took)
			}
			most, total = max(most, len(tried)), total+len(tried)
		}
		if bound := DefaultPlan().AtOnce + 8; most > bound {
			t.Errorf("%d endpoints: %d attempts of one connection, want at most %d", n, most, bound)
		}
		// Nine of its own, and its part of finding each endpoint closed, at most
		// five times in 5 + 3.7 s. The keys of the hash differ in each process: an
		// endpoint for which its bucket has no room costs each connection an attempt.
		if bound := connections*(9+withoutRoom(&w)) + 5*n; total > bound {
			t.Errorf("%d endpoints: %d attempts of %d connections, want at most %d", n, total, connections, bound)
		}
	}
}

// withoutRoom counts the endpoints beyond what their buckets of suspects hold.
func withoutRoom(w *world) (n int) {
	in := make(map[*bucket]int)
	for i := range w.list {
		b, _ := w.b.suspects.Load().bucket(endpointKey(w.list[i].Addr))
		if in[b]++; in[b] > len(b) {
			n++
		}
	}
	return n
}

// Many simultaneous failures count once, and only one connection tries whether the
// endpoint is back.
func TestOneConnectionTriesASuspect(t *testing.T) {
	b := New(Options{})
	ep := endpoints(1)[0].Addr
	key := endpointKey(ep)
	now := int64(0)
	for doubled := range 8 {
		for range 50 {
			b.suspect(ep, 1, now)
		}
		period := int64(min(firstSuspicion<<doubled, longestSuspicion))
		if !b.suspected(key, now+period-2<<unitBits) || b.take(key, now+period-2<<unitBits) {
			t.Fatalf("after %d failures it is not suspected for %v", doubled+1, time.Duration(period))
		}
		now += period + 1<<unitBits
		if b.suspected(key, now) {
			t.Fatalf("after %d failures it is suspected for more than %v", doubled+1, time.Duration(period))
		}
		var mu sync.Mutex
		var wg sync.WaitGroup
		taken := 0
		for range 8 {
			wg.Go(func() {
				if b.take(key, now) {
					mu.Lock()
					taken++
					mu.Unlock()
				}
			})
		}
		if wg.Wait(); taken != 1 {
			t.Fatalf("%d of 8 connections try it", taken)
		}
	}
	b.clear(ep)
	if b.suspected(key, now) || !b.take(key, now) || !b.take(key, now) {
		t.Error("it answered, and is suspected")
	}
}

// The table's memory is bounded. It may forget endpoints, but does not mix them up.
func TestSuspectsAreBounded(t *testing.T) {
	b := New(Options{})
	r := rand.New(rand.NewPCG(1, 2))
	all := append(endpoints(30000), endpoints6(30000)...)
	for range race.Fewer(100000) {
		b.suspect(all[r.IntN(len(all)/2)*2].Addr, 16, 0)
	}
	check.Equalf(t, len(*b.suspects.Load()), mostBuckets, "buckets")
	wrong := 0
	for i := 1; i < len(all); i += 2 {
		if b.suspected(endpointKey(all[i].Addr), 1) {
			wrong++
		}
	}
	if wrong > 10 { // tags of 20 bits
		t.Errorf("%d endpoints that never failed are suspected", wrong)
	}
	small := New(Options{})
	small.suspect(all[0].Addr, 1, 0)
	check.Equalf(t, len(*small.suspects.Load()), leastBuckets, "buckets for one endpoint")
}

// A5.3, A5.7: a client stays with the endpoint that it is pinned to until it
// fails for this client itself.
func TestA5_7OthersFailuresMoveNoClient(t *testing.T) {
	b := New(Options{AffinityTimeout: time.Hour})
	list := endpoints(3)
	want, _ := connect(t, b, list, someone, 0)
	for k := range 20 {
		b.Failed(&Dial{}, want, client(100+k), 1)
	}
	ep, got := connect(t, b, list, someone, 2)
	expect(t, "after others' failures", ep, got, want, AffinityHit)

	// New clients are not pinned to it meanwhile.
	b.Failed(&Dial{}, want, client(100), 3)
	for k := range 50 {
		if ep, _ := connect(t, b, list, client(100+k), 4); ep == want {
			t.Fatalf("client %d was pinned to an endpoint that had just failed", k)
		}
	}
}
