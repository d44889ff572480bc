package poll

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// runLoop runs a loop until the test ends.
func runLoop(t *testing.T) *Loop {
	t.Helper()
	l := must.Get(New())(t)
	done := make(chan error, 1)
	go func() { done <- l.Run() }()
	t.Cleanup(func() {
		l.Stop()
		check.OK(t, <-done)
	})
	return l
}

// on runs f on the loop and waits for it.
func on(t *testing.T, l *Loop, f func()) {
	t.Helper()
	done := make(chan struct{})
	if !l.Post(func() { f(); close(done) }) {
		t.Fatal("the loop is closed")
	}
	wait(t, done)
}

func wait[T any](t *testing.T, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(30 * time.Second):
		t.Fatal("nothing happened")
	}
	return v
}

// pair returns two connected sockets.
func pair(t *testing.T) (a, b int) {
	t.Helper()
	fds := must.Get(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0))(t)
	t.Cleanup(func() { unix.Close(fds[0]); unix.Close(fds[1]) })
	return fds[0], fds[1]
}

func write(t *testing.T, fd int) {
	t.Helper()
	must.OK(t, must.Err(unix.Write(fd, []byte("x"))))
}

type handlerFunc func(tag uint8, ev Events)

func (f handlerFunc) HandleEvents(tag uint8, ev Events) { f(tag, ev) }

type timerFunc func(*Timer)

func (f timerFunc) HandleTimer(t *Timer) { f(t) }

func TestPostKeepsOrder(t *testing.T) {
	l := runLoop(t)
	const posters, each = 4, 1000
	var got [posters][]int
	var wg sync.WaitGroup
	for p := range posters {
		wg.Go(func() {
			for i := range each {
				l.Post(func() { got[p] = append(got[p], i) })
			}
		})
	}
	wg.Wait()
	on(t, l, func() {})
	for p := range got {
		if len(got[p]) != each || !slices.IsSorted(got[p]) {
			t.Fatalf("poster %d: %d functions ran, in order: %v", p, len(got[p]), slices.IsSorted(got[p]))
		}
	}
}

func TestPostFromTheLoop(t *testing.T) {
	l := runLoop(t)
	done := make(chan struct{})
	l.Post(func() { l.Post(func() { close(done) }) })
	wait(t, done)
}

func TestStopRunsWhatIsPosted(t *testing.T) {
	l := must.Get(New())(t)
	ran := 0
	for range 3 {
		l.Post(func() { ran++ })
	}
	done := make(chan error)
	go func() { done <- l.Run() }()
	l.Stop()
	if err := wait(t, done); err != nil || ran != 3 {
		t.Fatalf("error %v, %d of 3 functions ran", err, ran)
	}
	l.Stop()
	if l.Post(func() {}) {
		t.Fatal("a loop that has ended takes a function")
	}
	must.OK(t, l.Run())
}

func TestStopWithoutRun(t *testing.T) {
	l := must.Get(New())(t)
	ran := false
	l.Post(func() { ran = true })
	l.Stop()
	l.Stop()
	if !ran || l.Post(func() {}) {
		t.Fatalf("ran %v", ran)
	}
}

func TestEdgeTriggeredEvents(t *testing.T) {
	l := runLoop(t)
	a, b := pair(t)
	seen := make(chan Events, 10)
	var reg Registration
	on(t, l, func() {
		var err error
		reg, err = l.Add(a, 3, Readable|PeerDone|Edge, handlerFunc(func(tag uint8, ev Events) {
			check.Equalf(t, tag, 3, "tag")
			seen <- ev
		}))
		if err != nil || l.slots.used != 1 {
			t.Errorf("%v, %d registered", err, l.slots.used)
		}
	})
	write(t, b)
	must.Equalf(t, wait(t, seen), Readable, "events")
	// Unread data is reported again only after Modify.
	on(t, l, func() {
		check.OK(t, l.Modify(reg, Readable|Writable|PeerDone|Edge))
	})
	must.Equalf(t, wait(t, seen), Readable|Writable, "events")
	on(t, l, func() {
		if !l.Hand(reg, 5, handlerFunc(func(tag uint8, ev Events) { seen <- ev | Events(tag)<<16 })) {
			t.Error("the registration is not known")
		}
	})
	unix.Shutdown(b, unix.SHUT_WR)
	must.Equalf(t, wait(t, seen), Readable|Writable|PeerDone|5<<16, "events")
	on(t, l, func() {
		l.Remove(reg)
		l.Remove(reg)
		l.Forget(reg)
		if l.Hand(reg, 0, handlerFunc(nil)) || l.Modify(reg, Readable) == nil || l.slots.used != 0 {
			t.Error("a removed registration still works")
		}
	})
	write(t, b2(t, l, a)) // the descriptor can be registered anew
	must.Equalf(t, len(seen), 0, "an event of a removed registration")
}

// b2 registers fd for one event and waits for it; it returns a socket that can
// be written to.
func b2(t *testing.T, l *Loop, fd int) int {
	t.Helper()
	seen := make(chan Events, 1)
	on(t, l, func() {
		check.OK(t, must.Err(l.Add(fd, 0, Readable|Edge, handlerFunc(func(_ uint8, ev Events) { seen <- ev }))))
	})
	wait(t, seen)
	a, _ := pair(t)
	return a
}

// TestStaleEventIsDropped: two descriptors are ready in one batch; the handler of the first
// closes the other, and a new descriptor reuses its number.
func TestStaleEventIsDropped(t *testing.T) {
	l := runLoop(t)
	var fds, peers [2]int
	for i := range fds {
		fds[i], peers[i] = pair(t)
	}
	var regs [2]Registration
	calls := make(chan uint8, 4)
	replaced := make(chan uint8, 4)
	h := handlerFunc(func(tag uint8, _ Events) {
		other := 1 - tag
		l.Forget(regs[other])
		unix.Dup3(peers[tag], fds[other], unix.O_CLOEXEC) // closes it, and takes its number
		check.OK(t, must.Err(l.Add(fds[other], other, Readable|Edge, handlerFunc(func(tag uint8, _ Events) { replaced <- tag }))))
		calls <- tag
	})
	on(t, l, func() {
		for i := range fds {
			var err error
			if regs[i], err = l.Add(fds[i], uint8(i), Readable|Edge, h); err != nil {
				t.Error(err)
			}
		}
		// Still in one round: both become ready.
		unix.Write(peers[0], []byte("x"))
		unix.Write(peers[1], []byte("x"))
	})
	wait(t, calls)
	on(t, l, func() {})
	if len(calls) != 0 || len(replaced) != 0 {
		t.Fatal("an event of a forgotten registration was delivered")
	}
}

func TestTimerFiresInTime(t *testing.T) {
	l := runLoop(t)
	fired := make(chan int64, 1)
	var timer, cancelled Timer
	var due int64
	on(t, l, func() {
		due = l.Now() + int64(30*time.Millisecond)
		l.Schedule(&timer, due, timerFunc(func(*Timer) { fired <- Nanotime() }))
		l.Schedule(&cancelled, due-1e7, timerFunc(func(*Timer) { t.Error("a cancelled timer fired") }))
		l.Cancel(&cancelled)
		l.Cancel(&cancelled)
	})
	if at := wait(t, fired); at < due {
		t.Fatalf("fired %v early", time.Duration(due-at))
	}
}

// TestClock: Now stays within a round. Lately is at most as old as clockRounds rounds, and
// is current after a long wait.
func TestClock(t *testing.T) {
	l := runLoop(t)
	long := make(chan struct{}, 100)
	on(t, l, func() { l.AtWait(func() { long <- struct{}{} }) })
	for range 3 {
		wait(t, long)
		for began := Nanotime(); Nanotime() == began; {
		}
		before := Nanotime()
		on(t, l, func() {
			if lately := l.Lately(); lately < before {
				t.Errorf("after a long wait, the clock is late by %v", time.Duration(before-lately))
			}
			now := l.Now()
			for Nanotime() <= now {
			}
			check.Equalf(t, l.Now(), now, "the time changed within a round")
		})
	}
	// A descriptor that is always ready: no round waits.
	a, b := pair(t)
	write(t, b)
	freshRounds := make(chan int, 1)
	on(t, l, func() {
		var starts [clockRounds]int64 // of the last rounds
		rounds, fresh := 0, 0
		var r Registration
		r, err := l.Add(a, 0, Readable, handlerFunc(func(uint8, Events) {
			if rounds > clockRounds && l.Lately() < starts[rounds%clockRounds] {
				t.Errorf("round %d: the clock is %v old", rounds, time.Duration(Nanotime()-l.Lately()))
			}
			if l.fresh {
				fresh++
			}
			starts[rounds%clockRounds] = Nanotime()
			if rounds++; rounds == 100 {
				l.Remove(r)
				freshRounds <- fresh
			}
		}))
		check.OK(t, err)
	})
	if fresh := wait(t, freshRounds); fresh > 30 {
		t.Errorf("the clock was read in %d of 100 rounds", fresh)
	}
}

// A timer that is set in a round that has not read the clock fires in time.
func TestTimersOfBusyRounds(t *testing.T) {
	l := runLoop(t)
	a, b := pair(t)
	write(t, b)
	fired := make(chan int64, 1)
	var timer Timer
	var due int64
	on(t, l, func() {
		rounds := 0
		if _, err := l.Add(a, 0, Readable, handlerFunc(func(uint8, Events) {
			if rounds++; rounds == clockRounds+2 {
				due = l.Now() + int64(30*time.Millisecond)
				l.Schedule(&timer, due, timerFunc(func(*Timer) { fired <- l.Now() }))
			}
		})); err != nil {
			t.Error(err)
		}
	})
	if at := wait(t, fired); at < due {
		t.Errorf("fired %v early", time.Duration(due-at))
	}
}

// TestRounds: functions at the end of a round, rounds without waiting, and functions
// before the loop waits.
func TestRounds(t *testing.T) {
	l := must.Get(New())(t)
	var log []string
	left := 0
	idle := make(chan struct{}, 100)
	l.AtTick(func() {
		if left > 0 {
			left--
			log = append(log, "tick")
			l.NoWait()
		}
	})
	l.AtWait(func() {
		if len(log) > 0 && left == 0 {
			log = append(log, "wait")
			idle <- struct{}{}
		}
	})
	go l.Run()
	defer l.Stop()
	l.Post(func() { left, log = 3, append(log, "post") })
	wait(t, idle)
	on(t, l, func() {
		check.EqualSlicesf(t, log[:5], []string{"post", "tick", "tick", "tick", "wait"}, "%v", log)
	})
}

// TestQuietRoundWaitsOnce: while only distant timers are due, a loop wakes for nothing else.
func TestQuietRoundWaitsOnce(t *testing.T) {
	l := runLoop(t)
	const rounds, interval = 10, 5 * farTimer
	var timer Timer
	done := make(chan uint64)
	left, before := rounds, uint64(0)
	var again timerFunc
	again = func(*Timer) {
		switch left--; left {
		case rounds - 1:
			before = l.Waits()
		case 0:
			done <- l.Waits() - before
			return
		}
		l.Schedule(&timer, l.Now()+interval, again)
	}
	on(t, l, func() { again(nil) })
	// Signals of the Go runtime may add some.
	if waits := wait(t, done); waits > rounds+rounds/2 {
		t.Errorf("%d waits for %d timers", waits, rounds-1)
	}
}

// TestInterrupted: a signal to the loop's thread does not end it.
func TestInterrupted(t *testing.T) {
	l := runLoop(t)
	var tid int
	on(t, l, func() { tid = unix.Gettid() })
	for range 100 {
		// The Go runtime uses SIGURG itself and tolerates additional ones.
		unix.Tgkill(unix.Getpid(), tid, unix.SIGURG)
		on(t, l, func() {})
	}
}

// TestExclusiveListener: two loops share a listening socket; each connection is
// accepted once.
func TestExclusiveListener(t *testing.T) {
	fd := must.Get(sys.ListenTCP(loopback, sys.ListenOptions{}))(t)
	defer sys.Close(fd)
	addr, _ := sys.LocalAddr(fd)
	const conns = 200
	accepted := make(chan int, conns)
	for range 2 {
		l := runLoop(t)
		on(t, l, func() {
			if _, err := l.Add(fd, 0, Readable|Exclusive, handlerFunc(func(uint8, Events) {
				if c, _, e := sys.Accept(fd); e == 0 {
					accepted <- c
				}
			})); err != nil {
				t.Error(err)
			}
		})
	}
	var fds []int
	for range conns {
		c, e := sys.ConnectTCP(addr, noAddr, sys.ConnectOptions{})
		if c < 0 {
			t.Fatal(e)
		}
		fds = append(fds, c)
	}
	for range conns {
		sys.Close(wait(t, accepted))
	}
	for _, c := range fds {
		sys.Close(c)
	}
}

func TestHandlingAnEventAllocatesNothing(t *testing.T) {
	l := must.Get(New())(t)
	defer l.Stop()
	a, b := pair(t)
	h := handlerFunc(func(uint8, Events) {})
	if n := testing.AllocsPerRun(100, func() {
		reg := must.Get(l.Add(a, 0, Readable|Edge, h))(t)
		sys.Send(b, one, false)
		n, _ := l.collect()
		for _, ev := range l.buffer[:n] {
			l.dispatch(uint32(ev.Fd), uint32(ev.Pad), Events(ev.Events))
		}
		l.Remove(reg)
	}); n > 0 {
		t.Fatalf("%v allocations", n)
	}
}

var one = []byte("x")

// BenchmarkPost measures the time until a function has run on an idle loop and the
// caller knows it.
func BenchmarkPost(b *testing.B) {
	l := must.Get(New())(b)
	go l.Run()
	defer l.Stop()
	var ran atomic.Int64
	done := make(chan struct{})
	f := func() { ran.Add(1); done <- struct{}{} }
	for b.Loop() {
		l.Post(f)
		<-done
	}
}

var (
	loopback = netip.MustParseAddrPort("127.0.0.1:0")
	noAddr   netip.AddrPort
)
