package balancer

import (
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

const (
	// samples is how many random candidates sound checks before it scans the
	// list.
	samples = 4
	// window bounds the candidates that one attempt scans, starting at a random
	// index.
	window = 1024
)

// pick chooses a candidate, or returns -1 if none may be tried now.
func (b *Balancer) pick(c *config, d *Dial, candidates []service.Endpoint, conn Conn, now int64) int {
	if d.attempts == 0 {
		first := algorithms[c.algorithm].choose(b, c, candidates, conn, now)
		if s := c.starting(now); s != nil {
			first = b.ease(c, s, candidates, conn, first, now)
		}
		if b.admits(c, candidates[first].Addr, now) {
			return first
		}
		if i := b.sound(c, d, candidates, now); i >= 0 {
			return i
		}
		if c.full(candidates[first].Addr) {
			return b.notFull(c, candidates)
		}
		return first // all failed recently, so ignore that
	}
	// A retry does not advance the round-robin cursor. Otherwise the next
	// connection would skip the endpoint after a dead one, and more connections
	// would meet the dead one.
	atOnce := int(d.attempts) < c.plan.AtOnce
	at, ok := d.repeatAt(&c.plan)
	waited := ok && now >= at
	i := -1
	if atOnce || waited {
		i = b.sound(c, d, candidates, now)
	}
	if i >= 0 && atOnce {
		return i
	}
	if i < 0 {
		left := c.plan.all() - elapsed(d.start, now)
		i = b.again(c, d, candidates, now, waited && left > 0, int(d.step) < len(c.plan.Timeouts))
	}
	if i >= 0 && waited && d.outcome == refused && d.repeats < ^uint8(0) {
		d.repeats++
	}
	return i
}

// pause returns the time until a refusing endpoint may be tried again, or false if
// the plan is exhausted.
func (d *Dial) pause(p *Plan, now int64) (time.Duration, bool) {
	at, ok := d.repeatAt(p)
	return elapsed(now, at), ok && at > now
}

// excludes reports whether to pass an endpoint over, as it is full or kept failing. try means
// that the connection is to try the endpoint if the time of its ejection is over.
func (c *config) excludes(ep netip.AddrPort, now int64, try bool) bool {
	return c.full(ep) || c.loads.ejections.out.Load() > 0 && c.loads.ejected(c.loads.Of(ep), now, try)
}

// full reports whether an endpoint has as many connections as it may have.
func (c *config) full(ep netip.AddrPort) bool {
	return c.most > 0 && c.loads.Of(ep).Open() >= c.most
}

// countFull reports whether some candidates, or all, are full.
func (c *config) countFull(candidates []service.Endpoint) (some, all bool) {
	if c.most == 0 {
		return false, false
	}
	all = true
	for i := range candidates {
		is := c.full(candidates[i].Addr)
		some, all = some || is, all && is
	}
	return some, all
}

// notFull returns a random candidate that is not full, or -1.
func (b *Balancer) notFull(c *config, candidates []service.Endpoint) int {
	start := b.below(len(candidates))
	for k := range candidates {
		if i := (start + k) % len(candidates); !c.full(candidates[i].Addr) {
			return i
		}
	}
	return -1
}

// admits reserves an endpoint for an attempt. It returns false if the connection must pass
// it over.
func (b *Balancer) admits(c *config, ep netip.AddrPort, now int64) bool {
	key := endpointKey(ep)
	return !b.suspected(key, now) && !c.excludes(ep, now, true) && b.take(key, now)
}

// sound chooses uniformly among the candidates that this connection has not tried
// and that did not fail recently for others. It returns -1 if there are none.
func (b *Balancer) sound(c *config, d *Dial, candidates []service.Endpoint, now int64) int {
	is := func(ep netip.AddrPort) bool {
		key := endpointKey(ep)
		return !b.suspected(key, now) && !d.wasTried(key) && !c.excludes(ep, now, false)
	}
	for range samples {
		i := b.below(len(candidates))
		if ep := candidates[i].Addr; is(ep) && b.admits(c, ep, now) {
			return i
		}
	}
	n, start := 0, b.below(len(candidates))
	for k := range min(len(candidates), window) {
		if is(candidates[(start+k)%len(candidates)].Addr) {
			n++
		}
	}
	if n == 0 {
		return -1
	}
	n = b.below(n)
	for k := range min(len(candidates), window) {
		i := (start + k) % len(candidates)
		if !is(candidates[i].Addr) {
			continue
		}
		if n--; n < 0 && b.admits(c, candidates[i].Addr, now) {
			return i
		}
	}
	return -1
}

// rank orders the candidates that failed for this connection or for others.
type rank uint8

// The ranks, best first.
const (
	excusedBefore rank = iota // failed without its fault
	cleared                   // refused this connection, then answered another one
	untried                   // failed for another connection
	refusedBefore
	timedOutBefore // may answer within a longer timeout
	latest         // any of these, but tried just now
	unfit
)

// again chooses the candidate of the best rank, or returns -1 if none may be tried
// now. waited means that the pause is over; patient, that the plan has a longer
// timeout left.
func (b *Balancer) again(c *config, d *Dial, candidates []service.Endpoint, now int64, waited, patient bool) int {
	best, found := unfit, -1
	start := b.below(len(candidates))
	for k := range min(len(candidates), window) {
		i := (start + k) % len(candidates)
		if r := b.rank(d, endpointKey(candidates[i].Addr), now, waited, patient); r < best && !c.full(candidates[i].Addr) {
			best, found = r, i
		}
	}
	return found
}

func (b *Balancer) rank(d *Dial, key uint64, now int64, waited, patient bool) rank {
	r := unfit
	state, tried := d.find(key)
	switch {
	case !tried:
		if waited {
			r = untried
		}
	case state == excused:
		r = excusedBefore
	case state == timedOut:
		if patient {
			r = timedOutBefore
		}
	case waited && !b.suspected(key, now):
		r = cleared
	case waited:
		r = refusedBefore
	}
	if key == d.latest && r != unfit {
		r = latest
	}
	return r
}

// elapsed returns the time between two monotonic clock values.
func elapsed(from, to int64) time.Duration { return time.Duration(to - from) }
