package relay

import "github.com/sluice-proxy/sluice/internal/sys"

// kernel is the set of system calls that links use. Tests replace it by a scripted
// one. The indirect call costs about 2 ns, a system call some hundred.
type kernel interface {
	recv(fd int, p []byte) (int, sys.Errno)
	unread(fd int) (int, sys.Errno)
	send(fd int, p []byte, more bool) (int, sys.Errno)
	splice(from, to, n int) (int, sys.Errno)
	shutdownWrite(fd int) sys.Errno
	setLiveness(fd int, l sys.Liveness) sys.Errno
	growReceiveBuffer(fd, bytes int)
	freeReceiveBuffer(fd int)
	limitUnsent(fd, bytes int) sys.Errno
	setNoDelay(fd int) sys.Errno
	delivery(fd int) (sys.Delivery, sys.Errno)
	socketError(fd int) sys.Errno
	close(fd int)
	closeInOrder(fd int)
	pipe() (r, w int, e sys.Errno)
	setPipeSize(fd, bytes int) (int, sys.Errno)
}

// linux makes real system calls.
type linux struct{}

var _ kernel = linux{}

func (linux) recv(fd int, p []byte) (int, sys.Errno) { return sys.Recv(fd, p) }

func (linux) unread(fd int) (int, sys.Errno) { return sys.Unread(fd) }

func (linux) send(fd int, p []byte, more bool) (int, sys.Errno) { return sys.Send(fd, p, more) }

func (linux) splice(from, to, n int) (int, sys.Errno) { return sys.Splice(from, to, n) }

func (linux) shutdownWrite(fd int) sys.Errno { return sys.ShutdownWrite(fd) }

func (linux) setLiveness(fd int, l sys.Liveness) sys.Errno { return sys.SetLiveness(fd, l) }

func (linux) growReceiveBuffer(fd, bytes int) { sys.GrowReceiveBuffer(fd, bytes) }

func (linux) freeReceiveBuffer(fd int) { sys.FreeReceiveBuffer(fd) }

func (linux) limitUnsent(fd, bytes int) sys.Errno { return sys.LimitUnsent(fd, bytes) }

func (linux) setNoDelay(fd int) sys.Errno { return sys.SetNoDelay(fd) }

func (linux) delivery(fd int) (sys.Delivery, sys.Errno) { return sys.DeliveryOf(fd) }

func (linux) socketError(fd int) sys.Errno { return sys.SocketError(fd) }

func (linux) close(fd int) { sys.Close(fd) }

func (linux) closeInOrder(fd int) { sys.CloseInOrder(fd) }

func (linux) pipe() (r, w int, e sys.Errno) { return sys.Pipe() }

func (linux) setPipeSize(fd, bytes int) (int, sys.Errno) { return sys.SetPipeSize(fd, bytes) }
