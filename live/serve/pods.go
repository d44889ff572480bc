package serve

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/live/filter"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// podsKept is how long an index of pods stays that nobody asks.
	podsKept = 2 * time.Minute
	// podsRest is how much longer than making an index the pause after it is at least.
	podsRest = 30
)

// pods finds pods by their addresses: those that named knows, and those that serve something. Its
// index takes 8 bytes for each endpoint while somebody looks, and may be a second behind the
// configuration when that changes. It is safe for concurrent use, and At never waits.
type pods struct {
	named    func(netip.Addr) service.Name // may be nil
	snapshot func() *service.Snapshot
	current  atomic.Pointer[podIndex]
	used     atomic.Bool // since the timer fired

	mu    sync.Mutex // held while an index is made
	timer *time.Timer
}

// podIndex is what a snapshot says.
type podIndex struct {
	of     *service.Snapshot
	sorted []*service.Endpoint // by address, one for each
	next   time.Time           // another index is not made before
}

// prepare makes the index if there is none, or an old one.
func (p *pods) prepare() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.prepareLocked()
}

// name has a filter know the pods of clients, if it asks for them.
func (p *pods) name(f *filter.Filter) {
	if f.NamesClients() {
		p.prepare()
		f.NameClients(p.At)
	}
}

func (p *pods) prepareLocked() {
	p.used.Store(true)
	x, snap, began := p.current.Load(), p.snapshot(), time.Now()
	if x != nil && (x.of == snap || began.Before(x.next)) {
		return
	}
	x = newPodIndex(snap)
	x.next = time.Now().Add(max(time.Second, podsRest*time.Since(began)))
	p.current.Store(x)
	if p.timer == nil {
		p.timer = time.AfterFunc(podsKept, p.forget)
		return
	}
	p.timer.Reset(podsKept)
}

// forget lets the index go if nobody has asked for it in a while.
func (p *pods) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.used.Swap(false) {
		p.timer.Reset(podsKept)
		return
	}
	p.current.Store(nil)
}

// At returns the name of the pod that has an address; the zero one if none is known, or several
// have it, as those with their node's network. An old index is replaced meanwhile.
func (p *pods) At(a netip.Addr) service.Name {
	if p.named != nil {
		if name := p.named(a); name.Name != "" {
			return name
		}
	}
	x := p.current.Load()
	p.used.Store(true)
	if (x == nil || x.of != p.snapshot() && time.Now().After(x.next)) && p.mu.TryLock() {
		go func() {
			defer p.mu.Unlock()
			p.prepareLocked()
		}()
	}
	if x == nil {
		return service.Name{}
	}
	return x.at(a)
}

func newPodIndex(snap *service.Snapshot) *podIndex {
	x := &podIndex{of: snap}
	endpointsOf(snap, func(_ *service.Port, ep *service.Endpoint) {
		if ep.Pod.Name != "" {
			x.sorted = append(x.sorted, ep)
		}
	})
	slices.SortFunc(x.sorted, func(a, b *service.Endpoint) int { return a.Addr.Addr().Compare(b.Addr.Addr()) })
	all := x.sorted
	x.sorted = all[:0]
	for len(all) > 0 {
		n, several := 1, false
		for ; n < len(all) && all[n].Addr.Addr() == all[0].Addr.Addr(); n++ {
			several = several || all[n].Pod != all[0].Pod
		}
		if first := all[0]; !several {
			x.sorted = append(x.sorted, first)
		}
		all = all[n:]
	}
	x.sorted = slices.Clone(x.sorted) // without room to grow
	return x
}

func (x *podIndex) at(a netip.Addr) service.Name {
	i, found := slices.BinarySearchFunc(x.sorted, a, func(ep *service.Endpoint, a netip.Addr) int { return ep.Addr.Addr().Compare(a) })
	if !found {
		return service.Name{}
	}
	return x.sorted[i].Pod
}
