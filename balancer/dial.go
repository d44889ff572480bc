package balancer

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"time"
)

// Affinity is the effect of session affinity on the choice of an endpoint.
type Affinity uint8

// The outcomes.
const (
	// AffinityNone: the service port has no session affinity.
	AffinityNone Affinity = iota
	// AffinityNew: the client had no pin, or an expired one.
	AffinityNew
	// AffinityHit: the client reached the endpoint of its pin.
	AffinityHit
	// AffinityMoved: the endpoint of the client's pin is not a candidate
	// (A5.3) or did not answer (A5.7), so the client reached another one.
	AffinityMoved
)

var affinityNames = [...]string{AffinityNone: "none", AffinityNew: "new", AffinityHit: "hit", AffinityMoved: "moved"}

// String returns the name that the access log uses.
func (a Affinity) String() string {
	if int(a) < len(affinityNames) {
		return affinityNames[a]
	}
	return "unknown"
}

// inlineTried is how many different endpoints a Dial stores without allocation.
const inlineTried = 3

// Dial is the state of one connection's attempts. The zero value is ready for
// use. It takes 64 bytes and allocates only after more than three different
// endpoints have failed. It is not safe for concurrent use.
type Dial struct {
	start int64 // monotonic ns of the first attempt
	last  int64 // monotonic ns of the latest attempt

	// latest is the key of the endpoint tried last. first and more hold the
	// keys of all tried endpoints, each with its state in the low two bits.
	latest uint64
	first  [inlineTried]uint64
	more   map[uint64]uint64

	attempts    uint16
	step        uint8 // index into the plan's timeouts
	repeats     uint8 // attempts after a pause
	listBits    uint8 // bit length of the number of candidates
	outcome     outcome
	affinity    Affinity
	pinnedFirst bool // the first attempt went to the pinned endpoint
}

// outcome is the result of an attempt, and the state of a tried endpoint, which
// is stored in the low bits of its key.
type outcome uint8

// The outcomes.
const (
	undecided outcome = iota // the attempt is in progress, or its result is unknown
	refused
	timedOut
	excused // failed, but not by the endpoint's fault
)

const stateMask = 3

// Attempts returns the number of attempts that Next has proposed.
func (d *Dial) Attempts() int { return int(d.attempts) }

// Excuse records that the latest attempt failed without the endpoint's fault, such
// as for lack of local ports or descriptors. The attempt counts only against the
// plan's Total. Next proposes the endpoint again after all others. The caller must
// pause before Next to avoid a tight loop.
func (d *Dial) Excuse() {
	if d.attempts == 0 {
		return
	}
	d.put(d.latest, excused)
	d.outcome = excused
}

// Affinity returns the effect of session affinity on the latest proposal.
func (d *Dial) Affinity() Affinity { return d.affinity }

// hashKeys make the keys of IPv6 endpoints unpredictable to tenants.
var hashKeys = [3]uint64{rand.Uint64() | 1, rand.Uint64() | 1, rand.Uint64() | 1}

// endpointKey converts an endpoint's address to a key. The key is never 0, and the
// bits of stateMask are clear. For IPv4 it is exact; for IPv6 it is a hash of 61
// bits.
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

// mix folds the 128-bit product of two words into one word.
func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// find returns the state of a tried endpoint.
func (d *Dial) find(key uint64) (state outcome, ok bool) {
	for _, e := range d.first {
		if e&^stateMask == key {
			return outcome(e & stateMask), true
		}
	}
	e, ok := d.more[key]
	return outcome(e), ok
}

// put stores the state of an endpoint.
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

// wasTried reports whether the endpoint was tried.
func (d *Dial) wasTried(key uint64) bool {
	_, ok := d.find(key)
	return ok
}

// judge decides how the previous attempt ended, unless that is known already.
func (d *Dial) judge(p *Plan, now int64) {
	if d.outcome != undecided {
		return
	}
	d.outcome = refused
	// Compare with half of the timeout: timers are coarse, and a loop reads the
	// clock once for each wake-up.
	if time.Duration(now-d.last) >= p.patience(d.step)/2 {
		d.outcome = timedOut
		if int(d.step) < len(p.Timeouts) {
			d.step++
		}
	}
	d.put(d.latest, d.outcome)
}

// repeatAt returns the time from which a refusing endpoint may be tried again, or
// false if the plan is exhausted. It shortens the last pause, so that one attempt
// happens shortly before the end of the plan.
func (d *Dial) repeatAt(p *Plan) (at int64, ok bool) {
	if d.outcome != refused {
		return d.last, true // the previous attempt's timeout was pause enough
	}
	end := d.start + int64(p.all()-shortestPause)
	pause := min(shortestPause<<min(d.repeats, 10), longestPause)
	return min(d.last+int64(pause), end), d.last < end
}

// begin records the start of an attempt on the endpoint.
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

// settle records the effect of affinity on the chosen endpoint. found is the pin
// table's answer.
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
