package relay

import (
	"errors"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
)

// Moved is a link between two processes, or two workers: what Detach takes out of the one
// and Attach brings into the other. Its descriptors are listed by FDs.
type Moved struct {
	Quiet     time.Duration `json:"quiet"`                // since the last movement
	FirstByte time.Duration `json:"first_byte,omitempty"` // since the endpoint's first byte; 0 = none came
	Preface   uint16        `json:"preface,omitempty"`    // bytes that Prepend put before the client's
	Facts     uint8         `json:"facts"`
	Sides     [2]MovedSide  `json:"sides"` // the client's, the endpoint's
}

// MovedSide is one socket of a moved link, and the direction that starts there.
type MovedSide struct {
	Bytes  uint64 `json:"bytes"` // written to the other side
	State  uint16 `json:"state"`
	InPipe int32  `json:"in_pipe,omitempty"` // bytes read but not written yet, which are in a pipe
	Size   int    `json:"size,omitempty"`    // the pipe's capacity

	fd      int
	r, w    int // of the pipe
	hasPipe bool
}

const (
	movedFacts = endpointFirst | closing | halfClosed | matured | undelayed
	movedState = readable | finKnown | ending | done | blocked | moving | urgent | copyOnly | slow | measured | far | widened
)

// FDs appends the descriptors: of the two sockets, then both ends of each pipe.
func (m *Moved) FDs(to []int) []int {
	to = append(to, m.Sides[client].fd, m.Sides[endpoint].fd)
	for i := range m.Sides {
		if s := &m.Sides[i]; s.hasPipe {
			to = append(to, s.r, s.w)
		}
	}
	return to
}

var errMoved = errors.New("not a link")

// SetFDs is the reverse of FDs. It returns an error if the descriptors are not those of the
// link, or if what the other process says of it makes no sense.
func (m *Moved) SetFDs(fds []int) error {
	if len(fds) < 2 {
		return errMoved
	}
	m.Sides[client].fd, m.Sides[endpoint].fd = fds[0], fds[1]
	fds = fds[2:]
	for i := range m.Sides {
		s := &m.Sides[i]
		if s.InPipe < 0 || s.Size < 0 || s.State&uint16(done) != 0 && s.InPipe > 0 {
			return errMoved
		}
		if s.hasPipe = s.InPipe > 0; s.hasPipe {
			if len(fds) < 2 {
				return errMoved
			}
			s.r, s.w, fds = fds[0], fds[1], fds[2:]
		}
	}
	if len(fds) > 0 {
		return errMoved
	}
	return nil
}

// Detach takes a running link out of the loop, between two events, so that another process can
// have it. Given or Return must follow; until then the link does nothing, and Abort must not
// be called. ok is false if there is no pipe for the bytes that the link holds: then the link
// stays.
func (w *Worker) Detach(l *Link) (m Moved, ok bool) {
	for i := range l.sides {
		if !w.pour(&l.sides[i]) {
			return m, false
		}
	}
	now := w.loop.Now()
	w.loop.Cancel(&l.timer)
	w.turns.remove(l)
	m = Moved{Quiet: time.Duration(now - l.moved), Preface: l.preface, Facts: uint8(l.facts & movedFacts)}
	if l.FirstByte != 0 {
		m.FirstByte = time.Duration(max(now-l.FirstByte, 1))
	}
	for i := range l.sides {
		s := &l.sides[i]
		w.loop.Remove(s.reg)
		w.stats.Controls++
		s.reg = poll.Registration{}
		s.state &^= queued | watchesOut
		m.Sides[i] = MovedSide{Bytes: s.bytes, State: uint16(s.state & movedState), fd: int(s.fd)}
		if s.inPipe > 0 {
			to := &m.Sides[i]
			to.InPipe, to.Size, to.r, to.w, to.hasPipe = s.inPipe, s.pipe.size, s.pipe.r, s.pipe.w, true
		}
	}
	return m, true
}

// pour moves the bytes that a direction holds into a pipe, which another process can have.
func (w *Worker) pour(s *side) bool {
	if s.held == nil {
		return true
	}
	p := newPipe(w)
	if p == nil {
		return false
	}
	w.relay.pipes.Add(1)
	bytes := s.held.bytes()
	w.stats.Others++
	if n, e := w.kernel.write(p.w, bytes); e != 0 || n != len(bytes) {
		p.destroy(w)
		return false
	}
	w.stats.Held -= uint64(len(bytes))
	w.chunks.put(s.held)
	s.held, s.pipe, s.inPipe = nil, p, int32(len(bytes))
	s.state |= moving // only turns empty pipes
	return true
}

// Given closes the descriptors of a detached link that another process has. LinkEnded is not
// called, and the peers notice nothing.
func (w *Worker) Given(l *Link) {
	for i := range l.sides {
		s := &l.sides[i]
		s.endBulk(w.relay)
		w.giveUp(s)
		w.stats.Closes++
		w.kernel.close(int(s.fd)) // the other process has the socket: this resets nothing
		s.fd, s.state, s.streak = -1, 0, 0
	}
	w.stats.Open--
	l.facts &^= running
	l.owner = nil
}

// Return undoes Detach. The link may end at once, as at Start.
func (w *Worker) Return(l *Link) { l.resume() }

// Attach starts a link that Detach took out of another process. Like Start, it takes over the
// descriptors, and the link may end at once. It counts against Config.MaxPipes and MaxBulk,
// beyond which it may go.
func (w *Worker) Attach(l *Link, m *Moved, owner Owner) {
	w.stats.Open++
	now := w.loop.Now()
	l.worker, l.owner = w, owner
	l.moved, l.FirstByte = now-int64(m.Quiet), 0
	if m.FirstByte != 0 {
		l.FirstByte = now - int64(m.FirstByte)
	}
	l.preface = m.Preface
	l.facts = fact(m.Facts)&movedFacts | running
	for i := range l.sides {
		from := &m.Sides[i]
		s := &l.sides[i]
		*s = side{fd: int32(from.fd), bytes: from.Bytes, state: state(from.State) & movedState}
		s.mark = s.kib()
		if from.hasPipe {
			s.pipe, s.inPipe = &pipe{r: from.r, w: from.w, size: from.Size}, from.InPipe
			s.state |= moving
			w.relay.pipes.Add(1)
		}
		if s.state&widened != 0 {
			w.relay.bulk.Add(s.places())
		}
	}
	l.resume()
}

// resume continues a link that is not registered with the loop. Registering reports what has
// happened meanwhile.
func (l *Link) resume() {
	for i := range l.sides {
		if s := &l.sides[i]; l.facts&running != 0 && (s.inPipe > 0 || s.state&(readable|ending) != 0) {
			l.run(i)
		}
	}
	l.attend()
}
