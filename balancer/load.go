package balancer

import (
	"math/bits"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/service"
)

// Load is what this node has of one endpoint of a service port. All methods are safe for
// concurrent use.
type Load struct {
	open    atomic.Int32  // connections, including those that wait for the endpoint's answer
	connect atomic.Uint32 // average time until the endpoint answers, in us; 0 = unknown
	key     uint64

	outcomes atomic.Pointer[outcomes] // nil until the endpoint fails, if failures count
}

// Begin counts a connection, and End stops counting it.
func (l *Load) Begin() { l.open.Add(1) }

// BeginBelow is Begin, unless the endpoint has most connections. 0 means any number.
func (l *Load) BeginBelow(most int) bool {
	for n := l.open.Load(); most > 0; n = l.open.Load() {
		if int(n) >= most {
			return false
		}
		if l.open.CompareAndSwap(n, n+1) {
			return true
		}
	}
	l.open.Add(1)
	return true
}

// End ends what Begin has begun.
func (l *Load) End() { l.open.Add(-1) }

// Open returns the number of connections.
func (l *Load) Open() int { return int(l.open.Load()) }

// Loads are the endpoints of a service port by address, on both data paths. The zero value
// is ready for use. Of takes no lock for an endpoint that is known.
type Loads struct {
	table atomic.Pointer[loadTable]
	epoch atomic.Uint32 // changes when endpoints are forgotten
	mu    sync.Mutex
	used  int    // guarded by mu, like spare
	spare []Load // allocated together, as algorithms read many in a row

	ejections ejections
}

// loadTable is a hash table with linear probing: a power of two of slots, of which at most
// three quarters are used. Slots are filled and never emptied.
type loadTable []atomic.Pointer[Load]

// find returns the load of a key, or nil and the free slot where it belongs.
func (t loadTable) find(key uint64) (*Load, *atomic.Pointer[Load]) {
	for i := scramble(key); ; i++ {
		at := &t[i&uint64(len(t)-1)]
		if l := at.Load(); l == nil || l.key == key {
			return l, at
		}
	}
}

// Of returns the load of an endpoint.
func (s *Loads) Of(ep netip.AddrPort) *Load {
	key := endpointKey(ep)
	if t := s.table.Load(); t != nil {
		if l, _ := t.find(key); l != nil {
			return l
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.addLocked(key)
}

func (s *Loads) addLocked(key uint64) *Load {
	t := s.table.Load()
	if t == nil || 4*(s.used+1) > 3*len(*t) {
		t = s.rebuiltLocked(2*(s.used+1), func(*Load) bool { return true })
	}
	l, at := t.find(key)
	if l != nil {
		return l
	}
	if len(s.spare) == 0 {
		s.spare = make([]Load, min(max(s.used, 4), 64))
	}
	l, s.spare = &s.spare[0], s.spare[1:]
	l.key = key
	at.Store(l)
	s.used++
	return l
}

// rebuiltLocked puts a table in place that has room for n endpoints, and for twice those to
// keep.
func (s *Loads) rebuiltLocked(n int, keep func(*Load) bool) *loadTable {
	var kept []*Load
	if t := s.table.Load(); t != nil {
		for i := range *t {
			if l := (*t)[i].Load(); l != nil && keep(l) {
				kept = append(kept, l)
			}
		}
	}
	next := make(loadTable, 1<<bits.Len(uint(max(n, 2*len(kept), 4)*4/3)))
	for _, l := range kept {
		_, at := next.find(l.key)
		at.Store(l)
	}
	s.used = len(kept)
	s.table.Store(&next)
	return &next
}

// listedIn returns the keys of a service port's endpoints.
func listedIn(port *service.Port) map[uint64]bool {
	keys := make(map[uint64]bool)
	for f := range port.Families {
		for i := range port.Families[f].Endpoints {
			keys[endpointKey(port.Families[f].Endpoints[i].Addr)] = true
		}
	}
	return keys
}

// forget removes the endpoints that have no connection and are not listed, if they are
// more than the others. A connection that begins at one of them at the same moment is not
// counted.
func (s *Loads) forget(port *service.Port) {
	s.mu.Lock()
	defer s.mu.Unlock()
	listed := 0
	for f := range port.Families {
		listed += len(port.Families[f].Endpoints)
	}
	if s.used <= 2*listed+64 {
		return
	}
	keys := listedIn(port)
	s.rebuiltLocked(2*listed+64, func(l *Load) bool { return l.Open() > 0 || keys[l.key] })
	s.epoch.Add(1)
}
