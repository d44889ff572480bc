package datagram

import (
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// To begin a session costs ten times what another datagram of one does, and
// datagrams from ever new addresses are as easily sent as any. So that the
// clients of one service cannot take all of the processors from everybody else,
// beginning sessions for it has an allowance of each loop's time. It counts only
// while others use the loop. When it is used up, the service's lane rests, and
// its datagrams wait in the kernel. A lane that services share goes on without
// the one service's new sessions: their datagrams are lost.
const (
	// allowancePart says how much it is in the long run: one part in so many.
	allowancePart = 8
	// allowanceMost is how much is saved up, in ns of processor time: what a
	// thousand sessions and more take.
	allowanceMost = int64(100 * time.Millisecond)
	// companyTime is how long others count as users of the loop, in ns.
	companyTime = int64(100 * time.Millisecond)
)

// allowance is what is left of a service port's. The zero value is that of a
// service that has begun none since the process started.
type allowance struct {
	left  int64 // ns; below 0 it is overdrawn, by a session at most
	since int64 // when left was as it is
}

// charge takes off the processor time that a session took.
func (a *allowance) charge(now, ns int64) {
	a.left = min(a.left+(now-a.since)/allowancePart, allowanceMost) - ns
	a.since = now
}

// overdrawn tells whether no more sessions should begin for now.
func (a *allowance) overdrawn(now int64) bool { return a.left+(now-a.since)/allowancePart < 0 }

// rest is how long to begin no more sessions, in ns.
func (a *allowance) rest() int64 { return max(-a.left*allowancePart, 0) }

// opening measures what beginning sessions takes, with what is sent for them, in
// one turn of a lane. It belongs to a loop.
type opening struct {
	share   *share // whose session began last in this turn; nil before
	company bool   // others use the loop
	since   int64  // processor time when it began
}

// begin is told that a session begins.
func (o *opening) begin(h *share, now int64, company bool) {
	o.settle(now)
	o.share, o.company = h, company
	if company {
		o.since = sys.ThreadTime()
	}
}

// settle charges a service for the session before.
func (o *opening) settle(now int64) {
	if o.share != nil && o.company {
		o.share.begin.charge(now, sys.ThreadTime()-o.since)
	}
}

// endTurn gives the service whose session began last in this turn, nil if none
// did, and whether others use the loop.
func (o *opening) endTurn(now int64) (h *share, company bool) {
	o.settle(now)
	h, company = o.share, o.company
	o.share = nil
	return h, company
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
