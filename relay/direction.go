package relay

import (
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// side is one socket of a link and the direction that begins there.
type side struct {
	held   *chunk // read and not yet written; nil: nothing
	pipe   *pipe  // borrowed for a turn, or holding inPipe bytes
	bytes  uint64 // written to the other side
	reg    poll.Registration
	fd     int32
	inPipe int32
	state  state
	streak uint8  // copying: full reads in a row; moving: turns in a row that moved little
	mark   uint32 // kib at the last look: see widen
}

// state is what a side and its direction remember.
type state uint16

const (
	readable   state = 1 << iota // there may be something to read
	finKnown                     // the FIN has arrived, behind what there is to read
	ending                       // everything was read, up to the FIN
	done                         // the FIN was passed on
	blocked                      // the destination takes no more, and will say when it does
	moving                       // the mode: moving, not copying
	queued                       // waits for its turn
	urgent                       // urgent data came: reads stop short at it, and splice would never pass it
	copyOnly                     // splice does not work on this socket
	watchesOut                   // the socket's registration asks for Writable
	probed                       // Probe has tried to read
	failed                       // Probe found it reset
	slow                         // the destination took less than it was offered, last time
	measured                     // it is known whether the source is far away
	far                          // it is: the receive buffer of a bulk stream grows by itself
	widened                      // the direction has the buffers of a bulk stream, and places of Config.MaxBulk
)

const (
	// promoteAfter is how many full reads in a row make a direction busy.
	promoteAfter = 2
	// demoteBelow is how much a turn moves at least in a busy direction. A
	// splice costs as much as copying some 16 KiB.
	demoteBelow = 32 << 10
	// demoteAfter is how many turns in a row below that make it quiet.
	demoteAfter = 2
	// boundAfter is how many bytes an endpoint delivers before its socket's receive
	// buffer is bounded: the kernel's own tuning has not got far by then.
	boundAfter = 64 << 10
	// slowRead is how much is read at once for a slow destination: what it does
	// not take has to be held.
	slowRead = 16 << 10
)

// run does what there is to do in direction i: at once if it copies, by a turn
// if it is busy.
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

// promote makes a direction a busy one.
func (l *Link) promote(i int) {
	w, s := l.worker, &l.sides[i]
	s.state |= moving
	s.streak = 0
	w.stats.Promoted++
	if i == client { // the client's socket has these from its listener
		w.stats.Others++
		w.kernel.limitUnsent(int(l.sides[endpoint].fd), sys.UnsentLimit)
		l.undelay()
	}
	w.turns.add(l, i)
}

// undelay has the endpoint's socket send small writes at once. The first write is
// not delayed anyway: short connections need nothing.
func (l *Link) undelay() {
	if l.facts&undelayed == 0 {
		l.facts |= undelayed
		l.worker.stats.Others++
		l.worker.kernel.setNoDelay(int(l.sides[endpoint].fd))
	}
}

// copy moves at most one bufferful. It reports whether there may be more to do
// at once; if not, the direction waits for an event, or is done, or the link is
// over.
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

// recv reads from a side. EAGAIN means that it is empty.
func (w *Worker) recv(s *side, p []byte) (int, sys.Errno) {
	w.stats.Reads++
	n, e := w.kernel.recv(int(s.fd), p)
	if e == sys.EAGAIN && s.state&urgent != 0 {
		// At an urgent byte a signal, such as the Go scheduler's, is enough
		// for that.
		w.stats.Reads++
		n, e = w.kernel.recv(int(s.fd), p)
	}
	return n, e
}

// came notes that bytes were read from side i.
func (l *Link) came(i int) {
	if s := &l.sides[i]; s.bytes >= boundAfter && s.state&widened == 0 {
		l.widen(i)
	}
	if i == endpoint && l.FirstByte == 0 {
		l.FirstByte = l.worker.loop.Now()
	}
}

// emptied notes that a read took everything that had arrived: the next event
// tells of more. If the FIN was there before the read, it is next, and need not
// be read. Urgent data ends reads early, so that nothing follows from them; the
// FIN is passed on only when nothing is left, because no event tells of urgent
// data whose mark came after the bytes that it points to.
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

// write delivers what was just read in direction i, or holds what the other side
// does not take. It reports whether the direction may go on.
func (l *Link) write(i int, p []byte) bool {
	w, s := l.worker, &l.sides[i]
	if i == client && s.bytes > 0 {
		l.undelay()
	}
	w.stats.Writes++
	// A FIN that follows at once travels in the same segment.
	n, e := w.kernel.send(int(l.sides[1-i].fd), p, s.state&ending != 0)
	if e == sys.EAGAIN {
		w.stats.Wasted++
		n = 0
	} else if e != 0 {
		l.broken(1-i, e)
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

// flush delivers what direction i holds in a chunk. It reports whether that is
// all gone.
func (l *Link) flush(i int) bool {
	w, s := l.worker, &l.sides[i]
	p := s.held.bytes()
	if i == client && s.bytes > 0 {
		l.undelay()
	}
	w.stats.Writes++
	n, e := w.kernel.send(int(l.sides[1-i].fd), p, s.state&ending != 0)
	if e == sys.EAGAIN {
		w.stats.Wasted++
		return l.block(i)
	}
	if e != 0 {
		l.broken(1-i, e)
		return false
	}
	w.delivered(s, n)
	return s.held == nil || l.block(i)
}

// block stops direction i until the other side is writable. A socket that took
// less than it was offered will say when it has room again.
func (l *Link) block(i int) bool {
	l.sides[i].state |= blocked | slow
	l.await(1 - i)
	return false
}

// end notes that side i has sent everything.
func (l *Link) end(i int) {
	l.sides[i].state |= ending
	l.closed(i)
}

// pass passes the FIN of side i on, after everything is delivered. If the other
// direction is done too, closing does it.
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
	// If this fails, the socket was reset, which its next event says.
	w.kernel.shutdownWrite(int(other.fd))
	l.facts |= halfClosed
	l.setTimer(l.lookInterval())
}

// drain delivers what side i sent before it was lost, as far as the other side
// takes it at once, and returns the error at the end of it, 0 if that did not
// come.
func (l *Link) drain(i int) sys.Errno {
	w, s := l.worker, &l.sides[i]
	other := int(l.sides[1-i].fd)
	if s.state&done != 0 {
		return 0
	}
	s.state |= urgent // perhaps, and no event will tell any more
	for s.inPipe > 0 {
		// It may stop short for a signal: only EAGAIN means that there is no room.
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

// hold keeps p for a direction that holds nothing.
func (w *Worker) hold(s *side, p []byte) {
	s.held = w.chunks.take(p)
	w.stats.Held += uint64(len(p))
}

// delivered notes that n of the bytes that s holds were written.
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

// giveUp returns what a direction holds or has borrowed. A pipe that is not empty
// is closed.
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
