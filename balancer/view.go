package balancer

import (
	"math/rand/v2"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/service"
)

// view is what an algorithm derives from a list of candidates. It is made when the first
// connection meets the list, and does not change but for its turn.
type view struct {
	// The list: candidates are immutable, so their memory identifies them, and the
	// pointer keeps that from being used again.
	first *service.Endpoint
	n     int

	config *config // that it was made for
	epoch  uint32  // of the loads
	loads  []*Load
	weight []uint32 // of each candidate, 1 or more; nil if all are 1
	sums   []uint64 // of the weights up to each candidate, for turns by weight
	step   uint64   // coprime to the last sum
	turn   atomic.Uint64
	list   uint64   // tag of the list, if it has turns
	table  []uint16 // of Maglev
}

const views = 8 // lists of one service port: families, traffic policies, zones

// view returns the view of a list.
func (b *Balancer) view(c *config, candidates []service.Endpoint) *view {
	first, epoch := &candidates[0], c.loads.epoch.Load()
	free := -1
	for i := range b.views {
		v := b.views[i].Load()
		switch {
		case v == nil || v.config != c || v.epoch != epoch:
			free = i
		case v.first == first && v.n == len(candidates):
			return v
		}
	}
	if free < 0 {
		free = rand.IntN(views)
	}
	v := &view{first: first, n: len(candidates), config: c, epoch: epoch}
	algorithms[c.algorithm].prepare(v, c, candidates)
	if v.sums != nil {
		v.list = tagOf(candidates)
		if turn, ok := b.takeTurn(v.list); ok {
			v.turn.Store(uint64(turn))
		}
	}
	b.views[free].Store(v)
	return v
}

// addLoads looks up the loads of all candidates.
func (v *view) addLoads(c *config, candidates []service.Endpoint) {
	v.loads = make([]*Load, len(candidates))
	for i := range candidates {
		v.loads[i] = c.loads.Of(candidates[i].Addr)
	}
}

// addWeights keeps the weights of all candidates.
func (v *view) addWeights(candidates []service.Endpoint) {
	v.weight = make([]uint32, len(candidates))
	for i := range candidates {
		v.weight[i] = uint32(max(candidates[i].Weight, 1))
	}
}
