package message

import "github.com/sluice-proxy/sluice/internal/sys"

// kernel is the set of system calls that links use. Tests replace it by a scripted one.
type kernel interface {
	receive(m *sys.SCTPMailbox, fd int, p []byte) (n int, kind sys.Received, info sys.MessageInfo, e sys.Errno)
	send(m *sys.SCTPMailbox, fd int, p []byte, info sys.MessageInfo) sys.Errno
	writable(fd int) bool
	unsent(fd int) int
	shutdown(fd int) sys.Errno
	close(fd int)
	closeInOrder(fd int)
}

// linux makes real system calls.
type linux struct{}

var _ kernel = linux{}

func (linux) receive(m *sys.SCTPMailbox, fd int, p []byte) (int, sys.Received, sys.MessageInfo, sys.Errno) {
	return m.Receive(fd, p)
}

func (linux) send(m *sys.SCTPMailbox, fd int, p []byte, info sys.MessageInfo) sys.Errno {
	return m.Send(fd, p, info)
}

func (linux) writable(fd int) bool { return sys.Writable(fd) }

// unsent returns how much of what was sent the peer has not acknowledged; 0 also if
// there is no association any more.
func (linux) unsent(fd int) int {
	s, _ := sys.SCTPStatusOf(fd)
	return s.Unsent
}

func (linux) shutdown(fd int) sys.Errno { return sys.ShutdownWrite(fd) }

func (linux) close(fd int) { sys.Close(fd) }

func (linux) closeInOrder(fd int) { sys.CloseInOrder(fd) }
