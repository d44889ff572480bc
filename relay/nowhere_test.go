package relay

import (
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// nowhere is a kernel whose sockets have nothing to read and take everything.
// Its loop has the timers of a real one.
type nowhere struct{ *poll.Loop }

func newNowhere() (*nowhere, error) {
	l, err := poll.New()
	return &nowhere{Loop: l}, err
}

func (*nowhere) kernel() *kernel {
	return &kernel{
		recv:              func(int, []byte) (int, sys.Errno) { return -1, sys.EAGAIN },
		send:              func(_ int, p []byte, _ bool) (int, sys.Errno) { return len(p), 0 },
		setNoDelay:        func(int) sys.Errno { return 0 },
		limitUnsent:       func(int, int) sys.Errno { return 0 },
		growReceiveBuffer: func(int, int) {},
		freeReceiveBuffer: func(int) {},
		delivery:          func(int) (sys.Delivery, sys.Errno) { return sys.Delivery{}, 0 },
		close:             func(int) {},
		closeInOrder:      func(int) {},
	}
}

func (*nowhere) LinkEnded(*Link, End)     {}
func (*nowhere) Forget(poll.Registration) {}

func (*nowhere) Add(int, uint8, poll.Events, poll.Handler) (poll.Registration, error) {
	return registrations[0], nil
}
