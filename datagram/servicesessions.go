package datagram

import (
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
)

// class is the phase of a session. It decides on the timeout and on the order of
// eviction.
type class uint8

const (
	unanswered class = iota
	answered
	stream // used in both directions for longer than streamAge
	classes
)

// streamAge is the age from which an answered session that is still in use counts
// as a stream, as in the kernel's connection tracking.
const streamAge = int64(2 * time.Second)

// serviceSessions are a service port's sessions on one loop. All sessions of a
// class have one timeout, so the order of their last datagrams is also the order in
// which they expire, and one timer serves all.
type serviceSessions struct {
	tally   // in group.members
	service *portService
	worker  *worker
	group   *group // the Service's part on this loop
	lists   [classes]list
	begin   allowance // budget for new sessions
	timer   poll.Timer
}

// add adds a session.
func (h *serviceSessions) add(s *session) {
	h.lists[s.class].push(s)
	h.group.members.add(h)
	h.group.namespace.groups.add(h.group)
	h.worker.active.add(h.group.namespace)
	if !h.timer.Scheduled() {
		h.schedule()
	}
}

// remove removes a session.
func (h *serviceSessions) remove(s *session) {
	h.lists[s.class].remove(s)
	if h.group.members.remove(h) {
		h.worker.loop.Cancel(&h.timer)
	}
	h.group.namespace.groups.remove(h.group)
	h.worker.active.remove(h.group.namespace)
}

// touch records a datagram of a session. answer means that it came from the
// endpoint.
func (h *serviceSessions) touch(s *session, now int64, answer bool) {
	h.worker.others.note(h, now)
	s.last = now
	to := s.class
	switch {
	case to == unanswered && answer:
		to = answered
	case to == answered && now-s.record.Start >= streamAge:
		to = stream
	}
	if to == s.class && h.lists[to].tail == s {
		return
	}
	h.lists[s.class].remove(s)
	s.class = to
	h.lists[to].push(s)
}

// oldest returns the session that is evicted first: of those that were answered the one
// that has been quiet longest, else of the others. There is one if count > 0.
func (h *serviceSessions) oldest() *session {
	a, b := h.lists[answered].head, h.lists[stream].head
	switch {
	case a != nil && (b == nil || a.last <= b.last):
		return a
	case b != nil:
		return b
	}
	return h.lists[unanswered].head
}

// schedule sets the timer for the session that expires first. If that session is
// used until then, the timer fires too early and is set again.
func (h *serviceSessions) schedule() {
	t := h.service.terms.Load()
	at, found := int64(0), false
	for c := range h.lists {
		if s := h.lists[c].head; s != nil {
			if end := s.last + t.timeouts[c]; !found || end < at {
				at, found = end, true
			}
		}
	}
	if found {
		h.worker.loop.Schedule(&h.timer, at, h)
	}
}

// expireShare bounds how many sessions expire at once, so that other work
// continues.
const expireShare = 256

// HandleTimer ends expired sessions.
func (h *serviceSessions) HandleTimer(*poll.Timer) {
	h.expire(h.worker.loop.Now())
	h.schedule()
}

// expire ends up to expireShare expired sessions.
func (h *serviceSessions) expire(now int64) {
	t := h.service.terms.Load()
	left := expireShare
	for c := range h.lists {
		for left > 0 {
			s := h.lists[c].head
			if s == nil || s.last+t.timeouts[c] > now {
				break
			}
			s.end(conntrack.Idle)
			left--
		}
	}
}

// list is a list of sessions.
type list struct {
	head, tail *session
}

// push appends a session.
func (l *list) push(s *session) {
	s.prev, s.next = l.tail, nil
	if l.tail != nil {
		l.tail.next = s
	} else {
		l.head = s
	}
	l.tail = s
}

// remove removes a session from the list.
func (l *list) remove(s *session) {
	if s.prev != nil {
		s.prev.next = s.next
	} else {
		l.head = s.next
	}
	if s.next != nil {
		s.next.prev = s.prev
	} else {
		l.tail = s.prev
	}
	s.prev, s.next = nil, nil
}
