// Package poll is the event loop of the data path: one epoll instance, one timer
// wheel and one queue of posted functions, run by one goroutine on its own
// operating-system thread.
//
// Handlers, timers, posted functions and tick functions run on the loop's
// goroutine, one at a time. So their shared state needs no lock. They must not
// block. Only Post, Stop and Waits may be called from other goroutines.
//
// A Registration is a slot number and a generation, never a Go pointer. If a
// handler removes a registration, later events of the same batch for it have an old
// generation, and the loop drops them.
//
// A round of the loop collects events, handles them, runs posted functions, fires due
// timers, and runs tick functions. If a tick function calls NoWait, the next round does
// not wait for events. A round reads the clock once if a function asks Now or a timer
// may be due, else only every clockRounds rounds.
package poll

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Events is a set of epoll events.
type Events uint32

// The events of a descriptor. Failed and HungUp are always reported.
const (
	Readable Events = sys.EPOLLIN
	Urgent   Events = sys.EPOLLPRI
	Writable Events = sys.EPOLLOUT
	PeerDone Events = sys.EPOLLRDHUP // the peer sent FIN
	Failed   Events = sys.EPOLLERR
	HungUp   Events = sys.EPOLLHUP // both directions are closed
)

// Modes of a registration, added to the requested events.
const (
	Edge      Events = sys.EPOLLET        // report changes, not states
	Exclusive Events = sys.EPOLLEXCLUSIVE // wake only one of several loops (for a shared listening socket, level-triggered)
)

// Handler receives the events of descriptors. tag is the one of the registration.
// It distinguishes the descriptors of one handler.
type Handler interface {
	HandleEvents(tag uint8, ev Events)
}

// Registration identifies a registered descriptor. It is plain data, valid until
// Remove or Forget. The zero Registration is invalid.
type Registration struct {
	slot uint32 // index + 1
	gen  uint32
}

// Valid reports whether r is not zero. It does not tell whether the descriptor is
// still registered.
func (r Registration) Valid() bool { return r.slot != 0 }

// maxEvents is how many events one round collects. It bounds the delay of tick
// functions and timers if all descriptors are busy.
const maxEvents = 256

// wakeSlot is the slot number of the loop's own wake-up descriptor.
const wakeSlot = ^uint32(0)

// Loop is an event loop. The package comment tells which goroutine may call what.
type Loop struct {
	epfd   int
	wakefd int
	now    int64
	fresh  bool  // now was read in this round
	age    uint8 // rounds since now was read; at least clockRounds after a long wait
	slots  slots
	wheel  wheel
	ticks  []func()
	rests  []func()
	noWait bool
	quiet  bool // the last round waited, and had no events
	buffer []sys.EpollEvent

	handled uint64 // events passed to handlers

	waits atomic.Uint64 // system calls to collect events
	woken atomic.Bool   // a wake-up is pending; coalesces those of Post

	mu     sync.Mutex
	posted []func()      // guarded by mu
	state  state         // guarded by mu
	done   chan struct{} // closed when state is closed
	spare  []func()      // the slice to swap with posted; used by the loop only
}

// state is the life cycle of a loop.
type state uint8

const (
	idle     state = iota // before Run
	running               // in Run
	stopping              // in Run, after Stop
	closed                // its descriptors are released
)

// start is the zero of the clock of all loops.
var start = time.Now()

// Nanotime returns the current time of Loop.Now's clock: monotonic nanoseconds
// since the process started. It is safe for concurrent use.
func Nanotime() int64 { return int64(time.Since(start)) }

// New creates a loop. Until Run begins, the caller's goroutine may call all
// methods.
func New() (*Loop, error) {
	epfd, e := sys.EpollCreate()
	if e != 0 {
		return nil, fmt.Errorf("event loop: epoll: %w", e)
	}
	wakefd, e := sys.EventFD()
	if e != 0 {
		sys.Close(epfd)
		return nil, fmt.Errorf("event loop: eventfd: %w", e)
	}
	if e = sys.EpollControl(epfd, sys.EpollAdd, wakefd, sys.EPOLLIN|sys.EPOLLET, wakeSlot, 0); e != 0 {
		sys.Close(wakefd)
		sys.Close(epfd)
		return nil, fmt.Errorf("event loop: eventfd: %w", e)
	}
	l := &Loop{
		epfd:   epfd,
		wakefd: wakefd,
		now:    Nanotime(),
		buffer: make([]sys.EpollEvent, maxEvents),
		done:   make(chan struct{}),
	}
	l.wheel.init(l.now)
	return l, nil
}

// Run runs the loop on the calling goroutine and locks its thread until Stop. If
// Stop was called before, it returns at once. Before it returns, it runs all posted
// functions and releases the loop's descriptors; owners close registered
// descriptors themselves. It returns errors of epoll.
func (l *Loop) Run() error {
	l.mu.Lock()
	before := l.state
	if before == idle {
		l.state = running
	}
	l.mu.Unlock()
	switch before {
	case closed:
		return nil // stopped before Run
	case running, stopping:
		return errors.New("event loop: it runs already")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer l.release()
	for {
		n, err := l.collect()
		if err != nil {
			return err
		}
		l.fresh = false
		if l.age++; n == 0 || l.age >= clockRounds || l.timerNear() {
			l.Now()
		}
		for i := range n {
			ev := &l.buffer[i]
			l.dispatch(uint32(ev.Fd), uint32(ev.Pad), Events(ev.Events))
		}
		if l.woken.Load() {
			if l.runPosted() == stopping {
				return nil
			}
		}
		if l.fresh {
			l.wheel.advance(l.now)
		}
		for _, tick := range l.ticks {
			tick()
		}
	}
}

// shortWait is how many milliseconds a loop waits without telling the Go scheduler.
// It is longer than the tick of most kernels (250 Hz). Otherwise, each wait would
// make a processor with other work reprogram its timer twice, which costs a virtual
// machine more than the system call. It is shorter than the 10 ms after which the
// Go scheduler preempts a goroutine.
const shortWait = 5

// collect fills the buffer. It first waits up to shortWait without telling the Go
// scheduler, except after a round in which only distant timers were due. If the loop is still idle
// and no timer is near, it waits in a system call that the scheduler knows of.
//
// If a goroutine enters a system call in each round, it costs a busy loop a quarter
// of its time: after 10 ms, the scheduler takes the goroutine's P away at each
// call, and checks for that every 20 us. During the short wait, the loop looks like
// a computing goroutine to the scheduler, which preempts it at most a hundred times
// a second. In exchange, other goroutines need a P of their own: see Procs. The loop of
// kernel flows has a timer every 5 ms while connections begin and end: with a longer wait
// in each, the scheduler's monitor woke a thousand times a second.
func (l *Loop) collect() (n int, err error) {
	again := l.noWait
	l.noWait = false
	for first := true; ; first = false {
		var e sys.Errno
		switch {
		case again:
			n, e = l.poll(0)
		case !first || l.timerNear():
			n, e = l.poll(l.timeout())
		case !l.quiet: // reads no clock
			n, e = l.poll(shortWait)
		}
		if e == 0 && n == 0 && !again {
			for _, rest := range l.rests {
				rest()
			}
			if !l.timerNear() {
				l.waits.Add(1)
				l.age = clockRounds
				n, e = sys.EpollWait(l.epfd, l.buffer, l.timeout())
			}
		}
		switch e {
		case 0:
			l.quiet = n == 0 && !again
			return n, nil
		case sys.EINTR: // a signal of the Go runtime
		default:
			return 0, fmt.Errorf("event loop: epoll wait: %w", e)
		}
	}
}

// poll is the short wait. It waits at most wait milliseconds (-1: for ever) and at
// most shortWait.
func (l *Loop) poll(wait int) (int, sys.Errno) {
	if wait < 0 || wait > shortWait {
		wait = shortWait
	}
	l.waits.Add(1)
	return sys.EpollPoll(l.epfd, l.buffer, wait)
}

// Procs returns the GOMAXPROCS for a process with this number of loops: a P for
// each loop, and one for all other goroutines.
func Procs(loops int) int { return loops + 1 }

// timeout returns how many milliseconds to wait for events, -1 for ever. It rounds
// the time of the next timer up, so that the loop does not wake up too early.
func (l *Loop) timeout() int {
	at, ok := l.wheel.next()
	if !ok {
		return -1
	}
	wait := at - Nanotime()
	if wait <= 0 {
		return 0
	}
	return int(min((wait+int64(time.Millisecond)-1)/int64(time.Millisecond), 1<<30))
}

// clockRounds is in how many rounds the clock is read once while no timer is near. On
// kernels where reading it is a system call, such as User Mode Linux and virtual machines
// without a clock in the vDSO, a request through a relay then needs three calls, not four.
const clockRounds = 4

// farTimer is how far away a timer has to be, by the last reading of the clock, for a
// round not to read it again. It is as long as the short waits of clockRounds rounds: a
// timer is late by shortWait at most, unless handling events takes long.
const farTimer = int64(clockRounds * shortWait * time.Millisecond)

func (l *Loop) timerNear() bool {
	at, ok := l.wheel.next()
	return ok && at-l.now <= farTimer
}

func (l *Loop) dispatch(slot, gen uint32, ev Events) {
	if slot == wakeSlot {
		return // run handles wake-ups
	}
	if s := l.slots.find(Registration{slot: slot, gen: gen}); s != nil {
		l.handled++
		s.handler.HandleEvents(s.tag, ev)
	}
}

// Now returns the time of this round in monotonic nanoseconds (see Nanotime). The
// loop reads the clock at most once for each round.
func (l *Loop) Now() int64 {
	if !l.fresh {
		l.now, l.fresh, l.age = Nanotime(), true, 0
	}
	return l.now
}

// Lately returns the last reading of the clock, which is of this round or one of the
// clockRounds before it, with no long wait between: for what need not be more exact than
// some 20 ms.
func (l *Loop) Lately() int64 { return l.now }

// Add registers a descriptor. h receives its events with tag. The descriptor must
// stay open until Remove, or until just after Forget.
func (l *Loop) Add(fd int, tag uint8, ev Events, h Handler) (Registration, error) {
	r := l.slots.take(fd, tag, h)
	if e := sys.EpollControl(l.epfd, sys.EpollAdd, fd, uint32(ev), r.slot, r.gen); e != 0 {
		l.slots.free(r)
		return Registration{}, fmt.Errorf("watch descriptor %d: %w", fd, e)
	}
	return r, nil
}

// Modify changes the requested events. It reports pending events again, even
// edge-triggered ones.
func (l *Loop) Modify(r Registration, ev Events) error {
	s := l.slots.find(r)
	if s == nil {
		return errors.New("watch descriptor: not registered")
	}
	if e := sys.EpollControl(l.epfd, sys.EpollModify, int(s.fd), uint32(ev), r.slot, r.gen); e != 0 {
		return fmt.Errorf("watch descriptor %d: %w", s.fd, e)
	}
	return nil
}

// Hand assigns a registration to another handler without a system call. It reports
// whether the registration is valid.
func (l *Loop) Hand(r Registration, tag uint8, h Handler) bool {
	s := l.slots.find(r)
	if s == nil {
		return false
	}
	s.tag, s.handler = tag, h
	return true
}

// Remove deregisters a descriptor that stays open. Collected events of it are
// dropped.
func (l *Loop) Remove(r Registration) {
	if s := l.slots.find(r); s != nil {
		sys.EpollControl(l.epfd, sys.EpollDelete, int(s.fd), 0, 0, 0)
		l.slots.free(r)
	}
}

// Forget is Remove for a descriptor that the caller closes next. Closing removes it
// from epoll without another system call, unless the open file has other
// descriptors: a duplicated or passed descriptor needs Remove.
func (l *Loop) Forget(r Registration) {
	if l.slots.find(r) != nil {
		l.slots.free(r)
	}
}

// Handled returns how many events were passed to handlers.
func (l *Loop) Handled() uint64 { return l.handled }

// AtTick adds a function that runs at the end of each round, in the order of the
// calls.
func (l *Loop) AtTick(f func()) { l.ticks = append(l.ticks, f) }

// AtWait adds a function that runs whenever the loop has waited for a moment and got no
// event. f must not schedule timers or post functions.
func (l *Loop) AtWait(f func()) { l.rests = append(l.rests, f) }

// NoWait makes the next round start without waiting for events, because there is
// more work than one round may do.
func (l *Loop) NoWait() { l.noWait = true }

// Post runs f on the loop's goroutine, in the order of the calls, before Run
// returns. After that, Post returns false and never runs f. It is safe for
// concurrent use, also on the loop's goroutine.
func (l *Loop) Post(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == closed {
		return false
	}
	l.posted = append(l.posted, f)
	l.wakeLocked()
	return true
}

// wakeLocked ends a wait. One wake-up serves all posted functions until the loop
// reads the queue.
func (l *Loop) wakeLocked() {
	if !l.woken.Swap(true) {
		sys.Notify(l.wakefd)
	}
}

func (l *Loop) runPosted() state {
	l.mu.Lock()
	l.woken.Store(false)
	l.posted, l.spare = l.spare[:0], l.posted
	state := l.state
	l.mu.Unlock()
	for i, f := range l.spare {
		l.spare[i] = nil
		f()
	}
	return state
}

// release closes the loop's descriptors after it has run all posted functions.
func (l *Loop) release() {
	l.mu.Lock()
	l.state = closed
	posted := l.posted
	l.posted = nil
	sys.Close(l.wakefd)
	sys.Close(l.epfd)
	l.mu.Unlock()
	for _, f := range posted {
		f()
	}
	close(l.done)
}

// Stop makes Run return after all posted functions, and waits for that. If Run was
// never called, Stop releases the loop's descriptors itself. It leaves registered
// descriptors open; Post a function that closes them first. Stop may be called more
// than once, but not on the loop's goroutine.
func (l *Loop) Stop() {
	l.mu.Lock()
	switch l.state {
	case idle:
		l.mu.Unlock()
		l.release()
		return
	case running:
		l.state = stopping
		l.wakeLocked()
	}
	l.mu.Unlock()
	<-l.done
}

// Waits returns how many system calls the loop has made to collect events. It is
// safe for concurrent use.
func (l *Loop) Waits() uint64 { return l.waits.Load() }
