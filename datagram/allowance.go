package datagram

import (
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// A datagram that begins a session costs ten times as much as another one, and a flood
// can have a new source address in each datagram. So that the clients of one service
// cannot take the processors from all others, beginning sessions for a service port has
// an allowance of each loop's time. It is charged only while other users share the loop.
// When it is used up, the service port's socket pauses, and its datagrams wait in the
// kernel. A socket that several service ports share does not pause: datagrams that would
// begin a session of that service port are lost.
const (
	// allowancePart: the allowance is 1/8 of the loop's time.
	allowancePart = 8
	// allowanceMost is how much can be saved up, in ns of processor time: more than a
	// thousand sessions take.
	allowanceMost = int64(100 * time.Millisecond)
	// otherUsersTime is how long others count as users of the loop, in ns.
	otherUsersTime = int64(100 * time.Millisecond)
)

// allowance is a service port's remaining processor time for new sessions. The zero value
// is that of a service port that has begun none since the process started.
type allowance struct {
	left  int64 // ns; below 0 it is overdrawn, by one session at most
	since int64 // when left was computed
}

// charge subtracts the processor time that a session took.
func (a *allowance) charge(now, ns int64) {
	a.left = min(a.left+(now-a.since)/allowancePart, allowanceMost) - ns
	a.since = now
}

// overdrawn reports whether no more sessions should begin for now.
func (a *allowance) overdrawn(now int64) bool { return a.left+(now-a.since)/allowancePart < 0 }

// pause is how long to begin no more sessions, in ns.
func (a *allowance) pause() int64 { return max(-a.left*allowancePart, 0) }

// opening measures the processor time of beginning sessions, with the datagrams that are
// sent for them, in one turn of a listening socket. It belongs to a loop.
type opening struct {
	sessions *serviceSessions // whose session began last in this turn; nil before
	others   bool             // others use the loop
	since    int64            // processor time when it began
}

// begin is told that a session begins.
func (o *opening) begin(h *serviceSessions, now int64, others bool) {
	o.settle(now)
	o.sessions, o.others = h, others
	if others {
		o.since = sys.ThreadTime()
	}
}

// settle charges a service for the session before.
func (o *opening) settle(now int64) {
	if o.sessions != nil && o.others {
		o.sessions.begin.charge(now, sys.ThreadTime()-o.since)
	}
}

// endTurn returns the service whose session began last in this turn, nil if none
// did, and whether others use the loop.
func (o *opening) endTurn(now int64) (h *serviceSessions, others bool) {
	o.settle(now)
	h, others = o.sessions, o.others
	o.sessions = nil
	return h, others
}

// otherUsers tracks which other service ports used a loop recently. It belongs to the loop.
type otherUsers struct {
	last    *serviceSessions // the last one
	lastAt  int64
	otherAt int64  // when the last one but that did
	events  uint64 // of the loop, that were for its worker
	foreign uint64 // for others: connections over TCP
	foreAt  int64  // when there were some
}

// note records a datagram of a service port.
func (c *otherUsers) note(h *serviceSessions, now int64) {
	if c.last != h {
		c.last, c.otherAt = h, c.lastAt
	}
	c.lastAt = now
}

// endRound records the events for others than the worker.
func (c *otherUsers) endRound(loop *poll.Loop) {
	if foreign := loop.Handled() - c.events; foreign != c.foreign {
		c.foreign, c.foreAt = foreign, loop.Lately()
	}
}

// has reports whether anything but a service port has used the loop recently.
func (c *otherUsers) has(h *serviceSessions, now int64) bool {
	other := c.lastAt
	if c.last == h {
		other = c.otherAt
	}
	return now-max(other, c.foreAt) < otherUsersTime
}
