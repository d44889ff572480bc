package datagram

import (
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
)

// To begin a session costs ten times what another datagram of one does, and
// datagrams from ever new addresses are as easily sent as any. So that the
// clients of one service cannot take all of the processors from everybody else,
// beginning sessions for it has an allowance of each loop's time. It counts only
// while others use the loop.
const (
	// allowancePart says how much it is in the long run: one part in so many.
	allowancePart = 4
	// allowanceMost is how much is saved up, in ns: what a thousand sessions
	// and more take.
	allowanceMost = int64(100 * time.Millisecond)
	// allowanceOnce bounds what one session is charged with, in ns. Time that the
	// loop's thread spent waiting for a processor is charged too, as others want it then.
	allowanceOnce = int64(time.Millisecond)
	// allowanceLeast bounds what it can be overdrawn by, in ns, while nobody else
	// uses the loop.
	allowanceLeast = -int64(10 * time.Millisecond)
	// companyTime is how long others count as users of the loop, in ns.
	companyTime = int64(100 * time.Millisecond)
)

// allowance is what is left of a service port's. The zero value is that of a
// service that has begun none since the process started.
type allowance struct {
	left  int64 // ns; below 0 it has been overdrawn
	asked int64 // when left was as it is
}

// open tells whether another session may begin.
func (a *allowance) open(now int64) bool {
	a.left = min(a.left+(now-a.asked)/allowancePart, allowanceMost)
	a.asked = now
	return a.left > 0
}

// charge takes off what a session took.
func (a *allowance) charge(ns int64) { a.left = max(a.left-min(ns, allowanceOnce), allowanceLeast) }

// opening measures what beginning sessions takes, with what is sent for them, in
// one turn of a lane. It belongs to a loop.
type opening struct {
	share *share // whose session was asked for last in this turn; nil before
	since int64  // when it began; 0 if it did not
}

// admit tells whether a service may begin a session. It always may without
// company.
func (o *opening) admit(h *share, now int64, company bool) bool {
	o.settle()
	o.share = h
	if enough := h.begin.open(now); company && !enough {
		return false
	}
	o.since = poll.Nanotime()
	return true
}

// settle charges a service for the session before.
func (o *opening) settle() {
	if o.since != 0 {
		o.share.begin.charge(poll.Nanotime() - o.since)
		o.since = 0
	}
}

// endTurn gives the service that a session was asked for last in this turn, nil
// if none was.
func (o *opening) endTurn() *share {
	o.settle()
	h := o.share
	o.share = nil
	return h
}

// company knows who has used a loop lately. It belongs to the loop.
type company struct {
	last    *share // the last one
	lastAt  int64
	otherAt int64  // when the last one but that did
	events  uint64 // of the loop, that were for its worker
	foreign uint64 // for others: connections over TCP
	foreAt  int64  // when there were some
}

// note takes note of a service's datagram.
func (c *company) note(h *share, now int64) {
	if c.last != h {
		c.last, c.otherAt = h, c.lastAt
	}
	c.lastAt = now
}

// endRound takes note of what others than the worker have done.
func (c *company) endRound(loop *poll.Loop) {
	if foreign := loop.Handled() - c.events; foreign != c.foreign {
		c.foreign, c.foreAt = foreign, loop.Now()
	}
}

// has tells whether anybody but a service has used the loop lately.
func (c *company) has(h *share, now int64) bool {
	other := c.lastAt
	if c.last == h {
		other = c.otherAt
	}
	return now-max(other, c.foreAt) < companyTime
}
