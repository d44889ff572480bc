package balancer

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// learns returns a Balancer that takes over what another one has learnt, as it travels.
func learns(t *testing.T, from *Balancer, opts Options, now int64) *Balancer {
	t.Helper()
	p := must.Get(json.Marshal(from.Learnt(now)))(t)
	var l Learnt
	must.OK(t, json.Unmarshal(p, &l))
	b := New(opts)
	b.Learn(&l, now)
	return b
}

// TestTurnsMove: round-robin goes on in another process with the endpoint that is next, for each list
// of its own.
func TestTurnsMove(t *testing.T) {
	for _, a := range []Algorithm{RoundRobin, WeightedRoundRobin} {
		list := weighted(endpoints(7), 1, 3)
		lists := [][]service.Endpoint{list, list[1:], endpoints6(5)}
		opts, same := Options{Algorithm: a, Seed: 7}, Options{Algorithm: a, Seed: 7}
		from, model := New(opts), New(same)
		for round := range 20 {
			for k, list := range lists {
				for range k + 1 + round%3 {
					got, _ := first(t, from, list, someone, 0)
					if want, _ := first(t, model, list, someone, 0); got != want && a == RoundRobin {
						t.Fatalf("%v, round %d: endpoint %d of list %d, want %d", a, round, got, k, want)
					}
				}
			}
			from = learns(t, from, Options{Algorithm: a, Seed: uint64(100 + round)}, 0)
		}
		if a == RoundRobin {
			continue
		}
		// Each round of all turns has each endpoint as often as its weight says.
		var counts [7]int
		sum := 0
		for i := range list {
			sum += int(list[i].Weight)
		}
		for n := range 3 * sum {
			i, _ := first(t, from, list, someone, 0)
			counts[i]++
			if n%5 == 4 {
				from = learns(t, from, opts, 0)
			}
		}
		for i, n := range counts {
			check.Equalf(t, n, 3*int(list[i].Weight), "%v: turns of endpoint %d in three rounds", a, i)
		}
	}
}

// TestSuspectsMove: an endpoint that has failed is skipped in another process for the rest of its
// time, and then tried by one connection.
func TestSuspectsMove(t *testing.T) {
	list := endpoints(3)
	port := &service.Port{}
	port.Families[service.IPv4].Endpoints = list
	opts := Options{Port: port, Seed: 1}
	from := New(opts)
	now := int64(time.Hour)
	from.suspect(list[1].Addr, 2, now)
	moved := now + int64(firstSuspicion)/2
	to := learns(t, from, opts, moved)
	key := endpointKey(list[1].Addr)
	if !to.suspected(key, now+int64(firstSuspicion)-int64(3*time.Millisecond)) {
		t.Error("it is not skipped any more")
	}
	if now += int64(firstSuspicion); to.suspected(key, now) || !to.take(key, now) || to.take(key, now) {
		t.Error("it is not tried by one connection when its time is over")
	}
	if to.suspected(endpointKey(list[0].Addr), moved) {
		t.Error("another one is suspected")
	}
	now += int64(2 * firstSuspicion)
	third := learns(t, to, opts, now)
	if third.suspected(key, now) || !third.take(key, now) || !third.suspected(key, now+int64(4*firstSuspicion)-int64(3*time.Millisecond)) {
		t.Error("the next period is not twice as long")
	}
	to.clear(list[1].Addr)
	if l := to.Learnt(now); len(l.Endpoints) != 0 {
		t.Errorf("of one that answered: %+v", l.Endpoints)
	}
}

// TestEjectionsMove: an endpoint stays ejected in another process, for the rest of its time, and at
// most half of the endpoints are.
func TestEjectionsMove(t *testing.T) {
	e := Ejection{After: 5}
	s := newSick(t, 4, e)
	s.run(5*time.Second, Unserved)
	before := s.b.Standing(s.list[0].Addr, int64(s.now))
	opts := func(list []service.Endpoint) (o Options) {
		port := &service.Port{}
		port.Families[0].Endpoints = list
		return Options{Loads: &Loads{}, Ejection: e, Port: port, Seed: 3}
	}
	o := opts(s.list)
	old := s.b
	s.b, s.loads = learns(t, old, o, int64(s.now)), o.Loads
	after := s.b.Standing(s.list[0].Addr, int64(s.now))
	if before.Open, after.Open = 0, 0; !before.Ejected || after != before || s.b.Ejected() != 1 {
		t.Errorf("%+v after it has moved, before %+v", after, before)
	}
	s.ill = false
	s.run(30*time.Second, Unserved)
	if got := s.run(time.Second, Unserved); got < 0.24 {
		t.Errorf("it gets %.3f of the connections after it is mended", got)
	}
	check.Equalf(t, learns(t, old, opts(s.list[:1]), int64(s.now)).Ejected(), 0, "how many of one endpoint are ejected")
	check.Equalf(t, learns(t, old, opts(s.list[1:]), int64(s.now)).Ejected(), 0, "how many are ejected that are no endpoints")
}

// TestSlowStartMoves: an endpoint that starts goes on to in another process, which has met all
// endpoints at once.
func TestSlowStartMoves(t *testing.T) {
	const begin, window = int64(time.Hour), int64(30 * time.Second)
	opts := Options{Port: slowPort(ready("a", "b")), Now: begin}
	from := New(opts)
	list := ready("a", "b", "new")
	opts.Port = slowPort(list)
	from.Configure(opts)
	now := begin + window/2
	opts.Now = now
	to := learns(t, from, opts, now)
	check.Equalf(t, to.StartsUntil(), begin+window, "it starts until")
	for at := now; at <= begin+window; at += window / 8 {
		for i := range list {
			check.Equalf(t, to.Standing(list[i].Addr, at).Share, from.Standing(list[i].Addr, at).Share, "endpoint %d has a share of", i)
		}
	}
	opts.Now = now + 1
	to.Configure(opts)
	check.Equalf(t, to.StartsUntil(), begin+window, "the next configuration forgets it")
}
