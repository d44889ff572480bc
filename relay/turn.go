package relay

import "github.com/sluice-proxy/sluice/internal/sys"

const (
	// turnShare is how many bytes a direction may move in one turn.
	turnShare = 256 << 10
	// roundShare is how many bytes all turns of one round move before the loop
	// polls for events: some hundred microseconds.
	roundShare = 1 << 20
	// turnPrice is the cost of a turn in addition to its bytes, so that turns that
	// move little also use up roundShare.
	turnPrice = 4 << 10
)

// turnQueue is the FIFO queue of directions that wait for a turn.
type turnQueue struct {
	line []turnEntry
	head int
}

type turnEntry struct {
	link *Link
	side uint8
}

func (q *turnQueue) empty() bool { return q.head == len(q.line) }

// add appends a direction, unless it is queued.
func (q *turnQueue) add(l *Link, i int) {
	s := &l.sides[i]
	if s.state&queued != 0 {
		return
	}
	s.state |= queued
	if q.head > 0 && len(q.line) == cap(q.line) {
		n := copy(q.line, q.line[q.head:])
		clear(q.line[n:])
		q.line, q.head = q.line[:n], 0
	}
	q.line = append(q.line, turnEntry{l, uint8(i)})
}

// next removes and returns the first direction. The queue must not be empty.
func (q *turnQueue) next() (*Link, int) {
	e := q.line[q.head]
	q.line[q.head] = turnEntry{}
	q.head++
	if q.empty() {
		q.line, q.head = q.line[:0], 0
	}
	e.link.sides[e.side].state &^= queued
	return e.link, int(e.side)
}

// remove removes an ended link.
func (q *turnQueue) remove(l *Link) {
	if (l.sides[client].state|l.sides[endpoint].state)&queued == 0 {
		return
	}
	kept := q.line[:q.head]
	for _, e := range q.line[q.head:] {
		if e.link != l {
			kept = append(kept, e)
		}
	}
	clear(q.line[len(kept):])
	q.line = kept
}

// giveTurns gives turns until this round's share is used up.
func (w *Worker) giveTurns() {
	for left := roundShare; left > 0 && !w.turns.empty(); {
		l, i := w.turns.next()
		l.moved = w.loop.Now()
		left -= l.turn(i) + turnPrice
	}
}

// turn moves up to turnShare bytes in direction i, and queues the direction again
// if it has more work. It returns the number of bytes.
func (l *Link) turn(i int) (moved int) {
	w, s := l.worker, &l.sides[i]
	before := w.stats.Bytes // after its end, the owner may reuse the link
	for more := true; more && moved < turnShare; moved = int(w.stats.Bytes - before) {
		switch {
		case s.inPipe > 0:
			more = l.empty(i)
		case s.held != nil || s.state&(urgent|copyOnly) != 0 || !w.config.Splice:
			more = l.copy(i)
		default:
			more = l.splice(i)
		}
		if !more && l.facts&running == 0 {
			return int(w.stats.Bytes - before)
		}
	}
	if s.pipe != nil && s.inPipe == 0 {
		w.pipes.put(w, s.pipe)
		s.pipe = nil
	}
	if s.state&(readable|ending) != 0 && s.state&(blocked|done) == 0 {
		w.turns.add(l, i)
		s.streak = 0
		return moved
	}
	if moved >= demoteBelow || s.state&blocked != 0 {
		s.streak = 0
	} else if s.streak++; s.streak == demoteAfter {
		s.streak = 0
		s.state &^= moving
	}
	return moved
}

// splice moves at most one pipe of bytes, for a direction that holds none. It is
// called only with an empty pipe, so EAGAIN means that there is nothing to read.
func (l *Link) splice(i int) (more bool) {
	w, s := l.worker, &l.sides[i]
	if s.state&ending != 0 {
		l.pass(i)
		return false
	}
	if s.state&readable == 0 {
		return false
	}
	if s.pipe == nil {
		if s.pipe = w.pipes.take(w); s.pipe == nil {
			w.stats.NoPipe++
			return l.copy(i)
		}
	}
	w.stats.Splices++
	n, e := w.kernel.splice(int(s.fd), s.pipe.w, s.pipe.size)
	switch {
	case e == sys.EAGAIN:
		w.stats.Wasted++
		s.state &^= readable
		return false
	case e == sys.EINVAL:
		s.state |= copyOnly
		return true
	case e != 0:
		l.broken(i, e) // urgent data may precede the error
		return false
	case n == 0:
		// This is the end of the stream, or urgent data before it: splice stops at
		// both, and only a read distinguishes them.
		s.state |= urgent
		return true
	}
	l.came(i)
	s.inPipe = int32(n)
	return l.empty(i)
}

// empty writes the pipe to the other side. It reports whether to continue. Only
// EAGAIN means that the other side is full and that an event will follow. A short
// splice may have other reasons, after which no event comes.
func (l *Link) empty(i int) bool {
	w, s := l.worker, &l.sides[i]
	w.stats.Splices++
	n, e := w.kernel.splice(s.pipe.r, int(l.sides[1-i].fd), int(s.inPipe))
	if e == sys.EAGAIN {
		w.stats.Wasted++
		return l.block(i)
	}
	if e != 0 {
		l.broken(1-i, e)
		return false
	}
	w.count(s, n)
	w.stats.Spliced += uint64(n)
	s.inPipe -= int32(n)
	return true
}
