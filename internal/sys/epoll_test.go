package sys

import (
	"fmt"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// An edge-triggered counter is reported once for each Notify, with the numbers of its registration.
func TestEpoll(t *testing.T) {
	ep, e := EpollCreate()
	must.Equal(t, e, 0)
	defer Close(ep)
	counter, e := EventFD()
	must.Equal(t, e, 0)
	defer Close(counter)
	events := make([]EpollEvent, 4)
	ready := func(want string, calls ...func(int, []EpollEvent, int) (int, Errno)) {
		t.Helper()
		for _, call := range calls {
			n, e := call(ep, events, 0)
			must.Equal(t, e, 0)
			got := ""
			for _, ev := range events[:n] {
				got += fmt.Sprint(ev.Events&EPOLLIN != 0, ev.Fd, ev.Pad)
			}
			check.Equal(t, got, want)
		}
	}
	must.Equal(t, EpollControl(ep, EpollAdd, counter, EPOLLIN|EPOLLET, 7, 9), 0)
	ready("", EpollPoll, EpollWait)
	for range 2 {
		must.Equal(t, Notify(counter), 0)
		ready("true 7 9", EpollPoll)
		ready("", EpollWait)
	}
	must.Equal(t, EpollControl(ep, EpollModify, counter, EPOLLIN, 8, 1), 0)
	ready("true 8 1", EpollWait, EpollPoll)
	must.Equal(t, EpollControl(ep, EpollDelete, counter, 0, 0, 0), 0)
	ready("", EpollWait)
}
