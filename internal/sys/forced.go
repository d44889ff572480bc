package sys

import (
	"errors"
	"math"

	"golang.org/x/sys/unix"
)

// ForceBuffer gives a socket a receive buffer that only a process with CAP_NET_ADMIN in the
// initial user namespace can give it (SO_RCVBUFFORCE). The error is EPERM without it.
func ForceBuffer(fd int) error {
	most, err := mostUnforced()
	if err != nil {
		return err
	}
	if most > math.MaxInt32/4 {
		return errors.New("net.core.rmem_max leaves no greater receive buffer")
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, most) // the kernel doubles it
}

// HasForcedBuffer reports whether somebody has called ForceBuffer for a socket.
func HasForcedBuffer(fd int) (bool, error) {
	most, err := mostUnforced()
	if err != nil {
		return false, err
	}
	size, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	return size > most, err
}

// mostUnforced returns the greatest receive buffer, in bytes, that any process can give a
// socket: the default one, or what net.core.rmem_max allows.
func mostUnforced() (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer Close(fd)
	first, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	if err != nil {
		return 0, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, math.MaxInt32); err != nil {
		return 0, err
	}
	most, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	return max(first, most), err
}

// UnixNames returns the names of both ends of a connected unix socket; an abstract one begins
// with @.
func UnixNames(fd int) (own, peer string, err error) {
	a, err := unix.Getsockname(fd)
	if err != nil {
		return "", "", err
	}
	b, err := unix.Getpeername(fd)
	if err != nil {
		return "", "", err
	}
	ours, is := a.(*unix.SockaddrUnix)
	theirs, too := b.(*unix.SockaddrUnix)
	if !is || !too {
		return "", "", unix.EAFNOSUPPORT
	}
	return ours.Name, theirs.Name, nil
}
