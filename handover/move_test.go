package handover

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
)

// arrivals are the connections that a process has received.
type arrivals struct{ begun, discarded []string }

type arrival struct {
	to *arrivals
	m  *Moved
}

func (a arrival) Begin()   { a.end(&a.to.begun) }
func (a arrival) Discard() { a.end(&a.to.discarded) }

func (a arrival) end(list *[]string) {
	closeAll(a.m.FDs)
	*list = append(*list, string(a.m.State))
}

func (a *arrivals) accept(m *Moved) Taken {
	if m.Kind != "known" {
		return nil
	}
	return arrival{a, m}
}

// moved makes connections, each of two descriptors.
func moved(t *testing.T, n int) (list []Moved) {
	t.Helper()
	sockets, _ := sockets(t, 2*n)
	for i := range n {
		list = append(list, Moved{Kind: "known", State: fmt.Appendf(nil, "%d", i), FDs: []int{sockets[2*i].FD, sockets[2*i+1].FD}})
	}
	return list
}

// TestConnectionsMove: more than a batch arrives, in order; what the next process does not know
// stays. Nothing stays open there.
func TestConnectionsMove(t *testing.T) {
	running, next := pair(t)
	list := moved(t, batch)
	for i := range list {
		if i%3 == 1 {
			list[i].Kind = "of a later version"
		}
	}
	before := descriptors(t)
	var got arrivals
	done := make(chan error, 1)
	go func() {
		for {
			if _, err := next.TakeMoved(got.accept, nil); err != nil {
				done <- err
				return
			}
		}
	}()
	taken, err := running.Move(list)
	must.OK(t, err)
	_ = running.Close()
	if err := <-done; !errors.Is(err, io.EOF) {
		t.Errorf("the next process ends with %v, want EOF", err)
	}
	var want []string
	for i := range list {
		if taken[i] != (i%3 != 1) {
			t.Errorf("connection %d: taken %v", i, taken[i])
		}
		if i%3 != 1 {
			want = append(want, string(list[i].State))
		}
	}
	if !slices.Equal(got.begun, want) || len(got.discarded) > 0 {
		t.Errorf("begun %v, discarded %v", got.begun, got.discarded)
	}
	if after := descriptors(t); after >= before { // running's own is closed
		t.Errorf("%d descriptors are open, were %d", after, before)
	}
}

// TestMoveWithoutAcknowledgement: a batch that has not arrived whole stays, the next process is
// told so, and lets it go.
func TestMoveWithoutAcknowledgement(t *testing.T) {
	running, next := pair(t)
	list := moved(t, 3)
	given := make(chan []bool, 1)
	go func() {
		taken, err := running.Move(list)
		if err == nil {
			t.Error("a batch that has not arrived whole counts as given")
		}
		given <- taken
	}()
	m, fds, err := next.receive(Patience)
	if err != nil || len(fds) != 6 {
		t.Fatalf("%+v, %d descriptors, %v", m, len(fds), err)
	}
	closeAll(fds)
	must.OK(t, next.Send(&Message{Step: StepTaken, Taken: 5}))
	if taken := <-given; slices.Contains(taken, true) {
		t.Errorf("given: %v", taken)
	}
	if m, err := next.Receive(Patience); err != nil || m.Step != StepMine {
		t.Errorf("%+v, %v, want %q", m, err, StepMine)
	}
}

// TestMoveToAFullProcess: at its limit of open files the next process gets fewer descriptors,
// without an error of the kernel. All stay, and the next process goes on.
func TestMoveToAFullProcess(t *testing.T) {
	running, next := pair(t)
	list := moved(t, 40)
	before := descriptors(t)
	var limit syscall.Rlimit
	must.OK(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	low := limit
	low.Cur = limitFor(t, 30)
	must.OK(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &low))
	given := make(chan error, 1)
	go func() {
		taken, err := running.Move(list)
		if slices.Contains(taken, true) {
			t.Errorf("given: %v", taken)
		}
		given <- err
	}()
	var got arrivals
	_, err := next.TakeMoved(got.accept, nil)
	must.OK(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit))
	var stayed *StayedError
	if !errors.As(err, &stayed) {
		t.Errorf("%v, want a *StayedError", err)
	}
	if err := <-given; err == nil {
		t.Error("a batch that has not arrived counts as given")
	}
	if len(got.begun)+len(got.discarded) > 0 {
		t.Errorf("begun %v", got.begun)
	}
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors are open, were %d", after, before)
	}
}

// TestGiverEndsWhileConnectionsMove: connections that have arrived are the next process's when
// the running one dies, and are not while it lives and says otherwise.
func TestGiverEndsWhileConnectionsMove(t *testing.T) {
	for name, dies := range map[string]bool{"it dies": true, "it dies at once": true, "it keeps them": false} {
		t.Run(name, func(t *testing.T) {
			running, next := pair(t)
			unasked := name == "it dies at once"
			list := moved(t, 2)
			for i := range list {
				list[i].Count = 2
			}
			var got arrivals
			fds := slices.Concat(list[0].FDs, list[1].FDs)
			must.OK(t, running.send(&Message{Step: StepMoved, Moved: list}, fds))
			if unasked { // before there is an answer
				_ = running.Close()
			}
			done := make(chan error, 1)
			go func() {
				_, err := next.TakeMoved(got.accept, nil)
				done <- err
			}()
			if unasked {
			} else if dies { // with the answer unread
				must.OK(t, readable(running))
				_ = running.Close()
			} else if _, err := running.Await(StepTaken, Patience); err != nil {
				t.Fatal(err)
			} else if err := running.Send(&Message{Step: StepMine}); err != nil {
				t.Fatal(err)
			}
			err := <-done
			var stayed *StayedError
			if dies != Gone(err) || dies == errors.As(err, &stayed) {
				t.Errorf("TakeMoved: %v", err)
			}
			if want := [2]int{2, 0}; dies && [2]int{len(got.begun), len(got.discarded)} != want {
				t.Errorf("begun %v, discarded %v, want all begun", got.begun, got.discarded)
			}
			if want := [2]int{0, 2}; !dies && [2]int{len(got.begun), len(got.discarded)} != want {
				t.Errorf("begun %v, discarded %v, want all discarded", got.begun, got.discarded)
			}
		})
	}
}

// TestUnreadMessageLeavesConnections: a message that the next process cannot read is not the
// running one's end. What it was about stays.
func TestUnreadMessageLeavesConnections(t *testing.T) {
	running, next := pair(t)
	list := moved(t, 1)
	list[0].Count = 1 // it has two
	must.OK(t, running.send(&Message{Step: StepMoved, Moved: list}, list[0].FDs))
	var got arrivals
	var stayed *StayedError
	if _, err := next.TakeMoved(got.accept, nil); !errors.As(err, &stayed) {
		t.Errorf("%v, want a *StayedError", err)
	}
	if m, err := running.Await(StepTaken, Patience); err != nil || m.Taken != 0 {
		t.Errorf("answered %+v, %v", m, err)
	}
}

// TestStopTaking: a process that ends has the connections that were given to it for good, and
// leaves others where they are.
func TestStopTaking(t *testing.T) {
	for _, given := range []bool{false, true} {
		t.Run(fmt.Sprintf("given=%v", given), func(t *testing.T) {
			running, next := pair(t)
			list := moved(t, 1)
			list[0].Count = 2
			var got arrivals
			done := make(chan error, 1)
			go func() {
				_, err := next.TakeMoved(got.accept, nil)
				done <- err
			}()
			must.OK(t, running.send(&Message{Step: StepMoved, Moved: list}, list[0].FDs))
			must.OK(t, must.Err(running.Await(StepTaken, Patience)))
			if given {
				must.OK(t, running.Send(&Message{Step: StepYours}))
			}
			next.StopTaking()
			if err := running.Send(&Message{Step: StepYours}); err == nil {
				t.Error("the running process can give more")
			}
			err := <-done
			var stayed *StayedError
			if given && (err != nil || len(got.begun) != 1) || !given && (!errors.As(err, &stayed) || len(got.discarded) != 1) {
				t.Errorf("begun %v, discarded %v, %v", got.begun, got.discarded, err)
			}
			if _, err := next.TakeMoved(got.accept, nil); !Gone(err) {
				t.Errorf("then %v, want the end", err)
			}
		})
	}
}

// readable waits until there is a message, and leaves it unread.
func readable(c *Conn) error {
	raw, err := c.unix.SyscallConn()
	if err != nil {
		return err
	}
	var errno sys.Errno
	if err := raw.Read(func(fd uintptr) bool {
		_, errno = sys.Peek(int(fd), make([]byte, 1))
		return errno != sys.EAGAIN
	}); err != nil {
		return err
	}
	if errno != 0 {
		return errno
	}
	return nil
}

// limitFor returns the limit of open files that allows so many more.
func limitFor(t *testing.T, more int) uint64 {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	must.OK(t, err)
	used := make(map[string]bool)
	for _, e := range list {
		used[e.Name()] = true
	}
	limit := 0
	for ; more > 0; limit++ {
		if !used[strconv.Itoa(limit)] {
			more--
		}
	}
	return uint64(limit)
}
