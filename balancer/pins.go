package balancer

import (
	"hash/maphash"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/service"
)

// DefaultMaxPins is the default bound on the pinned clients of one service port. A
// full table takes about 6 MiB.
const DefaultMaxPins = 65536

// Tables of up to minPinsPerShard*2 clients have one shard.
const (
	maxPinShards    = 16
	minPinsPerShard = 1024
)

// pinTable maps each client of a service port to its pinned endpoint. The key is
// the client's address alone (A5.1).
//
// All pins have the same window, and each connection renews it. So the least
// recently used pin expires first. Each shard keeps its pins in order of use. A
// new pin removes up to two expired ones from the old end. In a full shard, it
// evicts the oldest one even if that has not expired. No timer is needed.
type pinTable struct {
	seed   maphash.Seed
	shards []pinShard // a power of two
}

// Mirror is a copy of a Balancer's pins that others choose endpoints by, such as a table in the kernel.
// Its methods are called in the order of a client's changes, with a lock held: they must not call the
// Balancer.
type Mirror interface {
	// Pin adds a client whose endpoint has answered, or renews it. used is monotonic ns.
	Pin(client netip.Addr, ep netip.AddrPort, used int64)
	// Unpin removes a client, if it is there.
	Unpin(client netip.Addr)
}

// SetMirror has a Mirror follow the pins from now on. It is safe for concurrent use.
func (b *Balancer) SetMirror(m Mirror) { b.mirror.Store(&m) }

// pinCounters outlive the table that updates them.
type pinCounters struct {
	live    atomic.Int64
	evicted atomic.Uint64
	expired atomic.Uint64
}

// none marks the end of a list of pins.
const none = int32(-1)

type clientKey [16]byte

// pin is one client's pin. It holds no pointers, so that the garbage collector
// does not scan the table.
type pin struct {
	client     clientKey
	addr       [16]byte
	port       uint16
	hint       uint16 // candidate index of the last use
	told       bool   // the mirror has it
	prev, next int32  // to more and less recently used; next also links free pins
	used       int64  // monotonic ns
}

func (p *pin) is(ep netip.AddrPort) bool {
	return ep.Port() == p.port && ep.Addr().As16() == p.addr
}

func (p *pin) endpoint() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(p.addr).Unmap(), p.port)
}

type pinShard struct {
	mu       sync.Mutex
	counters *pinCounters
	mirror   *atomic.Pointer[Mirror]
	limit    int
	index    map[clientKey]int32 // guarded by mu, like all following fields
	pins     []pin
	newest   int32
	oldest   int32
	free     int32
	dropped  bool // the table is no longer in use
	_        [32]byte
}

func newPinTable(maxPins int, counters *pinCounters, mirror *atomic.Pointer[Mirror]) *pinTable {
	n := 1
	for n < maxPinShards && maxPins/(n*2) >= minPinsPerShard {
		n *= 2
	}
	t := &pinTable{seed: maphash.MakeSeed(), shards: make([]pinShard, n)}
	for i := range t.shards {
		s := &t.shards[i]
		s.counters, s.mirror = counters, mirror
		s.limit = max(maxPins/n, 1)
		s.newest, s.oldest, s.free = none, none, none
	}
	return t
}

func (t *pinTable) shard(client clientKey) *pinShard {
	if len(t.shards) == 1 {
		return &t.shards[0]
	}
	return &t.shards[maphash.Bytes(t.seed, client[:])&uint64(len(t.shards)-1)]
}

// choose returns the candidate of the client's pin if this connection has not
// tried it. Otherwise it picks a candidate and pins the client to it (A5.3).
// Failures of other clients do not move this client; only its own do (A5.7).
// choose writes the pin before the endpoint has answered, so that concurrent
// connections of the client go to the same endpoint.
func (t *pinTable) choose(b *Balancer, c *config, d *Dial, candidates []service.Endpoint, conn Conn, now int64) (int, Affinity) {
	key := clientKey(conn.Client.Addr().As16())
	s := t.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	found := AffinityNew
	if at, p := s.lookupLocked(key, now, c.window); p != nil {
		if i := p.among(candidates); i >= 0 && !d.wasTried(endpointKey(candidates[i].Addr)) && !c.excludes(candidates[i].Addr, now, true) {
			s.useLocked(at, now)
			p.told = false // else the mirror would have chosen
			return i, AffinityHit
		}
		found = AffinityMoved
	}
	i := b.pick(c, d, candidates, conn, now)
	if i >= 0 {
		s.setLocked(key, candidates[i].Addr, now, c.window)
	}
	return i, found
}

// among returns the index of the pinned endpoint among the candidates, or -1.
func (p *pin) among(candidates []service.Endpoint) int {
	if int(p.hint) < len(candidates) && p.is(candidates[p.hint].Addr) {
		return int(p.hint)
	}
	for i := range candidates {
		if p.is(candidates[i].Addr) {
			p.hint = uint16(min(i, 1<<16-1))
			return i
		}
	}
	return -1
}

// set pins the client to the endpoint.
func (t *pinTable) set(client netip.Addr, ep netip.AddrPort, now, window int64) {
	key := clientKey(client.As16())
	s := t.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setLocked(key, ep, now, window)
	s.tellLocked(key)
}

// unpin removes the client's pin if it names the endpoint.
func (t *pinTable) unpin(client netip.Addr, ep netip.AddrPort) {
	key := clientKey(client.As16())
	s := t.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, ok := s.index[key]; ok && s.pins[at].is(ep) {
		s.removeLocked(at)
	}
}

// drop empties the table and rejects further pins.
func (t *pinTable) drop() {
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		s.counters.live.Add(-int64(len(s.index)))
		for at := s.newest; at != none; at = s.pins[at].next {
			s.untellLocked(&s.pins[at])
		}
		s.index, s.pins, s.dropped = nil, nil, true
		s.newest, s.oldest, s.free = none, none, none
		s.mu.Unlock()
	}
}

// lookupLocked returns the client's pin unless it has expired.
func (s *pinShard) lookupLocked(key clientKey, now, window int64) (int32, *pin) {
	at, ok := s.index[key]
	if !ok {
		return none, nil
	}
	p := &s.pins[at]
	if now-p.used >= window {
		s.removeLocked(at)
		s.counters.expired.Add(1)
		return none, nil
	}
	return at, p
}

func (s *pinShard) setLocked(key clientKey, ep netip.AddrPort, now, window int64) {
	at, ok := s.index[key]
	if !ok {
		if s.dropped {
			return // the connection still uses the old configuration
		}
		at = s.allocateLocked(now, window)
		s.index[key] = at
		s.counters.live.Add(1)
		s.pins[at] = pin{client: key, prev: none, next: none}
		s.pushLocked(at)
	}
	p := &s.pins[at]
	if ok && !p.is(ep) {
		s.untellLocked(p)
	}
	p.addr, p.port = ep.Addr().As16(), ep.Port()
	s.useLocked(at, now)
}

// tellLocked tells the mirror of a client's pin.
func (s *pinShard) tellLocked(key clientKey) {
	at, ok := s.index[key]
	if m := s.mirror.Load(); ok && m != nil && !s.pins[at].told {
		p := &s.pins[at]
		(*m).Pin(netip.AddrFrom16(key).Unmap(), p.endpoint(), p.used)
		p.told = true
	}
}

// untellLocked tells the mirror that a pin ends. It may have the pin of an earlier process.
func (s *pinShard) untellLocked(p *pin) {
	p.told = false
	if m := s.mirror.Load(); m != nil {
		(*m).Unpin(netip.AddrFrom16(p.client).Unmap())
	}
}

// allocateLocked returns the index of an unused pin.
func (s *pinShard) allocateLocked(now, window int64) int32 {
	// Remove two for each new pin, so that expired pins become fewer even under a
	// stream of new clients.
	for range 2 {
		if s.oldest == none || now-s.pins[s.oldest].used < window {
			break
		}
		s.removeLocked(s.oldest)
		s.counters.expired.Add(1)
	}
	if len(s.index) >= s.limit {
		s.removeLocked(s.oldest)
		s.counters.evicted.Add(1)
	}
	if s.index == nil {
		s.index = make(map[clientKey]int32)
	}
	if at := s.free; at != none {
		s.free = s.pins[at].next
		return at
	}
	s.pins = append(s.pins, pin{})
	return int32(len(s.pins) - 1)
}

// useLocked marks the pin as the most recently used.
func (s *pinShard) useLocked(at int32, now int64) {
	s.pins[at].used = now
	if s.newest != at {
		s.unlinkLocked(at)
		s.pushLocked(at)
	}
}

func (s *pinShard) removeLocked(at int32) {
	s.untellLocked(&s.pins[at])
	s.unlinkLocked(at)
	delete(s.index, s.pins[at].client)
	s.counters.live.Add(-1)
	s.pins[at].next = s.free
	s.free = at
}

func (s *pinShard) pushLocked(at int32) {
	p := &s.pins[at]
	p.prev, p.next = none, s.newest
	if s.newest != none {
		s.pins[s.newest].prev = at
	} else {
		s.oldest = at
	}
	s.newest = at
}

func (s *pinShard) unlinkLocked(at int32) {
	p := &s.pins[at]
	if p.prev != none {
		s.pins[p.prev].next = p.next
	} else {
		s.newest = p.next
	}
	if p.next != none {
		s.pins[p.next].prev = p.prev
	} else {
		s.oldest = p.prev
	}
}
