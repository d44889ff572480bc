package relay

import (
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// side is one socket of a link and the direction that starts there.
type side struct {
	held   *chunk // bytes read but not yet written, or nil
	pipe   *pipe  // borrowed for a turn, or holding inPipe bytes
	bytes  uint64 // written to the other side
	reg    poll.Registration
	fd     int32
	inPipe int32
	state  state
	streak uint8  // copying: consecutive full reads; moving: consecutive turns that moved little
	mark   uint32 // kib at the last check; see widen
}

// state is a set of flags of a side and its direction.
type state uint16

const (
	readable   state = 1 << iota // there may be bytes to read
	finKnown                     // the FIN has arrived, after the unread bytes
	ending                       // all bytes up to the FIN were read
	done                         // the FIN was forwarded
	blocked                      // the destination is full; an event will report when it is writable
	moving                       // the direction splices instead of copying
	queued                       // in the turn queue
	urgent                       // urgent data arrived: reads stop at it, and splice never passes it
	copyOnly                     // splice does not work on this socket
	watchesOut                   // the socket's registration asks for Writable
	probed                       // Probe has tried to read
	failed                       // Probe found it reset
	slow                         // the last write was short
	measured                     // far is decided
	far                          // the source is far away: the kernel tunes the receive buffer
	widened                      // the direction has large buffers and counts against Config.MaxBulk
)

const (
	// promoteAfter is how many consecutive full reads make a direction busy.
	promoteAfter = 2
	// demoteBelow is how many bytes a turn must move in a busy direction. A splice
	// costs as much as copying some 16 KiB.
	demoteBelow = 32 << 10
	// demoteAfter is how many consecutive turns below demoteBelow make a direction
	// quiet.
	demoteAfter = 2
	// slowRead is the read size for a slow destination, because the relay must hold
	// the bytes that it does not accept.
	slowRead = 16 << 10
)

// run makes progress in direction i: at once if it copies, by a turn if it is busy.
func (l *Link) run(i int) {
	s := &l.sides[i]
	switch {
	case s.state&blocked != 0:
	case s.state&moving != 0:
		l.worker.turns.add(l, i)
	default:
		for l.copy(i) {
			if s.streak >= promoteAfter {
				l.promote(i)
				return
			}
		}
	}
}

// promote makes a direction busy, so that it splices.
func (l *Link) promote(i int) {
	w, s := l.worker, &l.sides[i]
	s.state |= moving
	s.streak = 0
	w.stats.Promoted++
	if i == client { // the client's socket inherits this from its listening socket
		w.stats.Others++
		w.kernel.limitUnsent(int(l.sides[endpoint].fd), sys.UnsentLimit)
		l.undelay()
	}
	w.turns.add(l, i)
}

// undelay sets TCP_NODELAY on the endpoint's socket. The kernel does not delay the
// first write, so short connections do not need it.
func (l *Link) undelay() {
	if l.facts&undelayed == 0 {
		l.facts |= undelayed
		l.worker.stats.Others++
		l.worker.kernel.setNoDelay(int(l.sides[endpoint].fd))
	}
}

// copy moves at most one buffer of bytes. It reports whether to continue at once.
// Otherwise the direction waits for an event or is done, or the link has ended.
func (l *Link) copy(i int) (more bool) {
	w, s := l.worker, &l.sides[i]
	if s.held != nil && !l.flush(i) {
		return false
	}
	if s.state&ending != 0 {
		l.pass(i)
		return false
	}
	if s.state&readable == 0 {
		return false
	}
	room := w.buffer
	if s.state&slow != 0 {
		room = room[:slowRead]
	}
	n, e := w.recv(s, room)
	switch {
	case e == sys.EAGAIN:
		w.stats.Wasted++
		s.state &^= readable
		return false
	case e != 0:
		l.lost(i, e)
		return false
	case n == 0:
		l.end(i)
		l.pass(i)
		return false
	}
	l.came(i)
	full := n == len(room)
	if !full {
		l.emptied(i)
	}
	if s.state&moving == 0 {
		if s.streak++; !full {
			s.streak = 0
		}
	}
	return l.write(i, room[:n])
}

// recv reads from a side. EAGAIN means that no bytes are there.
func (w *Worker) recv(s *side, p []byte) (int, sys.Errno) {
	w.stats.Reads++
	n, e := w.kernel.recv(int(s.fd), p)
	if e == sys.EAGAIN && s.state&urgent != 0 {
		// At an urgent byte, EAGAIN may also result from a signal, such as the Go
		// scheduler's.
		w.stats.Reads++
		n, e = w.kernel.recv(int(s.fd), p)
	}
	return n, e
}

// came records that bytes were read from side i.
func (l *Link) came(i int) {
	if s := &l.sides[i]; s.lately() >= measureAfter>>10 && s.state&widened == 0 {
		l.widen(i)
	}
	if i == endpoint && l.FirstByte == 0 {
		l.FirstByte = l.worker.loop.Now()
	}
}

// emptied records that a read took all bytes that had arrived; the next event
// reports more. If the FIN had arrived before the read, no further read is needed.
// Urgent data ends reads early, so they prove nothing. Then the FIN is forwarded
// only after a read without bytes, because no event reports urgent data whose mark
// arrives after the bytes before it.
func (l *Link) emptied(i int) {
	w, s := l.worker, &l.sides[i]
	switch {
	case s.state&urgent != 0:
	case s.state&finKnown != 0:
		w.stats.Others++
		if n, e := w.kernel.unread(int(s.fd)); e != 0 || n > 0 {
			s.state |= urgent
			return
		}
		l.end(i)
	default:
		s.state &^= readable
	}
}

// write sends bytes just read in direction i, and holds those that the other side
// does not accept. It reports whether the direction may continue.
func (l *Link) write(i int, p []byte) bool {
	w, s := l.worker, &l.sides[i]
	n, ok := l.send(i, p)
	if !ok {
		return false
	}
	w.count(s, n)
	if n < len(p) {
		w.hold(s, p[n:])
		return l.block(i)
	}
	s.state &^= slow
	return true
}

// flush sends the chunk that direction i holds. It reports whether the chunk is
// empty.
func (l *Link) flush(i int) bool {
	s := &l.sides[i]
	n, ok := l.send(i, s.held.bytes())
	if !ok {
		return false
	}
	l.worker.delivered(s, n)
	return s.held == nil || l.block(i)
}

// send writes bytes of direction i to the other side, which accepts n of them. It returns
// false if that ended the link.
func (l *Link) send(i int, p []byte) (n int, ok bool) {
	w, s := l.worker, &l.sides[i]
	if i == client && s.bytes > 0 {
		l.undelay()
	}
	w.stats.Writes++
	// With MSG_MORE, the FIN that follows goes into the same segment.
	n, e := w.kernel.send(int(l.sides[1-i].fd), p, s.state&ending != 0)
	if e == sys.EAGAIN {
		w.stats.Wasted++
		return 0, true
	}
	if e != 0 {
		l.broken(1-i, e)
		return 0, false
	}
	return n, true
}

// block stops direction i until the other side is writable. The kernel reports that
// after a short write.
func (l *Link) block(i int) bool {
	l.sides[i].state |= blocked | slow
	l.await(1 - i)
	return false
}

// end records that side i has sent everything.
func (l *Link) end(i int) {
	l.sides[i].state |= ending
	l.closed(i)
}

// pass forwards the FIN of side i after all bytes. If the other direction is done
// too, closing the socket sends the FIN.
func (l *Link) pass(i int) {
	w, s, other := l.worker, &l.sides[i], &l.sides[1-i]
	if s.state&done != 0 {
		return
	}
	s.state |= done
	s.state &^= moving
	if other.state&done != 0 {
		if l.facts&endpointFirst != 0 {
			l.finish(EndpointFin)
		} else {
			l.finish(ClientFin)
		}
		return
	}
	w.stats.Shuts++
	// An error means that the socket was reset, which its next event reports.
	w.kernel.shutdownWrite(int(other.fd))
	l.facts |= halfClosed
	l.setTimer(l.lookInterval())
}

// drain forwards the bytes that side i sent before it failed, as far as the other
// side accepts them at once. It returns the error behind the bytes, or 0 if it did
// not get there.
func (l *Link) drain(i int) sys.Errno {
	w, s := l.worker, &l.sides[i]
	other := int(l.sides[1-i].fd)
	if s.state&done != 0 {
		return 0
	}
	s.state |= urgent // there may be urgent data, and no event follows
	for s.inPipe > 0 {
		// A signal may shorten a splice; only EAGAIN means that the pipe or socket
		// is full.
		w.stats.Splices++
		n, e := w.kernel.splice(s.pipe.r, other, int(s.inPipe))
		if e != 0 {
			return 0
		}
		w.count(s, n)
		s.inPipe -= int32(n)
	}
	for {
		p := w.buffer
		if s.held != nil {
			p = s.held.bytes()
		} else {
			n, e := w.recv(s, p)
			if e == sys.EAGAIN {
				return 0
			}
			if e != 0 || n == 0 {
				return e
			}
			l.came(i)
			p = p[:n]
		}
		w.stats.Writes++
		n, e := w.kernel.send(other, p, false)
		if e != 0 {
			return 0
		}
		if s.held != nil {
			w.delivered(s, n)
		} else {
			w.count(s, n)
		}
		if n < len(p) {
			return 0
		}
	}
}

// hold copies p into a chunk of a direction that has none.
func (w *Worker) hold(s *side, p []byte) {
	s.held = w.chunks.take(p)
	w.stats.Held += uint64(len(p))
}

// delivered records that n of the held bytes were written.
func (w *Worker) delivered(s *side, n int) {
	w.count(s, n)
	w.stats.Held -= uint64(n)
	s.held.from += int32(n)
	if s.held.from == s.held.to {
		w.chunks.put(s.held)
		s.held = nil
	}
}

func (w *Worker) count(s *side, n int) {
	s.bytes += uint64(n)
	w.stats.Bytes += uint64(n)
}

// giveUp releases the chunk and the pipe of a direction. It closes a pipe that is
// not empty.
func (w *Worker) giveUp(s *side) {
	if s.held != nil {
		w.stats.Held -= uint64(s.held.to - s.held.from)
		w.chunks.put(s.held)
		s.held = nil
	}
	if s.pipe != nil {
		if s.inPipe > 0 {
			s.pipe.destroy(w)
		} else {
			w.pipes.put(w, s.pipe)
		}
		s.pipe, s.inPipe = nil, 0
	}
}
