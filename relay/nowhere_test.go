package relay

import (
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// nowhere is a kernel whose sockets have nothing to read and take everything.
// Its loop has the timers of a real one.
type nowhere struct {
	kernel
	*poll.Loop
}

func newNowhere() (*nowhere, error) {
	l, err := poll.New()
	return &nowhere{Loop: l}, err
}

func (*nowhere) recv(int, []byte) (int, sys.Errno)             { return -1, sys.EAGAIN }
func (*nowhere) send(_ int, p []byte, _ bool) (int, sys.Errno) { return len(p), 0 }
func (*nowhere) setNoDelay(int) sys.Errno                      { return 0 }
func (*nowhere) limitUnsent(int, int) sys.Errno                { return 0 }
func (*nowhere) growReceiveBuffer(int, int)                    {}
func (*nowhere) freeReceiveBuffer(int)                         {}
func (*nowhere) delivery(int) (sys.Delivery, sys.Errno)        { return sys.Delivery{}, 0 }
func (*nowhere) close(int)                                     {}
func (*nowhere) closeInOrder(int)                              {}
func (*nowhere) LinkEnded(*Link, End)                          {}
func (*nowhere) Forget(poll.Registration)                      {}

func (*nowhere) Add(int, uint8, poll.Events, poll.Handler) (poll.Registration, error) {
	return registrations[0], nil
}

// chatter is nowhere with 128 bytes to read each time.
type chatter struct{ *nowhere }

func (*chatter) recv(int, []byte) (int, sys.Errno) { return 128, 0 }
