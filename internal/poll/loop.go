// Package poll is the event loop under the data path: one epoll instance, one
// timer wheel and one queue of posted functions, served by one goroutine that
// keeps an operating-system thread to itself.
//
// A loop owns what is registered with it. Handlers, timers, posted functions
// and tick functions all run on the loop's goroutine, one at a time, so that
// the state they share needs no lock; they must not block. Only Post, Stop and
// Waits may be called from elsewhere.
//
// Registrations are numbers: the kernel gives back a slot and its generation,
// never a Go pointer. An event that was collected for a registration which was
// removed (by the handler of an earlier event of the same batch, say) no longer
// matches its slot's generation and is dropped.
//
// A round of the loop is: collect events, read the clock, handle the events,
// run the posted functions, fire the timers that are due, run the tick
// functions. A tick function that says it has more work makes the next round
// begin without waiting.
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

// What can happen to a descriptor. Failed and HungUp are always reported.
const (
	Readable Events = sys.EPOLLIN
	Urgent   Events = sys.EPOLLPRI
	Writable Events = sys.EPOLLOUT
	PeerDone Events = sys.EPOLLRDHUP // the peer sent FIN
	Failed   Events = sys.EPOLLERR
	HungUp   Events = sys.EPOLLHUP // both directions are closed
)

// How a registration behaves; added to the events asked for.
const (
	Edge      Events = sys.EPOLLET        // report changes, not states
	Exclusive Events = sys.EPOLLEXCLUSIVE // of several loops wake one (for a shared listening socket, level-triggered)
)

// Handler receives the events of descriptors. tag is the one that the
// descriptor was registered with: it tells the descriptors of one handler
// apart.
type Handler interface {
	HandleEvents(tag uint8, ev Events)
}

// Registration names a registered descriptor: plain data, valid until Remove or
// Forget. The zero Registration names nothing.
type Registration struct {
	slot uint32 // index + 1
	gen  uint32
}

// Valid reports whether r was ever filled in; it does not tell whether the
// descriptor is still registered.
func (r Registration) Valid() bool { return r.slot != 0 }

// maxEvents is how many events are collected at once. It bounds how long
// tick functions and timers wait when all descriptors are busy.
const maxEvents = 256

// wakeSlot stands in the user data of the loop's own wake-up descriptor, where
// others have their slot.
const wakeSlot = ^uint32(0)

// Loop is an event loop. See the package comment for who may call what.
type Loop struct {
	epfd   int
	wakefd int
	now    int64
	slots  slots
	wheel  wheel
	ticks  []func()
	rests  []func()
	noWait bool
	buffer []sys.EpollEvent

	handled uint64 // events that were handed to handlers

	waits atomic.Uint64 // system calls to collect events
	woken atomic.Bool   // a wake-up is under way; coalesces Post's

	mu     sync.Mutex
	posted []func()      // guarded by mu
	state  state         // guarded by mu
	done   chan struct{} // closed when state is closed
	spare  []func()      // the loop's: the slice that posted is swapped with
}

// state is where a loop is in its life.
type state uint8

const (
	idle     state = iota // not run yet
	running               // in Run
	stopping              // in Run, Stop was called
	closed                // its descriptors are released
)

// start is the moment from which all loops count their time.
var start = time.Now()

// Nanotime returns the time that Loop.Now is read from: monotonic nanoseconds
// since the process started. It may be called from anywhere.
func Nanotime() int64 { return int64(time.Since(start)) }

// New makes a loop that does not run yet. Everything may be called on it from
// the caller's goroutine until Run begins.
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

// Run serves the loop on the calling goroutine, which keeps its thread until
// Stop. After Stop it returns at once. Before it returns it runs what was posted until
// then, and releases the loop's descriptors (those that are registered are
// their owners' to close). The error is one of epoll itself.
func (l *Loop) Run() error {
	l.mu.Lock()
	before := l.state
	if before == idle {
		l.state = running
	}
	l.mu.Unlock()
	switch before {
	case closed:
		return nil // stopped before it began
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
		l.now = Nanotime()
		for i := range n {
			ev := &l.buffer[i]
			l.dispatch(uint32(ev.Fd), uint32(ev.Pad), Events(ev.Events))
		}
		if l.woken.Load() {
			if l.runPosted() == stopping {
				return nil
			}
		}
		l.wheel.advance(l.now)
		for _, tick := range l.ticks {
			tick()
		}
	}
}

// shortWait is how many milliseconds a loop waits without telling the Go
// scheduler. It is longer than the tick of most kernels (250 Hz): a processor
// that has other work then need not set its clock for this timer and back for
// each wait, which costs a virtual machine more than the system call itself. And it
// is shorter than the 10 ms after which the Go scheduler asks for room.
const shortWait = 5

// collect fills the buffer. It waits for a moment first without telling the Go
// scheduler, then, if the loop really is idle, as a system call that the
// scheduler knows of.
//
// A goroutine that goes into a system call for each round costs a busy loop a
// quarter of its time: after 10 ms the scheduler thinks that it hogs its P,
// takes the P away at each call from then on, and looks every 20 us whether to
// do so. Within the short wait the loop is, to the scheduler, a goroutine that
// computes, and is asked to make room a hundred times a second, no more. In
// exchange there must be a P for everybody else: see Procs.
func (l *Loop) collect() (int, error) {
	again := l.noWait
	l.noWait = false
	for {
		wait := 0
		if !again {
			wait = l.timeout()
		}
		n, e := l.poll(wait)
		if e == 0 && n == 0 && !again {
			for _, rest := range l.rests {
				rest()
			}
			l.waits.Add(1)
			n, e = sys.EpollWait(l.epfd, l.buffer, l.timeout())
		}
		switch e {
		case 0:
			return n, nil
		case sys.EINTR: // a signal of the Go runtime's
		default:
			return 0, fmt.Errorf("event loop: epoll wait: %w", e)
		}
	}
}

// poll is the short wait: for as long as wait, in milliseconds (-1: for ever),
// and shortWait allow.
func (l *Loop) poll(wait int) (int, sys.Errno) {
	if wait < 0 || wait > shortWait {
		wait = shortWait
	}
	l.waits.Add(1)
	return sys.EpollPoll(l.epfd, l.buffer, wait)
}

// Procs returns what GOMAXPROCS should be for a process with so many loops: a P
// for each, which it occupies while it is busy, and one for all other
// goroutines.
func Procs(loops int) int { return loops + 1 }

// timeout is how many milliseconds to wait for events, -1 for ever: until
// shortly after the next timer, so that it does not wake up too early by a
// rounding.
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

func (l *Loop) dispatch(slot, gen uint32, ev Events) {
	if slot == wakeSlot {
		return // woken says what there is to do
	}
	if s := l.slots.find(Registration{slot: slot, gen: gen}); s != nil {
		l.handled++
		s.handler.HandleEvents(s.tag, ev)
	}
}

// Now returns the time in monotonic nanoseconds (see Nanotime), read once in
// each round.
func (l *Loop) Now() int64 { return l.now }

// Add registers a descriptor: h gets its events with tag. The descriptor must
// stay open until Remove, or be given up with Forget just before it is closed.
func (l *Loop) Add(fd int, tag uint8, ev Events, h Handler) (Registration, error) {
	r := l.slots.take(fd, tag, h)
	if e := sys.EpollControl(l.epfd, sys.EpollAdd, fd, uint32(ev), r.slot, r.gen); e != 0 {
		l.slots.free(r)
		return Registration{}, fmt.Errorf("watch descriptor %d: %w", fd, e)
	}
	return r, nil
}

// Modify changes which events are asked for. What is ready at that moment is
// reported again, also edge-triggered.
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

// Hand returns a registration to another handler, without a system call. It
// reports whether the registration is valid.
func (l *Loop) Hand(r Registration, tag uint8, h Handler) bool {
	s := l.slots.find(r)
	if s == nil {
		return false
	}
	s.tag, s.handler = tag, h
	return true
}

// Remove takes a descriptor out that stays open. Its events that were collected
// already are dropped.
func (l *Loop) Remove(r Registration) {
	if s := l.slots.find(r); s != nil {
		sys.EpollControl(l.epfd, sys.EpollDelete, int(s.fd), 0, 0, 0)
		l.slots.free(r)
	}
}

// Forget is Remove for a descriptor that the caller closes next, which takes it
// out of epoll without another system call. That holds as long as nobody else
// has the same open file: a descriptor that was duplicated or sent to another
// process needs Remove.
func (l *Loop) Forget(r Registration) {
	if l.slots.find(r) != nil {
		l.slots.free(r)
	}
}

// Handled returns how many events were handed to handlers. Like all but Post,
// Stop and Waits it is for the loop's goroutine.
func (l *Loop) Handled() uint64 { return l.handled }

// Len returns how many descriptors are registered.
func (l *Loop) Len() int { return l.slots.used }

// AtTick has f run at the end of each round, in the order of the calls.
func (l *Loop) AtTick(f func()) { l.ticks = append(l.ticks, f) }

// AtWait has f run each time before the loop waits for events, because there
// is nothing left to do. f may not schedule timers or post.
func (l *Loop) AtWait(f func()) { l.rests = append(l.rests, f) }

// NoWait makes the next round begin without waiting for events: somebody has
// more to do than one round's share.
func (l *Loop) NoWait() { l.noWait = true }

// Post has f run on the loop's goroutine, in the order of the calls, at the
// latest before Run returns. After that it is never run, and Post says false.
// It may be called from any goroutine, the loop's own too.
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

// wakeLocked ends a wait. One wake-up serves all that is posted until the loop
// looks.
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

// release ends the loop. What was posted up to here has run or runs now.
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

// Stop makes Run return, after what is posted, and waits for that; if Run was
// never called, it releases the loop's descriptors itself. What is registered
// stays open: first Post a function that closes it. Stop may be called more
// than once, but not on the loop's own goroutine.
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

// Waits returns how many system calls the loop has made to collect events. It
// may be called from any goroutine.
func (l *Loop) Waits() uint64 { return l.waits.Load() }
