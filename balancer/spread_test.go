package balancer

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/race"
)

// The tests of this file print how evenly connections are spread, and what a change of endpoints
// does to clients: make bench-balance.

// TestSpreadOverNodes: nodes that balance alone open a few long connections each. Figures are the
// connections of the fullest endpoint, over the mean.
func TestSpreadOverNodes(t *testing.T) {
	t.Log("nodes  endpoints  each  random  power-of-two  round-robin, random start  round-robin by rank")
	sizes := []struct{ nodes, endpoints, each int }{{10, 3, 1}, {50, 10, 1}, {50, 10, 3}, {100, 10, 2}, {500, 50, 1}, {1000, 100, 2}, {5000, 100, 1}}
	for _, row := range sizes[:race.Fewer(len(sizes))] {
		list := endpoints(row.endpoints)
		spread := func(of func(node int) (*Balancer, *Loads)) float64 {
			counts := make([]int, row.endpoints)
			for node := range row.nodes {
				b, loads := of(node)
				for range row.each {
					i, _ := first(t, b, list, someone, 0)
					loads.Of(list[i].Addr).Begin()
					counts[i]++
				}
			}
			return float64(slices.Max(counts)*row.endpoints) / float64(row.nodes*row.each)
		}
		seeded := func(a Algorithm) float64 {
			const runs = 4
			sum := 0.0
			for run := range runs {
				sum += spread(func(node int) (*Balancer, *Loads) {
					loads := &Loads{}
					return New(Options{Algorithm: a, Loads: loads, Seed: scramble(uint64(node<<8|run)) | 1}), loads
				})
			}
			return sum / runs
		}
		byRank := spread(func(node int) (*Balancer, *Loads) { return ranked("web", node, clusterRange), &Loads{} })
		random := seeded(Random)
		t.Logf("%5d  %9d  %4d  %6.2f  %12.2f  %25.2f  %19.2f", row.nodes, row.endpoints, row.each, random, seeded(PowerOfTwo), seeded(RoundRobin), byRank)
		if byRank > 1.2+1e-9 || byRank > random {
			t.Errorf("%d nodes, %d endpoints: by rank the fullest endpoint has %.2f of the mean, at random %.2f", row.nodes, row.endpoints, byRank, random)
		}
	}
}

// TestDistribution: many connections of as many clients, which end at once, to 20 equal endpoints.
// Chi-square has 19 degrees of freedom. Random ones are neither less even nor more even than
// chance has it.
func TestDistribution(t *testing.T) {
	const connections = 60000
	t.Logf("chi-square of %d connections to 20 endpoints; chance stays below %.1f", connections, chiBound(19))
	for a := range Algorithm(race.Fewer(len(algorithms))) {
		if a == DestinationHash {
			continue // one destination has one endpoint
		}
		b, _ := counted(a)
		list := endpoints(20)
		counts := make([]int, len(list))
		for n := range connections {
			var d Dial
			i, _, _ := b.Next(&d, list, conn(client(n)), 0)
			counts[i]++
		}
		chi := chiSquare(counts)
		t.Logf("%-26s %6.1f, fullest/mean %.3f", a, chi, float64(slices.Max(counts)*len(list))/connections)
		if chi > chiBound(19) && a != Maglev { // whose table has shares that differ by one place in 819
			t.Errorf("%s: chi-square is %.1f, more than chance", a, chi)
		}
		if a == Random && chi < 3 {
			t.Errorf("%s: chi-square is %.1f: too even for chance", a, chi)
		}
	}
}

// TestDisruption: one endpoint of 100 goes, and comes back. Its clients must move; the figure is
// the part of the others that move too.
func TestDisruption(t *testing.T) {
	const clients, gone = 20000, 42
	list := endpoints(100)
	less := slices.Concat(list[:gone], list[gone+1:])
	t.Log("clients that move beyond those of the endpoint that goes")
	for _, a := range []Algorithm{SourceHash, Maglev} {
		choose := func(list []service.Endpoint) (all []service.Endpoint) {
			b, _ := counted(a)
			for n := range clients {
				var d Dial
				i, _, _ := b.Next(&d, list, conn(client(n)), 0)
				all = append(all, list[i])
			}
			return all
		}
		before, after, others := choose(list), choose(less), 0
		for n := range clients {
			if before[n].Addr != list[gone].Addr && before[n].Addr != after[n].Addr {
				others++
			}
		}
		t.Logf("%-12s %5.2f %%", a, float64(others)*100/clients)
		if a == Maglev && others > clients/50 {
			t.Errorf("%s moves %d of %d other clients", a, others, clients)
		}
	}
}

// TestOneSlowEndpoint: of four endpoints that serve one request after another, three need 1 ms and
// one needs 10 ms. 320 requests a second come at random. The 99th percentile is at most half of
// round-robin's.
func TestOneSlowEndpoint(t *testing.T) {
	p99 := func(a Algorithm) time.Duration {
		const requests = 100000
		b, loads := counted(a)
		list := endpoints(4)
		r := rand.New(rand.NewPCG(1, 2))
		var free [4]int64 // when each endpoint has served all that it has
		var open [4][]int64
		var took []time.Duration
		now := int64(1)
		for range requests {
			now += int64(r.ExpFloat64() * float64(time.Second) / 320)
			for i := range open {
				for len(open[i]) > 0 && open[i][0] <= now {
					loads.Of(list[i].Addr).End()
					open[i] = open[i][1:]
				}
			}
			var d Dial
			i, _, _ := b.Next(&d, list, Conn{}, now)
			service := time.Millisecond
			if i == 3 {
				service *= 10
			}
			l := loads.Of(list[i].Addr)
			l.Begin()
			free[i] = max(free[i], now) + int64(service)
			open[i] = append(open[i], free[i])
			took = append(took, time.Duration(free[i]-now))
		}
		slices.Sort(took)
		return took[len(took)*99/100]
	}
	round := p99(RoundRobin)
	t.Logf("%-18s p99 %s", RoundRobin, round.Round(100*time.Microsecond))
	better := []Algorithm{LeastConnections, PowerOfTwo}
	for _, a := range better[:race.Fewer(len(better))] {
		got := p99(a)
		t.Logf("%-18s p99 %s", a, got.Round(100*time.Microsecond))
		if 2*got > round {
			t.Errorf("%s: the 99th percentile is %s, and round-robin's %s", a, got, round)
		}
	}
}
