package message

import (
	"fmt"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// fake is a kernel with two sockets, a loop, and a clock. A script decides what its peers
// do, and how the kernel cuts messages into parts.
type fake struct {
	choose func(n int) int
	socks  [2]*fakeSock
	now    int64
	timers map[*poll.Timer]fakeTimer
	ticks  []func()
	fault  string

	shared bool // another process has the descriptors too
	left   int  // descriptors closed while shared
}

type fakeTimer struct {
	at int64
	h  poll.TimerHandler
}

// letter is a message, or a notice if kind is not SCTPMessage.
type letter struct {
	kind    sys.Received
	info    sys.MessageInfo
	text    []byte
	arrived int // bytes of the text
	read    int
}

// fakeSock is one of the link's sockets, with its peer.
type fakeSock struct {
	side    int
	streams uint16   // that its peer grants
	sent    []letter // by its peer, whole
	in      []letter // not read yet
	fin     bool     // the peer has shut down
	err     sys.Errno
	raised  bool // the error was reported
	taken   int  // messages that the kernel took for the peer
	got     []letter
	unread  []int // sizes of what the peer has not taken yet
	used    int   // their sum
	room    int   // of the send buffer
	starved bool  // the kernel has no memory for what is sent, which epoll does not know
	calls   int   // of send
	shut    bool  // we have shut it down
	done    bool  // that is complete
	closed  bool
	inOrder bool

	handler poll.Handler
	tag     uint8
	mask    poll.Events
	gen     int
}

func newFake(choose func(int) int) *fake {
	f := &fake{choose: choose, now: 1, timers: map[*poll.Timer]fakeTimer{}}
	for i := range f.socks {
		f.socks[i] = &fakeSock{side: i}
	}
	return f
}

func (f *fake) failf(format string, args ...any) {
	if f.fault == "" {
		f.fault = fmt.Sprintf(format, args...)
	}
}

func (f *fake) sock(fd int) *fakeSock {
	s := f.socks[fd-10]
	if s.closed {
		f.failf("a call on the closed side %d", s.side)
	}
	return s
}

var (
	_ kernel = (*fake)(nil)
	_ loop   = (*fake)(nil)
)

func (f *fake) receive(_ *sys.SCTPMailbox, fd int, p []byte) (int, sys.Received, sys.MessageInfo, sys.Errno) {
	s := f.sock(fd)
	if len(s.in) > 0 {
		m := &s.in[0]
		if m.kind != sys.SCTPMessage {
			s.in = s.in[1:]
			return 12, m.kind, sys.MessageInfo{}, 0
		}
		n := min(len(p), m.arrived-m.read)
		if n == 0 {
			return -1, 0, sys.MessageInfo{}, f.none(s)
		}
		if f.choose(4) == 0 {
			n = 1 + f.choose(n)
		}
		copy(p, m.text[m.read:m.read+n])
		if m.read += n; m.read < len(m.text) {
			return n, sys.SCTPPart, m.info, 0
		}
		info := m.info
		s.in = s.in[1:]
		return n, sys.SCTPMessage, info, 0
	}
	if e := f.none(s); e != sys.EAGAIN || !s.fin && !s.done {
		return -1, 0, sys.MessageInfo{}, e
	}
	return 0, sys.SCTPMessage, sys.MessageInfo{}, 0
}

// none is what a socket without data says: its error only once.
func (f *fake) none(s *fakeSock) sys.Errno {
	if s.err != 0 && !s.raised {
		s.raised = true
		return s.err
	}
	return sys.EAGAIN
}

func (f *fake) send(_ *sys.SCTPMailbox, fd int, p []byte, info sys.MessageInfo) sys.Errno {
	s := f.sock(fd)
	s.calls++
	switch {
	case len(p) == 0:
		f.failf("an empty message is sent")
		return sys.EINVAL
	case s.err != 0 && !s.raised:
		s.raised = true
		return s.err
	case s.err != 0 || s.fin || s.shut:
		return sys.EPIPE
	case info.Stream >= s.streams:
		return sys.EINVAL
	case s.used >= s.room, s.starved:
		return sys.EAGAIN
	}
	s.taken++
	s.got = append(s.got, letter{info: info, text: append([]byte(nil), p...)})
	s.unread = append(s.unread, len(p))
	s.used += len(p)
	return 0
}

func (f *fake) writable(fd int) bool {
	s := f.sock(fd)
	return s.used < s.room || s.err != 0 || s.fin
}

func (f *fake) unsent(fd int) int {
	s := f.sock(fd)
	if s.err != 0 {
		return 0
	}
	return len(s.unread)
}

func (f *fake) shutdown(fd int) sys.Errno {
	s := f.sock(fd)
	if s.err != 0 || s.fin {
		return sys.ENOTCONN
	}
	if s.shut {
		f.failf("side %d is shut down twice", s.side)
	}
	s.shut = true
	f.peerTakes(s, 0)
	return 0
}

// close aborts: what the peer has not taken is lost.
func (f *fake) close(fd int) {
	s := f.sock(fd)
	if f.shared {
		f.left++
		return
	}
	s.closed = true
	s.got = s.got[:len(s.got)-len(s.unread)]
}

func (f *fake) closeInOrder(fd int) {
	s := f.sock(fd)
	s.closed, s.inOrder = true, true
}

// peerTakes has the peer take a number of messages. Once it has all after our shutdown,
// that is complete.
func (f *fake) peerTakes(s *fakeSock, n int) {
	for ; n > 0 && len(s.unread) > 0; n-- {
		s.used -= s.unread[0]
		s.unread = s.unread[1:]
	}
	if s.shut && !s.done && !s.fin && s.err == 0 && len(s.unread) == 0 {
		s.done = true
		if n := len(s.in); n > 0 {
			s.in[n-1].arrived = len(s.in[n-1].text) // it sends what it has begun before it answers
		}
		s.in = append(s.in, letter{kind: sys.SCTPShutDown})
	}
}

func (f *fake) Now() int64    { return f.now }
func (f *fake) Lately() int64 { return f.now }

func (f *fake) Add(fd int, tag uint8, ev poll.Events, h poll.Handler) (poll.Registration, error) {
	s := f.sock(fd)
	if s.handler != nil {
		f.failf("side %d is registered twice", s.side)
	}
	s.handler, s.tag, s.mask = h, tag, ev
	return registrations[s.side], nil
}

func (f *fake) registered(r poll.Registration) *fakeSock {
	for i, s := range f.socks {
		if registrations[i] == r && s.handler != nil {
			return s
		}
	}
	f.failf("no such registration")
	return f.socks[0]
}

func (f *fake) Modify(r poll.Registration, ev poll.Events) error {
	f.registered(r).mask = ev
	return nil
}

func (f *fake) Hand(r poll.Registration, tag uint8, h poll.Handler) bool {
	s := f.registered(r)
	s.handler, s.tag = h, tag
	return true
}

func (f *fake) Remove(r poll.Registration) { f.Forget(r) }

func (f *fake) Forget(r poll.Registration) {
	s := f.registered(r)
	s.handler = nil
	s.gen++
}

func (f *fake) Schedule(t *poll.Timer, at int64, h poll.TimerHandler) { f.timers[t] = fakeTimer{at, h} }
func (f *fake) Cancel(t *poll.Timer)                                  { delete(f.timers, t) }
func (f *fake) AtTick(tick func())                                    { f.ticks = append(f.ticks, tick) }
func (f *fake) AtWait(func())                                         {}

// registrations are two that differ, made by a real loop.
var registrations = func() (r [2]poll.Registration) {
	l, err := poll.New()
	if err != nil {
		panic(err)
	}
	defer l.Stop()
	for i := range r {
		a, _, e := sys.Pipe()
		if e != 0 {
			panic(e)
		}
		if r[i], err = l.Add(a, 0, poll.Readable, nil); err != nil {
			panic(err)
		}
	}
	return r
}()

// state is what a level-triggered epoll says of a socket.
func (s *fakeSock) state() (ev poll.Events) {
	readable := s.fin || s.done || s.err != 0 && !s.raised
	if len(s.in) > 0 {
		m := s.in[0]
		readable = readable || m.kind != sys.SCTPMessage || m.arrived > m.read
	}
	if readable {
		ev |= poll.Readable
	}
	if s.used < s.room || s.fin || s.err != 0 {
		ev |= poll.Writable
	}
	ev &= s.mask
	if s.err != 0 && !s.raised {
		ev |= poll.Failed
	}
	if s.done {
		ev |= poll.HungUp
	}
	return ev
}

// round is one round of the loop; false if it would wait.
func (f *fake) round() bool {
	var batch []*fakeSock
	var events []poll.Events
	var gens []int
	for _, s := range f.socks {
		if s.handler != nil && !s.closed {
			if ev := s.state(); ev != 0 {
				batch, events, gens = append(batch, s), append(events, ev), append(gens, s.gen)
			}
		}
	}
	if len(batch) == 2 && f.choose(2) == 0 {
		batch[0], batch[1] = batch[1], batch[0]
		events[0], events[1] = events[1], events[0]
		gens[0], gens[1] = gens[1], gens[0]
	}
	for i, s := range batch {
		if s.handler != nil && s.gen == gens[i] {
			s.handler.HandleEvents(s.tag, events[i])
		}
	}
	for _, tick := range f.ticks {
		tick()
	}
	return len(batch) > 0
}

// settle runs the loop until it would wait. A loop that goes on for ever spins.
func (f *fake) settle() {
	for n := 0; f.fault == "" && f.round(); n++ {
		if n == 5000 {
			f.failf("the loop spins: client %v of %v, endpoint %v of %v", f.socks[0].state(), f.socks[0].mask, f.socks[1].state(), f.socks[1].mask)
		}
	}
}

// elapse lets time pass until a timer fires, if there is one.
func (f *fake) elapse() bool {
	for t, timer := range f.timers { // a link has one
		delete(f.timers, t)
		f.now = max(f.now, timer.at)
		timer.h.HandleTimer(t)
		return true
	}
	return false
}
