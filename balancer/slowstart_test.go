package balancer

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/race"
)

// slowPort returns a service port with slow start and the endpoints of a list.
func slowPort(list []service.Endpoint) *service.Port {
	p := &service.Port{SlowStart: 30 * time.Second}
	p.Families[service.IPv4].Endpoints = list
	return p
}

// ready gives a list of n endpoints with pods of the given UIDs.
func ready(uids ...string) []service.Endpoint {
	list := endpoints(len(uids))
	for i := range list {
		list[i].Ready, list[i].PodUID = true, service.UIDOf(uids[i])
	}
	return list
}

// TestSlowStartShares: a new endpoint beside four others gets, of the connections at a moment,
// what the model says: its weight times the part of the window that has passed, at least a
// twentieth, by all weights so.
func TestSlowStartShares(t *testing.T) {
	const begin, window = int64(time.Hour), 30 * time.Second
	for a := range Algorithm(race.Fewer(len(algorithms))) {
		if a == DestinationHash {
			continue // one destination has one endpoint
		}
		for _, part := range []float64{0, 0.25, 0.5, 0.75, 1} {
			t.Run(fmt.Sprint(a, part), func(t *testing.T) {
				loads := &Loads{}
				list := weighted(ready("a", "b", "c", "d"), 3)
				opts := Options{Algorithm: a, Loads: loads, Port: slowPort(list), Seed: 5, Now: begin}
				b := New(opts)
				list = weighted(ready("a", "b", "c", "d", "new"), 3)
				opts.Port = slowPort(list)
				b.Configure(opts)
				now := begin + int64(part*float64(window))
				// The model: all have weight 3.
				share := max(part, 1.0/20)
				want := share / (4 + share)
				const connections = 20000
				var counts [5]int
				var open []int
				r := rand.New(rand.NewPCG(1, 2))
				for n := range connections {
					var d Dial
					i, _, ok := b.Next(&d, list, conn(client(n)), now)
					if !ok {
						t.Fatal("no endpoint")
					}
					counts[i]++
					loads.Of(list[i].Addr).Begin()
					open = append(open, i)
					if len(open) > 500 { // a random one ends
						k := r.IntN(len(open))
						loads.Of(list[open[k]].Addr).End()
						open[k] = open[len(open)-1]
						open = open[:len(open)-1]
					}
				}
				got := float64(counts[4]) / connections
				t.Logf("share %.4f, model %.4f, connections %v", got, want, counts)
				tolerance := 5*math.Sqrt(want/connections) + 0.005 // maglev's and hashes' shares are not exact
				if a == Maglev || a == SourceHash {
					tolerance += 0.01
				}
				if math.Abs(got-want) > tolerance {
					t.Errorf("share %.4f, want %.4f +- %.4f", got, want, tolerance)
				}
			})
		}
	}
}

// TestSlowStartWithoutConnections: where all endpoints are idle, algorithms that compare
// connections give a new one its share too.
func TestSlowStartWithoutConnections(t *testing.T) {
	for _, a := range []Algorithm{LeastConnections, PowerOfTwo, WeightedLeastConnections, ShortestExpectedDelay, NeverQueue} {
		opts := Options{Algorithm: a, Port: slowPort(ready("a", "b", "c")), Seed: 5, Now: 1}
		b := New(opts)
		list := ready("a", "b", "c", "new")
		opts.Port = slowPort(list)
		b.Configure(opts)
		last := 0.0
		for _, at := range []time.Duration{0, 15 * time.Second, 30 * time.Second} {
			const connections = 10000
			n := 0
			for range connections {
				var d Dial
				if i, _, _ := b.Next(&d, list, Conn{}, 1+int64(at)); i == 3 {
					n++
				}
			}
			share := float64(n) / connections
			t.Logf("%s after %s: %.3f", a, at, share)
			if at > 0 && share <= last || share > 0.27 || at == 30*time.Second && share < 0.23 {
				t.Errorf("%s after %s: share %.3f, before %.3f", a, at, share, last)
			}
			last = share
		}
	}
}

// TestSlowStartOfPods: what begins slowly is a pod that becomes ready beside others, by its UID.
func TestSlowStartOfPods(t *testing.T) {
	const second = int64(time.Second)
	opts := Options{Seed: 1}
	var b *Balancer
	shares := func(what string, at int64, list []service.Endpoint, want ...uint64) {
		t.Helper()
		if opts.Port, opts.Now = slowPort(list), at; b == nil {
			b = New(opts)
		} else {
			b.Configure(opts)
		}
		for i := range list {
			got := uint64(fullShare)
			if s := b.config.Load().starting(at); s != nil {
				got = s.share(list[i].Addr, at)
			}
			if got != want[i] {
				t.Errorf("%s: endpoint %d has the share %d of %d, want %d", what, i, got, fullShare, want[i])
			}
		}
	}
	const full, least = fullShare, leastShare
	unready := func(list []service.Endpoint, i int) []service.Endpoint {
		list[i].Ready = false
		return list
	}
	shares("a Service that is new", 1*second, ready("a", "b"), full, full)
	shares("a pod beside them that is not ready", 2*second, unready(ready("a", "b", "c"), 2), full, full, full)
	shares("it is ready", 12*second, ready("a", "b", "c"), full, full, least)
	shares("half of the time is over", 27*second, ready("a", "b", "c"), full, full, full/2)
	shares("it is not ready for a moment", 34*second, unready(ready("a", "b", "c"), 2), full, full, 750)
	shares("it is ready again", 35*second, ready("a", "b", "c"), full, full, 785)
	shares("its time is over", 42*second, ready("a", "b", "c"), full, full, full)
	check.Equalf(t, b.StartsUntil(), 0, "something still starts")
	shares("another pod has its address", 50*second, ready("a", "b", "d"), full, full, least)
	if b.StartsUntil() != 80*second {
		t.Errorf("all have their share at %d s", b.StartsUntil()/second)
	}
	shares("all pods are replaced", 60*second, ready("x", "y", "z"), least, least, least)
	shares("no pod is left", 61*second, nil)
	shares("the first ones after none", 62*second, ready("k", "l"), full, full)
	list := ready("", "", "")
	shares("endpoints without pods", 63*second, list[:2], least, least)
	shares("another address", 100*second, list, full, full, least)
	opts.Port = &service.Port{}
	b.Configure(opts)
	shares("the annotation is new", 101*second, ready("", "", "", ""), full, full, full, full)
}

// TestClientsMoveOnce: by a hash, a client goes to the new endpoint from some moment on, and else
// stays where it was.
func TestClientsMoveOnce(t *testing.T) {
	for _, a := range []Algorithm{SourceHash, Maglev} {
		opts := Options{Algorithm: a, Port: slowPort(ready("a", "b", "c")), Seed: 5, Now: 1}
		b := New(opts)
		list := ready("a", "b", "c", "new")
		opts.Port = slowPort(list)
		b.Configure(opts)
		moved := 0
		for n := range 500 {
			was, moves := -1, 0
			for at := range 31 {
				var d Dial
				i, _, _ := b.Next(&d, list, conn(client(n)), 1+int64(at)*int64(time.Second))
				if was >= 0 && i != was {
					if moves++; i != 3 {
						t.Fatalf("%s: a client moves from %d to %d", a, was, i)
					}
				}
				was = i
			}
			if moves > 1 {
				t.Fatalf("%s: a client moves %d times", a, moves)
			}
			moved += moves
		}
		if moved < 60 {
			t.Errorf("%s: %d of 500 clients move to the new endpoint", a, moved)
		}
	}
}
