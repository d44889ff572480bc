// Package balancer picks the endpoint for a connection out of the candidates
// that policy gives, and another one when that does not answer.
//
// A [Balancer] belongs to one service port and is used by all event loops at
// once. A [Dial] belongs to one connection:
//
//	var d balancer.Dial
//	for {
//		i, time, ok := b.Next(&d, candidates, client, now)
//		if !ok {
//			break // connect_failed
//		}
//		if i == balancer.Pause {
//			// wait for time, and ask again
//			continue
//		}
//		// dial candidates[i].Addr for at most time
//		// answered: b.Connected(&d, candidates[i].Addr, client, now)
//		// did not:  b.Failed(&d, candidates[i].Addr, client, now)
//		// not its fault: d.Excuse()
//	}
//
// The candidates may be other ones at each call. Every candidate is tried
// before any is tried twice, as long as the plan allows. Endpoints that failed
// lately, by any connection, come last; see suspects.
//
// The package does no I/O and reads no clock; times are nanoseconds of one
// monotonic clock.
package balancer

import (
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
	// (A5.2), 0 for none.
	AffinityTimeout time.Duration
	// MaxPins bounds the clients that are remembered for affinity; 0 means
	// DefaultMaxPins.
	MaxPins int
	// Plan is the retry plan; what is zero in it is as in DefaultPlan.
	Plan Plan
	// Seed makes the choices repeatable when it is not 0.
	Seed uint64
}

// config is what Options become. It never changes.
type config struct {
	algorithm Algorithm
	window    int64 // of affinity, ns; 0 = none
	plan      Plan
	pins      *pinTable // nil without affinity
	maxPins   int
}

// Balancer chooses endpoints for one service port. All methods are safe for
// concurrent use.
type Balancer struct {
	config atomic.Pointer[config]
	mu     sync.Mutex // of Configure

	random  atomic.Uint64
	cursors [8]atomic.Uint64 // 0 = unused

	suspects atomic.Pointer[suspects] // nil until an endpoint has failed

	pinCounters pinCounters
}

// Pause stands in place of a candidate's index when no candidate is to be tried
// before a time has passed.
const Pause = -1

// New gives a Balancer.
func New(opts Options) *Balancer {
	b := &Balancer{}
	seed := opts.Seed
	if seed == 0 {
		seed = rand.Uint64()
	}
	b.random.Store(seed)
	b.Configure(opts)
	return b
}

// Configure takes new options over for the choices that follow; Seed is left as
// it was. A new affinity timeout holds for the pins that exist: each expires
// that long after it was used last. Switching affinity off drops all pins
// (A5.5).
func (b *Balancer) Configure(opts Options) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := &config{
		algorithm: opts.Algorithm,
		window:    int64(max(opts.AffinityTimeout, 0)),
		plan:      opts.Plan.orDefault(),
		maxPins:   opts.MaxPins,
	}
	if next.maxPins <= 0 {
		next.maxPins = DefaultMaxPins
	}
	prev := b.config.Load()
	switch {
	case next.window == 0:
	case prev != nil && prev.pins != nil && prev.maxPins == next.maxPins:
		next.pins = prev.pins
	default:
		next.pins = newPinTable(next.maxPins, &b.pinCounters)
	}
	b.config.Store(next)
	if prev != nil && prev.pins != nil && prev.pins != next.pins {
		prev.pins.drop()
	}
}

// Next proposes the candidate to try next and how long that attempt may take.
// When all that remain have refused it gives Pause, and how long to wait before
// the next call. It is false when the connection has to be given up: there are no
// candidates, or the plan is used up. client is the address that the client's
// packets came with (A5.6), now is monotonic nanoseconds.
//
// Whether the attempt before ran out of time is told by the time since then.
func (b *Balancer) Next(d *Dial, candidates []service.Endpoint, client netip.Addr, now int64) (index int, time time.Duration, ok bool) {
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
		index, found = c.pins.choose(b, c, d, candidates, client, now)
	} else {
		index = b.pick(c, d, candidates, now)
	}
	if index < 0 {
		pause, ok := d.pause(&c.plan, now)
		return Pause, pause, ok
	}
	key := endpointKey(candidates[index].Addr)
	d.listBits = uint8(bits.Len(uint(len(candidates))))
	d.settle(found, key)
	d.begin(key, now)
	return index, min(c.plan.patience(d.step), total), true
}

// Connected tells that the endpoint answered. With affinity the client is
// pinned to it, and its window begins anew (A5.2, A5.7).
func (b *Balancer) Connected(_ *Dial, ep netip.AddrPort, client netip.Addr, now int64) {
	b.clear(ep)
	if c := b.config.Load(); c.pins != nil {
		c.pins.set(client, ep, now, c.window)
	}
}

// Failed tells that the endpoint did not answer. A pin of the client to it is
// dropped (A5.7), and other connections pass it over for a while. It must not be
// called for errors that are not the endpoint's fault, such as running out of
// ports or descriptors.
func (b *Balancer) Failed(d *Dial, ep netip.AddrPort, client netip.Addr, now int64) {
	b.suspect(ep, d.listBits, now)
	if c := b.config.Load(); c.pins != nil {
		c.pins.unpin(client, ep)
	}
}

// PinStats describes the affinity table.
type PinStats struct {
	Pins    int    // clients that are remembered, expired ones that were not yet met included
	Evicted uint64 // pins that went before their time because the table was full
	Expired uint64 // pins that were met after their time
}

// Pins describes the affinity table.
func (b *Balancer) Pins() PinStats {
	return PinStats{
		Pins:    int(b.pinCounters.live.Load()),
		Evicted: b.pinCounters.evicted.Load(),
		Expired: b.pinCounters.expired.Load(),
	}
}

// turn gives the index whose turn it is. Each list of candidates has a turn of
// its own, told apart by its length and its two ends: if lists that are used
// alternately (by family, by traffic policy) shared one, each could meet the
// same few turns all the time. A list that was not met lately starts at a
// random place, so that lists that change all the time are used evenly too.
func (b *Balancer) turn(candidates []service.Endpoint) int {
	n := len(candidates)
	if n == 1 {
		return 0
	}
	list := mix(endpointKey(candidates[0].Addr)+uint64(n), endpointKey(candidates[n-1].Addr)^hashKeys[0])
	const count = 1<<32 - 1 // a cursor is the list's tag and a count
	list = list&^count | 1<<63
	place := -1
	for i := range b.cursors {
		switch v := b.cursors[i].Load(); {
		case v&^count == list:
			// Add's result is looked at again: another goroutine may have
			// given the cursor to another list.
			if v = b.cursors[i].Add(1); v&^count == list {
				return int(uint32(v) % uint32(n))
			}
		case v == 0 && place < 0:
			place = i
		}
	}
	if place < 0 {
		place = b.below(len(b.cursors))
	}
	v := list | b.next()&(count>>1)
	b.cursors[place].Store(v)
	return int(uint32(v) % uint32(n))
}

// below gives a number from 0 to n-1.
func (b *Balancer) below(n int) int {
	hi, _ := bits.Mul64(b.next(), uint64(n))
	return int(hi)
}

// next gives 64 random bits (splitmix64, which needs no lock).
func (b *Balancer) next() uint64 {
	return scramble(b.random.Add(0x9e3779b97f4a7c15))
}

// scramble has each bit of a number change half of the bits of the result.
func scramble(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
