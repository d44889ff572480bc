package relay

import "github.com/sluice-proxy/sluice/internal/sys"

// kernel holds the system calls that links make; tests put others in their place. The
// indirect call costs about 2 ns, a system call some hundred.
type kernel struct {
	recv              func(fd int, p []byte) (int, sys.Errno)
	unread            func(fd int) (int, sys.Errno)
	send              func(fd int, p []byte, more bool) (int, sys.Errno)
	splice            func(from, to, n int) (int, sys.Errno)
	shutdownWrite     func(fd int) sys.Errno
	setLiveness       func(fd int, l sys.Liveness) sys.Errno
	growReceiveBuffer func(fd, bytes int)
	freeReceiveBuffer func(fd int)
	limitUnsent       func(fd, bytes int) sys.Errno
	setNoDelay        func(fd int) sys.Errno
	delivery          func(fd int) (sys.Delivery, sys.Errno)
	socketError       func(fd int) sys.Errno
	close             func(fd int)
	closeInOrder      func(fd int)
	pipe              func() (r, w int, e sys.Errno)
	setPipeSize       func(fd, bytes int) (int, sys.Errno)
	write             func(fd int, p []byte) (int, sys.Errno)
}

// linux makes real system calls.
var linux = kernel{
	recv:              sys.Recv,
	unread:            sys.Unread,
	send:              sys.Send,
	splice:            sys.Splice,
	shutdownWrite:     sys.ShutdownWrite,
	setLiveness:       sys.SetLiveness,
	growReceiveBuffer: sys.GrowReceiveBuffer,
	freeReceiveBuffer: sys.FreeReceiveBuffer,
	limitUnsent:       sys.LimitUnsent,
	setNoDelay:        sys.SetNoDelay,
	delivery:          sys.DeliveryOf,
	socketError:       sys.SocketError,
	close:             sys.Close,
	closeInOrder:      sys.CloseInOrder,
	pipe:              sys.Pipe,
	setPipeSize:       sys.SetPipeSize,
	write:             sys.Write,
}
