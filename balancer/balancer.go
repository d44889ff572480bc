// Package balancer picks an endpoint for a connection from policy's candidates,
// and another one when that endpoint does not answer.
//
// A [Balancer] belongs to one service port, and all event loops use it
// concurrently. A [Dial] belongs to one connection and one goroutine:
//
//	var d balancer.Dial
//	for {
//		i, time, ok := b.Next(&d, candidates, conn, now)
//		if !ok {
//			break // connect_failed
//		}
//		if i == balancer.Pause {
//			// wait for time, then call Next again
//			continue
//		}
//		// dial candidates[i].Addr for at most time
//		// success:           b.Connected(&d, candidates[i].Addr, client, now)
//		// endpoint's fault:  b.Failed(&d, candidates[i].Addr, client, now)
//		// any other failure: d.Excuse()
//	}
//
// The candidates may differ from call to call. As long as the plan allows, Next
// proposes each candidate once before it repeats one. Endpoints that failed
// recently for any connection come last; see suspects.
//
// The package does no I/O and reads no clock. Times are nanoseconds of one
// monotonic clock, which the caller passes in.
package balancer

import (
	"cmp"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// Options configure a Balancer. The zero value is round-robin without session
// affinity, on the default plan.
type Options struct {
	Algorithm Algorithm
	// AffinityTimeout is the sliding window of session affinity ClientIP
	// (A5.2). 0 means no affinity.
	AffinityTimeout time.Duration
	// MaxPins bounds the number of pinned clients. 0 means DefaultMaxPins.
	MaxPins int
	// Plan is the retry plan. Its zero fields take the values of DefaultPlan.
	Plan Plan
	// Seed makes the choices repeatable if it is not 0.
	Seed uint64
	// Rank is where round-robin begins. nil means at random.
	Rank *Rank

	// Port is the service port, or nil.
	Port *service.Port
	// Loads are the connections of its endpoints. nil means that nobody counts them.
	Loads *Loads
	// Ejection says when an endpoint that keeps failing is passed over.
	Ejection Ejection
	// Now is the time, for the slow start of endpoints that are new.
	Now int64
	// HashPort has the client's port count in hashes.
	HashPort bool
}

// config holds validated Options. It never changes.
type config struct {
	algorithm Algorithm
	window    int64 // of affinity, ns; 0 = none
	plan      Plan
	pins      *pinTable // nil without affinity
	maxPins   int
	rank      *Rank
	service   *service.Port // or nil
	port      uint64        // of the service port's name
	loads     *Loads
	starts    *starts // nil: all endpoints have their full share
	most      int     // connections of an endpoint; 0 = any number
	hashPort  bool
}

// Balancer chooses endpoints for one service port. All methods are safe for
// concurrent use.
type Balancer struct {
	config atomic.Pointer[config]
	mu     sync.Mutex // serializes Configure
	seen   seen       // guarded by mu

	random  atomic.Uint64
	cursors [8]atomic.Uint64 // 0 = unused

	suspects atomic.Pointer[suspects] // nil until an endpoint has failed

	views     [views]atomic.Pointer[view] // of lists, by algorithms that need them
	uncounted Loads                       // in place of Options.Loads

	pinCounters pinCounters
	mirror      atomic.Pointer[Mirror] // nil: nobody follows the pins
}

// Pause is the index that Next returns if the connection must wait before its
// next attempt.
const Pause = -1

// Full is the index that Next returns if candidates have as many connections as they may
// have, and no other one may be tried now.
const Full = -2

// New creates a Balancer.
func New(opts Options) *Balancer {
	b := &Balancer{}
	b.random.Store(cmp.Or(opts.Seed, rand.Uint64()))
	b.Configure(opts)
	return b
}

// Configure replaces the options except Seed. A new affinity timeout also
// applies to existing pins: each expires that long after its last use. Switching
// affinity off drops all pins (A5.5).
func (b *Balancer) Configure(opts Options) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := &config{
		algorithm: opts.Algorithm,
		window:    int64(max(opts.AffinityTimeout, 0)),
		plan:      opts.Plan.orDefault(),
		maxPins:   cmp.Or(opts.MaxPins, DefaultMaxPins),
		rank:      opts.Rank,
		service:   opts.Port,
		loads:     opts.Loads,
		hashPort:  opts.HashPort,
	}
	next.starts = b.startsLocked(opts.Port, opts.Now)
	if next.loads == nil {
		next.loads = &b.uncounted
	}
	if opts.Port != nil {
		next.port = nameKey(opts.Port.Name)
		next.most = opts.Port.Limits.PerEndpoint
		next.loads.configure(opts.Ejection, opts.Port)
		next.loads.forget(opts.Port)
	}
	prev := b.config.Load()
	switch {
	case next.window == 0:
	case prev != nil && prev.pins != nil && prev.maxPins == next.maxPins:
		next.pins = prev.pins
	default:
		next.pins = newPinTable(next.maxPins, &b.pinCounters, &b.mirror)
	}
	b.config.Store(next)
	if prev != nil && prev.pins != nil && prev.pins != next.pins {
		prev.pins.drop()
	}
}

// Next proposes the candidate to try next and the timeout of that attempt. If all
// remaining candidates have refused, it returns Pause and the time to wait before
// the next call. It returns Full if all are full, or if some are and the others have failed. It returns false if the connection has failed: there are no
// candidates, or the plan is exhausted. now is monotonic nanoseconds.
//
// Next concludes from the elapsed time whether the previous attempt timed out or
// was refused.
func (b *Balancer) Next(d *Dial, candidates []service.Endpoint, conn Conn, now int64) (index int, time time.Duration, ok bool) {
	if len(candidates) == 0 {
		return 0, 0, false
	}
	c := b.config.Load()
	total := c.plan.Total
	if d.attempts > 0 {
		d.judge(&c.plan, now)
		if total -= elapsed(d.start, now); total <= 0 {
			return 0, 0, false
		}
	}
	found := AffinityNone
	if c.pins != nil {
		index, found = c.pins.choose(b, c, d, candidates, conn, now)
	} else {
		index = b.pick(c, d, candidates, conn, now)
	}
	if index < 0 {
		pause, ok := d.pause(&c.plan, now)
		if some, all := c.countFull(candidates); all || some && !ok {
			return Full, 0, true
		}
		return Pause, pause, ok
	}
	key := endpointKey(candidates[index].Addr)
	d.listBits = uint8(bits.Len(uint(len(candidates))))
	d.settle(found, key)
	d.begin(key, now)
	return index, min(c.plan.patience(d.step), total), true
}

// MaxOpen returns how many connections an endpoint may have; 0 = any number. Of connections
// that begin at the same moment, the caller has to refuse those above it.
func (b *Balancer) MaxOpen() int { return b.config.Load().most }

// Independent returns the algorithm if a new connection's choice depends on nothing but
// the candidates, and with session affinity on the client's pin: there is no limit, and no endpoint is
// ejected. Others may then make the choice, and call Chosen.
func (b *Balancer) Independent() (a Algorithm, ok bool) {
	c := b.config.Load()
	return c.algorithm, c.most == 0 && c.loads.ejections.settings.Load() == nil
}

// AffinityWindow returns how long a client is remembered after its last connection; 0: not at all.
func (b *Balancer) AffinityWindow() time.Duration { return time.Duration(b.config.Load().window) }

// Kept renews the pin of a client whose connection began at an endpoint that Next has not chosen, if
// the pin names the endpoint. It returns the effect of session affinity.
func (b *Balancer) Kept(client netip.Addr, ep netip.AddrPort, now int64) Affinity {
	c := b.config.Load()
	if c.pins == nil {
		return AffinityNone
	}
	key := clientKey(client.As16())
	s := c.pins.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	at, p := s.lookupLocked(key, now, c.window)
	switch {
	case p == nil:
		return AffinityNew
	case !p.is(ep):
		return AffinityMoved
	}
	s.useLocked(at, now)
	return AffinityHit
}

// Chosen records a first attempt whose endpoint was not chosen by Next, with the effect of affinity
// on it, and returns the timeout of the attempt.
func (b *Balancer) Chosen(d *Dial, ep netip.AddrPort, affinity Affinity, candidates int, now int64) time.Duration {
	c := b.config.Load()
	d.listBits = uint8(bits.Len(uint(candidates)))
	d.affinity, d.pinnedFirst = affinity, affinity == AffinityHit
	d.begin(endpointKey(ep), now)
	return min(c.plan.patience(d.step), c.plan.Total)
}

// Connected records that the endpoint answered. With affinity, it pins the client
// to the endpoint and restarts the window (A5.2, A5.7).
func (b *Balancer) Connected(_ *Dial, ep netip.AddrPort, client netip.Addr, now int64) {
	b.clear(ep)
	if c := b.config.Load(); c.pins != nil {
		c.pins.set(client, ep, now, c.window)
	}
}

// Failed records that the endpoint did not answer. It removes the client's pin to
// the endpoint (A5.7), and other connections skip the endpoint for a while. Call
// Dial.Excuse instead for errors that are not the endpoint's fault, such as a lack
// of local ports or descriptors.
func (b *Balancer) Failed(d *Dial, ep netip.AddrPort, client netip.Addr, now int64) {
	b.suspect(ep, d.listBits, now)
	if c := b.config.Load(); c.pins != nil {
		c.pins.unpin(client, ep)
	}
}

// PinStats describes the affinity table.
type PinStats struct {
	Pins    int    `metric:"sluice_affinity_pins" help:"Clients that are remembered for session affinity."` // pins in the table, including expired ones that it has not removed yet
	Evicted uint64 `metric:"sluice_affinity_evicted_total" help:"Clients whose affinity was forgotten because their service port had too many."`
	Expired uint64 `metric:"sluice_affinity_expired_total" help:"Clients whose affinity expired."`
}

// Pins describes the affinity table.
func (b *Balancer) Pins() PinStats {
	return PinStats{
		Pins:    int(b.pinCounters.live.Load()),
		Evicted: b.pinCounters.evicted.Load(),
		Expired: b.pinCounters.expired.Load(),
	}
}

// turn returns the next index in round-robin order. Each list of candidates has a
// cursor of its own; its length and its first and last element identify it. If
// lists of different families or traffic policies shared a cursor, alternating
// use could skip the same candidates of each list every time. A new list starts
// at the node's rank in the Service's order, so that the nodes of a cluster use it
// evenly; at a random index if the rank is unknown.
func (b *Balancer) turn(c *config, candidates []service.Endpoint) int {
	n := len(candidates)
	if n == 1 {
		return 0
	}
	start, ranked := c.rank.start(n)
	at := func(turn uint32) int { return int(turn % uint32(n)) }
	if ranked {
		at = orderOf(c.port, candidates).at
	}
	list, slot := tagOf(candidates), -1
	for i := range b.cursors {
		switch v := b.cursors[i].Load(); {
		case v&^turnMask == list:
			// Another goroutine may have reassigned the cursor since Load, so
			// check the tag again.
			if v = b.cursors[i].Add(1); v&^turnMask == list {
				return at(uint32(v))
			}
		case v == 0 && slot < 0:
			slot = i
		}
	}
	if slot < 0 {
		slot = b.below(len(b.cursors))
	}
	if !ranked {
		start = uint32(b.next() & (turnMask >> 1))
	}
	b.cursors[slot].Store(list | uint64(start))
	return at(start)
}

// turnMask is the counter of a cursor; above it is the list's tag.
const turnMask = 1<<32 - 1

// tagOf returns the tag of a list, which is the same in all processes.
func tagOf(candidates []service.Endpoint) uint64 {
	n := len(candidates)
	return mix(stableKey(candidates[0].Addr)+uint64(n), stableKey(candidates[n-1].Addr)|1)&^turnMask | 1<<63
}

// setTurn has a list go on from a turn of another process, unless it has begun here.
func (b *Balancer) setTurn(list uint64, turn uint32) {
	for i := range b.cursors {
		if v := b.cursors[i].Load(); v&^turnMask == list || v == 0 && b.cursors[i].CompareAndSwap(0, list|uint64(turn)) {
			return
		}
	}
}

// takeTurn returns what setTurn has been told of a list, once.
func (b *Balancer) takeTurn(list uint64) (turn uint32, ok bool) {
	for i := range b.cursors {
		if v := b.cursors[i].Load(); v&^turnMask == list && b.cursors[i].CompareAndSwap(v, 0) {
			return uint32(v), true
		}
	}
	return 0, false
}

// below returns a random number from 0 to n-1.
func (b *Balancer) below(n int) int {
	return nth(b.next(), n)
}

// next returns 64 random bits. splitmix64 needs no lock.
func (b *Balancer) next() uint64 {
	return scramble(b.random.Add(0x9e3779b97f4a7c15))
}

// scramble is the finalizer of splitmix64: each input bit affects all output
// bits.
func scramble(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
