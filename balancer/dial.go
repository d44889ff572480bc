package balancer

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// Affinity tells what session affinity had to do with the choice of an
// endpoint.
type Affinity uint8

// The outcomes. conntrack.Affinity has the same numbers.
const (
	// AffinityNone: the service port has no session affinity.
	AffinityNone Affinity = iota
	// AffinityNew: the client was not pinned, or not any more.
	AffinityNew
	// AffinityHit: the client went to the endpoint that it was pinned to.
	AffinityHit
	// AffinityMoved: the client was pinned to an endpoint that is not a
	// candidate (A5.3) or did not answer (A5.7), and went to another.
	AffinityMoved
)

// inlineTried is how many different endpoints a Dial remembers in itself.
const inlineTried = 3

// Dial is the state of one connection's attempts. The zero value is ready. It
// is plain data of 64 bytes; it refers to memory of its own only after more
// than three different endpoints have failed. It is not safe for concurrent use.
type Dial struct {
	start int64 // monotonic ns of the first attempt
	last  int64 // monotonic ns of the latest attempt

	// latest is the key of the endpoint tried last. first and more hold the
	// keys of all that were tried, each with its state in the low two bits.
	latest uint64
	first  [inlineTried]uint64
	more   map[uint64]uint64

	attempts    uint16
	excuses     uint16 // attempts that do not count
	step        uint8  // of the plan's timeouts
	affinity    Affinity
	pinnedFirst bool // the first endpoint tried was the pinned one
	excused     bool // the latest attempt does not count
}

// States of an endpoint that was tried, in the low bits of its key.
const (
	stateAnswered  = 0 // refused, or still being tried
	stateTimedOut  = 1
	stateForgotten = 2 // may be tried again
	stateExcused   = 3 // failed, but not by its fault
	stateMask      = 3
)

// Attempts gives the number of attempts that Next has proposed.
func (d *Dial) Attempts() int { return int(d.attempts) }

// Excuse tells that the latest attempt failed for a reason that is not the
// endpoint's, such as a lack of local ports or descriptors. Neither the attempt
// nor the time it took use up the plan, except for its total, and the endpoint is
// tried again once all others have been. The caller makes a pause before Next, or
// it would try in a tight loop.
func (d *Dial) Excuse() {
	if d.attempts == 0 || d.excused {
		return
	}
	d.put(d.latest, stateExcused)
	d.excused = true
	d.excuses++
}

// Affinity gives the outcome of session affinity for the endpoint that was
// proposed last.
func (d *Dial) Affinity() Affinity { return d.affinity }

// hashKeys make the keys of IPv6 endpoints unpredictable.
var hashKeys = [3]uint64{rand.Uint64() | 1, rand.Uint64() | 1, rand.Uint64() | 1}

// endpointKey gives a number that stands for an endpoint's address, with the
// bits of stateMask clear and never 0. For IPv4 it is exact; for IPv6 it is a
// hash of 61 bits.
func endpointKey(ep netip.AddrPort) uint64 {
	addr := ep.Addr()
	if addr.Is4() {
		a := addr.As4()
		return 1<<63 | uint64(binary.BigEndian.Uint32(a[:]))<<18 | uint64(ep.Port())<<2
	}
	a := addr.As16()
	hi := mix(binary.BigEndian.Uint64(a[:8])^hashKeys[0], binary.BigEndian.Uint64(a[8:])^hashKeys[1])
	hi = mix(hi^uint64(ep.Port()), hashKeys[2])
	return (hi&^(1<<63) | 4) &^ stateMask
}

// mix folds the product of two words into one.
func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// find gives the state of an endpoint that was tried.
func (d *Dial) find(key uint64) (state uint64, ok bool) {
	for _, e := range d.first {
		if e&^stateMask == key {
			return e & stateMask, true
		}
	}
	state, ok = d.more[key]
	return state, ok
}

// put remembers the state of an endpoint.
func (d *Dial) put(key, state uint64) {
	for i, e := range d.first {
		if e == 0 || e&^stateMask == key {
			d.first[i] = key | state
			return
		}
	}
	if d.more == nil {
		d.more = make(map[uint64]uint64)
	}
	d.more[key] = state
}

// wasTried tells whether the endpoint was tried in this round.
func (d *Dial) wasTried(key uint64) bool {
	state, ok := d.find(key)
	return ok && state != stateForgotten
}

// untried counts the candidates that were not tried in this round.
func (d *Dial) untried(candidates []service.Endpoint) int {
	n := 0
	for i := range candidates {
		if !d.wasTried(endpointKey(candidates[i].Addr)) {
			n++
		}
	}
	return n
}

// nthUntried gives the index of the nth candidate, from 0, that was not tried
// in this round.
func (d *Dial) nthUntried(candidates []service.Endpoint, n int) int {
	for i := range candidates {
		if d.wasTried(endpointKey(candidates[i].Addr)) {
			continue
		}
		if n == 0 {
			return i
		}
		n--
	}
	return -1
}

// advance looks at how the attempt before ended and gives the patience for the
// next one; false when the plan's time is used up.
func (d *Dial) advance(p *Plan, now int64) (time.Duration, bool) {
	if d.attempts == 0 {
		d.start = now
		return min(p.patience(0), p.Total), true
	}
	// Half of the patience, so that neither a timer's coarseness nor a clock
	// that is read once for each wake-up makes a difference.
	if spent := time.Duration(now - d.last); !d.excused && spent >= p.patience(d.step)/2 {
		d.put(d.latest, stateTimedOut)
		if int(d.step) < len(p.Timeouts) {
			d.step++
		}
	}
	left := p.Total - time.Duration(now-d.start)
	if left <= 0 {
		return 0, false
	}
	return min(p.patience(d.step), left), true
}

// newRound makes candidates that were all tried eligible again, if the plan
// allows: those that were excused, as long as there are any; those that ran out
// of time, until the timeouts are used up, because a slow one may yet answer
// within a longer one (promise 1); and all, until as many attempts have been made
// as there are timeouts.
func (d *Dial) newRound(p *Plan, candidates []service.Endpoint) bool {
	patient := int(d.step) < len(p.Timeouts)
	again := func(state uint64) bool {
		return state == stateExcused || patient && state == stateTimedOut
	}
	if d.forget(again, candidates) {
		return true
	}
	few := int(d.attempts-d.excuses) < len(p.Timeouts)
	return few && d.forget(func(uint64) bool { return true }, candidates)
}

// forget makes the candidates whose state matches eligible again, the one that
// was tried last only if it is the only one. It tells whether there is any.
func (d *Dial) forget(match func(state uint64) bool, candidates []service.Endpoint) bool {
	latest, found := false, false
	for i := range candidates {
		key := endpointKey(candidates[i].Addr)
		state, ok := d.find(key)
		switch {
		case ok && !match(state):
		case key == d.latest:
			latest = true
		default:
			d.put(key, stateForgotten)
			found = true
		}
	}
	if !found && latest {
		d.put(d.latest, stateForgotten)
		found = true
	}
	return found
}

// begin notes that an attempt on the endpoint begins.
func (d *Dial) begin(key uint64, now int64) {
	d.put(key, stateAnswered)
	d.latest = key
	d.excused = false
	d.last = now
	if d.attempts < ^uint16(0) {
		d.attempts++
	}
}

// settle notes the outcome of affinity for the endpoint that was chosen: found
// is what the pin table said.
func (d *Dial) settle(found Affinity, key uint64) {
	switch {
	case d.attempts == 0:
		d.affinity = found
		d.pinnedFirst = found == AffinityHit
	case d.pinnedFirst && key == d.first[0]&^stateMask:
		d.affinity = AffinityHit
	case d.pinnedFirst:
		d.affinity = AffinityMoved
	}
}
