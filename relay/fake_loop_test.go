package relay

import (
	"sort"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// This is the event loop of a fake.

var _ loop = (*fake)(nil)

func (f *fake) Now() int64 { return f.now }

// The generation of a fake's registration cannot be written into a
// poll.Registration from here: each side has one at a time, by its tag.
func (f *fake) Add(fd int, tag uint8, ev poll.Events, h poll.Handler) (poll.Registration, error) {
	s := f.sock(fd)
	if s.handler != nil || s.watched {
		f.failf("side %d is registered twice", s.side)
	}
	s.watched = true
	s.handler, s.tag, s.mask, s.edge = h, tag, ev, true
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
	s := f.registered(r)
	s.mask, s.edge = ev, true
	return nil
}

func (f *fake) Hand(r poll.Registration, tag uint8, h poll.Handler) bool {
	s := f.registered(r)
	s.handler, s.tag = h, tag
	return true
}

func (f *fake) Forget(r poll.Registration) {
	s := f.registered(r)
	s.handler = nil
	s.gen++
}

// Remove takes the socket out of epoll, as Forget does not.
func (f *fake) Remove(r poll.Registration) {
	f.registered(r).watched = false
	f.Forget(r)
}

func (f *fake) Schedule(t *poll.Timer, at int64, h poll.TimerHandler) { f.timers[t] = fakeTimer{at, h} }
func (f *fake) Cancel(t *poll.Timer)                                  { delete(f.timers, t) }
func (f *fake) AtTick(tick func())                                    { f.ticks = append(f.ticks, tick) }
func (f *fake) AtWait(func())                                         {}
func (f *fake) NoWait()                                               { f.noWait = true }

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

// state is what epoll says about a socket.
func (s *fakeSock) state() (ev poll.Events) {
	if s.sent > s.read || s.fin || s.reset {
		ev |= poll.Readable
	}
	if s.fin || s.reset {
		ev |= poll.PeerDone
	}
	if s.mark >= s.read && !s.quiet {
		ev |= poll.Urgent
	}
	if s.room > 0 && !s.refused || s.shut || s.reset {
		ev |= poll.Writable
	}
	ev &= s.mask
	if s.reset {
		ev |= poll.HungUp
		if s.err != 0 {
			ev |= poll.Failed
		}
	}
	if s.fin && s.shut {
		ev |= poll.HungUp
	}
	return ev
}

// round runs one round of the loop. It reports whether anything happened.
func (f *fake) round() bool {
	type event struct {
		s   *fakeSock
		gen int
		ev  poll.Events
	}
	var batch []event
	for _, s := range f.socks {
		if s.handler != nil && s.edge {
			if f.choose(4) == 0 && !f.noWait {
				continue // its turn comes in a later batch
			}
			s.edge = false
			if ev := s.state(); ev != 0 {
				batch = append(batch, event{s, s.gen, ev})
			}
		}
	}
	if len(batch) == 2 && f.choose(2) == 0 {
		batch[0], batch[1] = batch[1], batch[0]
	}
	if len(batch) == 0 && !f.noWait {
		return false // it would wait
	}
	f.noWait = false
	for _, e := range batch {
		if e.s.handler != nil && e.s.gen == e.gen {
			e.s.handler.HandleEvents(e.s.tag, e.ev)
		}
	}
	for _, tick := range f.ticks {
		tick()
	}
	return true
}

// settle runs the loop until nothing happens any more.
func (f *fake) settle() {
	for quiet := 0; quiet < 20 && f.fault == ""; {
		if f.round() {
			quiet = 0
		} else {
			quiet++
		}
		for _, s := range f.socks {
			if s.handler != nil && s.edge && s.state() != 0 {
				quiet = 0
			}
		}
	}
}

// elapse lets time pass and fires the timers that are due.
func (f *fake) elapse(ns int64) {
	end := f.now + ns
	for f.fault == "" {
		var due []*poll.Timer
		for t, ft := range f.timers {
			if ft.at <= end {
				due = append(due, t)
			}
		}
		if len(due) == 0 {
			break
		}
		sort.Slice(due, func(i, j int) bool { return f.timers[due[i]].at < f.timers[due[j]].at })
		ft := f.timers[due[0]]
		delete(f.timers, due[0])
		f.now = max(f.now, ft.at)
		ft.h.HandleTimer(due[0])
		f.settle()
	}
	f.now = end
}
