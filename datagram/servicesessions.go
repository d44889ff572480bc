package datagram

import (
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
)

// class is the stage of a session. It determines its timeout, and which session is evicted
// first.
type class uint8

const (
	unanswered class = iota
	answered
	stream // used both ways for longer than streamAge
	classes
)

// streamAge is when a session that was answered and is still used counts as a
// stream, as in the kernel's connection tracking.
const streamAge = int64(2 * time.Second)

// serviceSessions are the sessions of one service port on one loop. As all sessions of a
// class have the same timeout, they end in the order of their last datagrams, and one timer
// serves all.
type serviceSessions struct {
	service *portService
	worker  *worker
	group   *group // of its Service
	lists   [classes]list
	count   int
	begin   allowance // of new sessions
	index   int       // in group.members while count > 0
	timer   poll.Timer
}

// enter adds a new session.
func (h *serviceSessions) enter(s *session, now int64) {
	s.class, s.last = unanswered, now
	h.lists[unanswered].push(s)
	if h.count++; h.count == 1 {
		h.group.enter(h)
	}
	n := h.group.namespace
	if h.group.count++; h.group.count == 1 {
		n.enter(h.group)
	}
	if n.count++; n.count == 1 {
		n.index = len(h.worker.active)
		h.worker.active = append(h.worker.active, n)
	}
	if !h.timer.Scheduled() {
		h.schedule()
	}
}

// leave takes a session out.
func (h *serviceSessions) leave(s *session) {
	w, g, n := h.worker, h.group, h.group.namespace
	h.lists[s.class].remove(s)
	if h.count--; h.count == 0 {
		g.leave(h)
		w.loop.Cancel(&h.timer)
	}
	if g.count--; g.count == 0 {
		n.leave(g)
	}
	if n.count--; n.count > 0 {
		return
	}
	last := len(w.active) - 1
	w.active[n.index] = w.active[last]
	w.active[n.index].index = n.index
	w.active[last] = nil
	w.active = w.active[:last]
}

// touch notes a datagram of a session; answer says that the endpoint sent it.
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

// schedule sets the timer for the session that ends first. It fires too early if that one
// is used until then, and is set again.
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

// expireShare is how many sessions end in one go; then others have their turn.
const expireShare = 256

// HandleTimer ends the sessions whose timeout is over.
func (h *serviceSessions) HandleTimer(*poll.Timer) {
	h.expire(h.worker.loop.Now())
	h.schedule()
}

// expire ends the sessions whose timeout is over, up to expireShare of them.
func (h *serviceSessions) expire(now int64) {
	t := h.service.terms.Load()
	left := expireShare
	for c := range h.lists {
		for left > 0 {
			s := h.lists[c].head
			if s == nil || s.last+t.timeouts[c] > now {
				break
			}
			s.endIdle()
			left--
		}
	}
}

// list is a list of sessions.
type list struct {
	head, tail *session
}

// push adds a session at the end.
func (l *list) push(s *session) {
	s.prev, s.next = l.tail, nil
	if l.tail != nil {
		l.tail.next = s
	} else {
		l.head = s
	}
	l.tail = s
}

// remove takes a session of the list out.
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
