package balancer

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"time"
)

// Affinity tells what session affinity had to do with the choice of an
// endpoint.
type Affinity uint8

// The outcomes.
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

// String gives the name that the access log uses.
func (a Affinity) String() string {
	switch a {
	case AffinityNone:
		return "none"
	case AffinityNew:
		return "new"
	case AffinityHit:
		return "hit"
	case AffinityMoved:
		return "moved"
	}
	return "unknown"
}

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
	step        uint8 // of the plan's timeouts
	repeats     uint8 // attempts that waited for a pause
	listBits    uint8 // bit length of the number of candidates
	outcome     outcome
	affinity    Affinity
	pinnedFirst bool // the first endpoint tried was the pinned one
}

// outcome is how an attempt ended, or one of the states of an endpoint that was
// tried: those are in the low bits of its key.
type outcome uint8

// The outcomes.
const (
	undecided outcome = iota // still being tried, or refused in between
	refused
	timedOut
	excused // failed, but not by its fault
)

const stateMask = 3

// Attempts gives the number of attempts that Next has proposed.
func (d *Dial) Attempts() int { return int(d.attempts) }

// Excuse tells that the latest attempt failed for a reason that is not the
// endpoint's, such as a lack of local ports or descriptors. Neither the attempt
// nor the time it took use up the plan, except for its total, and the endpoint is
// tried again once all others have been. The caller makes a pause before Next, or
// it would try in a tight loop.
func (d *Dial) Excuse() {
	if d.attempts == 0 {
		return
	}
	d.put(d.latest, excused)
	d.outcome = excused
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
func (d *Dial) find(key uint64) (state outcome, ok bool) {
	for _, e := range d.first {
		if e&^stateMask == key {
			return outcome(e & stateMask), true
		}
	}
	e, ok := d.more[key]
	return outcome(e), ok
}

// put remembers the state of an endpoint.
func (d *Dial) put(key uint64, state outcome) {
	for i, e := range d.first {
		if e == 0 || e&^stateMask == key {
			d.first[i] = key | uint64(state)
			return
		}
	}
	if d.more == nil {
		d.more = make(map[uint64]uint64)
	}
	d.more[key] = uint64(state)
}

// wasTried tells whether the endpoint was tried.
func (d *Dial) wasTried(key uint64) bool {
	_, ok := d.find(key)
	return ok
}

// judge takes note of how the attempt before ended, if nobody has yet.
func (d *Dial) judge(p *Plan, now int64) {
	if d.outcome != undecided {
		return
	}
	d.outcome = refused
	// Half of the patience, so that neither a timer's coarseness nor a clock
	// that is read once for each wake-up makes a difference.
	if time.Duration(now-d.last) >= p.patience(d.step)/2 {
		d.outcome = timedOut
		if int(d.step) < len(p.Timeouts) {
			d.step++
		}
	}
	d.put(d.latest, d.outcome)
}

// repeatAt gives the moment from which an endpoint that refused may be tried
// again; false if that is over. The last pause is cut, so that an attempt is made
// shortly before the plan's patience ends.
func (d *Dial) repeatAt(p *Plan) (at int64, ok bool) {
	if d.outcome != refused {
		return d.last, true // the attempt before has taken its time
	}
	end := d.start + int64(p.all()-shortestPause)
	pause := min(shortestPause<<min(d.repeats, 10), longestPause)
	return min(d.last+int64(pause), end), d.last < end
}

// begin notes that an attempt on the endpoint begins.
func (d *Dial) begin(key uint64, now int64) {
	if d.attempts == 0 {
		d.start = now
	}
	d.put(key, undecided)
	d.latest = key
	d.outcome = undecided
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
