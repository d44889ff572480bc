package balancer

import (
	"math/rand/v2"
	"sort"

	"github.com/sluice-proxy/sluice/service"
)

// weightedRoundRobin takes each candidate as often as its weight says in a round of as
// many connections as all weights together. The turns of a candidate lie apart.
type weightedRoundRobin struct{}

func (weightedRoundRobin) prepare(v *view, _ *config, candidates []service.Endpoint) {
	v.addWeights(candidates)
	v.sums = make([]uint64, len(candidates))
	sum := uint64(0)
	for i, w := range v.weight {
		sum += uint64(w)
		v.sums[i] = sum
	}
	// Steps of the golden ratio spread the turns of each candidate over a round.
	for v.step = max(sum*618/1000, 1); gcd(v.step, sum) != 1; v.step++ {
	}
	v.turn.Store(rand.Uint64N(sum)) // lists that change often are used evenly too
}

func (weightedRoundRobin) choose(b *Balancer, c *config, candidates []service.Endpoint, _ Conn, _ int64) int {
	v := b.view(c, candidates)
	sum := v.sums[v.n-1]
	return v.at(v.turn.Add(1) % sum * v.step % sum)
}

// at returns the candidate of a place in a round.
func (v *view) at(place uint64) int {
	return sort.Search(v.n, func(i int) bool { return v.sums[i] > place })
}

func (weightedRoundRobin) number(b *Balancer, _ *config, _ Conn) uint64 { return b.next() }

func (weightedRoundRobin) named(b *Balancer, c *config, candidates []service.Endpoint, number uint64) int {
	v := b.view(c, candidates)
	return v.at(uint64(nth(number, int(v.sums[v.n-1]))))
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
