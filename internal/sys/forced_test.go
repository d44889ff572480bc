package sys

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// The names of both ends are known, here those that the kernel chooses.
func TestUnixNames(t *testing.T) {
	named := func() (int, *unix.SockaddrUnix) {
		fd := must.Get(unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0))(t)
		t.Cleanup(func() { Close(fd) })
		must.OK(t, unix.Bind(fd, &unix.SockaddrUnix{}))
		return fd, must.Get(unix.Getsockname(fd))(t).(*unix.SockaddrUnix)
	}
	listener, at := named()
	must.OK(t, unix.Listen(listener, 1))
	c, from := named()
	_, _, err := UnixNames(c)
	check.ErrorIsf(t, err, unix.ENOTCONN, "before it is connected")
	must.OK(t, unix.Connect(c, at))
	own, peer, err := UnixNames(c)
	must.OK(t, err)
	check.Equal(t, own+peer, from.Name+at.Name)
	l, addr := listen(t, "127.0.0.1", ListenOptions{})
	tcp, _ := connected(t, l, addr)
	_, _, err = UnixNames(tcp)
	check.ErrorIsf(t, err, unix.EAFNOSUPPORT, "a TCP socket")
}

// A buffer that only an administrator gives proves that one has given it.
func TestForcedBuffer(t *testing.T) {
	fds := must.Get(unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0))(t)
	defer Close(fds[0])
	defer Close(fds[1])
	must.OK(t, unix.SetsockoptInt(fds[0], unix.SOL_SOCKET, unix.SO_RCVBUF, 1<<30))
	check.Equalf(t, must.Get(HasForcedBuffer(fds[0]))(t), false, "as large as anybody makes it")
	if err := ForceBuffer(fds[0]); err != nil {
		t.Skipf("SKIP-NEEDS: CAP_NET_ADMIN in the initial user namespace: %v", err)
	}
	check.Equal(t, must.Get(HasForcedBuffer(fds[0]))(t), true)
	check.Equalf(t, must.Get(HasForcedBuffer(fds[1]))(t), false, "the other end")
}
