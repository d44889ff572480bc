package balancer

import (
	"math"

	"github.com/sluice-proxy/sluice/service"
)

// The algorithms that compare how many connections of this node the endpoints have.
// Candidates that failed recently are left out, unless all did.

// byLoad are the algorithms that take the endpoint with the lowest cost, which is
// (connections + extra) / weight. Equal ones are taken at random.
type byLoad struct {
	extra    int64 // 1: the connection that is to come counts
	weighted bool
	idle     bool // an endpoint without connections comes first, whatever its weight
}

func (a byLoad) prepare(v *view, c *config, candidates []service.Endpoint) {
	v.addLoads(c, candidates)
	if a.weighted {
		v.addWeights(candidates)
	}
}

func (a byLoad) choose(b *Balancer, c *config, candidates []service.Endpoint, _ Conn, now int64) int {
	v := b.view(c, candidates)
	start := b.below(v.n)
	var leaveOut func(int) bool
	var share func(int) uint64
	if s := c.starting(now); s != nil {
		share = func(i int) uint64 { return s.share(candidates[i].Addr, now) }
		leaveOut = func(i int) bool {
			ep := candidates[i].Addr
			return s.refuses(ep, now, b.next()) || b.suspected(endpointKey(ep), now) || c.excludes(ep, now, false)
		}
	} else if b.suspects.Load() != nil || c.most > 0 || c.loads.ejections.out.Load() > 0 {
		leaveOut = func(i int) bool {
			ep := candidates[i].Addr
			return b.suspected(endpointKey(ep), now) || c.excludes(ep, now, false)
		}
	}
	if best := a.least(v, start, leaveOut, share); best >= 0 {
		return best
	}
	return start
}

// least returns the candidate of the lowest cost that is not left out, the first one from
// start on; -1 if all are left out. Connections of a candidate with half the share count
// twice. leaveOut and share may be nil.
func (a byLoad) least(v *view, start int, leaveOut func(int) bool, share func(int) uint64) int {
	if !a.weighted && leaveOut == nil {
		// Loads from start on, then those before: a loop as short as can be.
		ahead, before := fewest(v.loads[start:]), fewest(v.loads[:start])
		if before >= 0 && v.loads[before].open.Load() < v.loads[start+ahead].open.Load() {
			return before
		}
		return start + ahead
	}
	best, cost, weight := -1, int64(math.MaxInt32), int64(1)
	for k := range v.n {
		i := start + k
		if i >= v.n {
			i -= v.n
		}
		x, w := int64(v.loads[i].open.Load()), int64(1)
		if share != nil {
			x = x * fullShare / int64(share(i))
		}
		if !a.idle || x > 0 {
			x += a.extra
		}
		if a.weighted {
			w = int64(v.weight[i])
		}
		if x*weight >= cost*w || leaveOut != nil && leaveOut(i) {
			continue
		}
		if best, cost, weight = i, x, w; cost == 0 {
			return best
		}
	}
	return best
}

// fewest returns the first of those with the fewest connections, or -1 if there is none.
func fewest(loads []*Load) int {
	best, open := -1, int32(math.MaxInt32)
	for i, l := range loads {
		if n := l.open.Load(); n < open {
			best, open = i, n
		}
	}
	return best
}

// powerOfTwo takes the better of two random candidates: the one with fewer connections,
// else the one that answers sooner.
type powerOfTwo struct{}

func (powerOfTwo) prepare(v *view, c *config, candidates []service.Endpoint) {
	v.addLoads(c, candidates)
}

func (powerOfTwo) choose(b *Balancer, c *config, candidates []service.Endpoint, _ Conn, now int64) int {
	v := b.view(c, candidates)
	if v.n == 1 {
		return 0
	}
	i := b.below(v.n)
	j := b.below(v.n - 1)
	if j >= i {
		j++
	}
	if ep := candidates[i].Addr; b.suspected(endpointKey(ep), now) || c.excludes(ep, now, false) {
		return j
	}
	x, y := v.loads[i], v.loads[j]
	m, n := int64(x.open.Load()), int64(y.open.Load())
	if s := c.starting(now); s != nil {
		first, second := candidates[i].Addr, candidates[j].Addr
		switch {
		case s.refuses(first, now, b.next()):
			return j
		case s.refuses(second, now, b.next()):
			return i
		}
		m, n = m*int64(s.share(second, now)), n*int64(s.share(first, now))
	}
	switch {
	case m < n:
		return i
	case m > n:
		return j
	case y.connect.Load() < x.connect.Load():
		return j
	}
	return i
}
