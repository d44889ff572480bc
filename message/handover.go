package message

import (
	"errors"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// Moved is a link between two processes, or two workers: what Detach takes out of the one
// and Attach brings into the other. Its descriptors are listed by FDs.
type Moved struct {
	Quiet time.Duration `json:"quiet"`           // since the last message
	First time.Duration `json:"first,omitempty"` // since the endpoint's first message; 0: none came
	Left  time.Duration `json:"left,omitempty"`  // until the end of draining; 0: it does not drain
	Pause int64         `json:"pause,omitempty"`
	Facts uint8         `json:"facts"`
	End   End           `json:"end,omitempty"`
	Sides [2]MovedSide  `json:"sides"` // the client's, the endpoint's
}

// MovedSide is one socket of a moved link, and the direction that starts there.
type MovedSide struct {
	Messages uint64          `json:"messages"` // sent to the other side
	Bytes    uint64          `json:"bytes"`
	Streams  uint16          `json:"streams"`
	State    uint8           `json:"state"`
	Failed   uint8           `json:"failed,omitempty"`
	Held     int             `json:"held,omitempty"` // bytes of the message that is held, which are in a file in memory
	Info     sys.MessageInfo `json:"info"`
	Watched  bool            `json:"watched"` // the loop reports what happens to the socket

	fd   int
	file int // of the held message
	held []byte
}

// FDs appends the descriptors: of the two sockets, then those of held messages.
func (m *Moved) FDs(to []int) []int {
	to = append(to, m.Sides[client].fd, m.Sides[endpoint].fd)
	for i := range m.Sides {
		if m.Sides[i].Held > 0 {
			to = append(to, m.Sides[i].file)
		}
	}
	return to
}

var errMoved = errors.New("not a link")

// SetFDs is the reverse of FDs, and reads held messages. It returns an error if the descriptors
// are not those of the link, or if what the other process says of it makes no sense.
func (m *Moved) SetFDs(fds []int) error {
	if len(fds) < 2 {
		return errMoved
	}
	m.Sides[client].fd, m.Sides[endpoint].fd = fds[0], fds[1]
	fds = fds[2:]
	for i := range m.Sides {
		s := &m.Sides[i]
		if s.Held == 0 && state(s.State)&partial == 0 {
			continue
		}
		if len(fds) == 0 {
			return errMoved
		}
		s.file, fds = fds[0], fds[1:]
		if s.held = sys.ReadMemoryFile(s.file, s.Held); s.held == nil {
			return errMoved
		}
	}
	if len(fds) > 0 {
		return errMoved
	}
	return nil
}

// closeFiles closes those of held messages.
func (m *Moved) closeFiles() {
	for i := range m.Sides {
		if m.Sides[i].Held > 0 {
			sys.Close(m.Sides[i].file)
		}
	}
}

// Detach takes a running link out of the loop, between two events, so that another process can
// have it. Given or Return must follow; until then the link does nothing, and Abort must not
// be called. ok is false if the kernel has no memory for what the link holds: then the link
// stays.
func (w *Worker) Detach(l *Link) (m Moved, ok bool) {
	now := w.loop.Now()
	m = Moved{Quiet: time.Duration(now - l.moved), Pause: l.pause, Facts: uint8(l.facts &^ running), End: l.end}
	if l.first != 0 {
		m.First = time.Duration(max(now-l.first, 1))
	}
	if l.until != 0 {
		m.Left = time.Duration(max(l.until-now, 1))
	}
	for i := range l.sides {
		s, to := &l.sides[i], &m.Sides[i]
		*to = MovedSide{
			Messages: s.messages, Bytes: s.bytes, Streams: s.streams, State: uint8(s.state), Failed: s.failed, Info: s.info,
			Watched: s.reg.Valid(), fd: int(s.fd),
		}
		if s.held == nil {
			continue
		}
		var err error
		if to.file, err = sys.WriteMemoryFile(s.held); err != nil {
			m.closeFiles()
			return m, false
		}
		to.Held = len(s.held)
	}
	w.loop.Cancel(&l.timer)
	for i := range l.sides {
		if s := &l.sides[i]; s.reg.Valid() {
			w.loop.Remove(s.reg)
			s.reg, s.watched = poll.Registration{}, 0
		}
	}
	return m, true
}

// Given closes the descriptors of a detached link that another process has. LinkEnded is not
// called, and the peers notice nothing.
func (w *Worker) Given(l *Link, m *Moved) {
	m.closeFiles()
	for i := range l.sides {
		s := &l.sides[i]
		l.letGo(i)
		w.kernel.close(int(s.fd)) // the other process has the socket: this aborts nothing
		s.fd, s.state = -1, 0
	}
	w.stats.Open--
	l.facts = 0
	l.owner = nil
}

// Return undoes Detach. The link may end at once, as at Start.
func (w *Worker) Return(l *Link, m *Moved) {
	m.closeFiles()
	l.resume(m)
}

// Attach starts a link that Detach took out of another process. Like Start, it takes over the
// descriptors, and the link may end at once. What it holds counts, beyond Config.MaxHeld too.
func (w *Worker) Attach(l *Link, m *Moved, owner Owner) {
	w.prepare()
	w.stats.Open++
	m.closeFiles()
	now := w.loop.Now()
	*l = Link{worker: w, owner: owner, moved: now - int64(m.Quiet), pause: m.Pause, facts: facts(m.Facts) | running, end: m.End}
	if m.First != 0 {
		l.first = max(now-int64(m.First), 1)
	}
	if m.Left != 0 {
		l.until = now + int64(m.Left)
	}
	for i := range l.sides {
		from, s := &m.Sides[i], &l.sides[i]
		*s = side{
			fd: int32(from.fd), streams: from.Streams, state: state(from.State), failed: from.Failed,
			held: from.held, info: from.Info, messages: from.Messages, bytes: from.Bytes,
		}
		if s.reserved = len(s.held); s.state&partial != 0 {
			s.reserved = max(s.reserved, w.config.MaxMessage)
		}
		w.reserve(s.reserved)
	}
	l.resume(m)
}

// resume continues a link that is not registered with the loop. Registering reports what has
// happened meanwhile.
func (l *Link) resume(m *Moved) {
	for i := range l.sides {
		if m.Sides[i].Watched && l.facts&running != 0 {
			l.watch(i)
		}
	}
	switch {
	case l.facts&running == 0:
	case l.facts&draining != 0:
		l.drained()
	default:
		l.setTimer()
	}
}
