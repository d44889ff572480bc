package sys

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// quoteSize is how many bytes of a quoted datagram are kept.
const quoteSize = 128

// ErrorQueue reads the ICMP messages about datagrams that a UDP socket sent, and
// holds the last one. It is not safe for concurrent use.
type ErrorQueue struct {
	header  unix.Msghdr
	vector  unix.Iovec
	name    sockaddr
	control [256]byte
	data    [quoteSize]byte

	// Errno is the message's meaning for the socket, such as ECONNREFUSED for port
	// unreachable.
	Errno Errno
	// Offender is the sender of the message. It is invalid for a local error.
	Offender netip.Addr
	// Quote is the beginning of the datagram as quoted in the message, possibly
	// empty. It is valid until the next Read.
	Quote []byte
}

// SetErrorQueue makes a UDP socket keep ICMP messages for ErrorQueue.Read. For each
// message, one call on the socket fails, even for messages that the kernel would
// otherwise hide.
func SetErrorQueue(fd int, v6 bool) Errno {
	return setByFamily(fd, v6, unix.IP_RECVERR, unix.IPV6_RECVERR, 1)
}

// Read reads the oldest message of a socket and clears the error that the socket's
// next call would return. EAGAIN means that there is none.
func (q *ErrorQueue) Read(fd int) Errno {
	q.vector.Base = &q.data[0]
	q.vector.SetLen(len(q.data))
	q.header = unix.Msghdr{Name: &q.name[0], Namelen: uint32(len(q.name)), Iov: &q.vector, Control: &q.control[0]}
	q.header.SetIovlen(1)
	q.header.SetControllen(len(q.control))
	r, _, e := syscall.RawSyscall6(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(&q.header)), unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT, 0, 0, 0)
	n, errno := result(r, e)
	if errno != 0 {
		return errno
	}
	q.Errno, q.Offender, q.Quote = 0, netip.Addr{}, q.data[:n]
	for h, body, rest := nextControl(q.control[:q.header.Controllen]); h != nil; h, body, rest = nextControl(rest) {
		if h.Level == unix.IPPROTO_IP && h.Type == unix.IP_RECVERR || h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_RECVERR {
			q.parse(body)
		}
	}
	return 0
}

// parse parses a struct sock_extended_err and the address after it.
func (q *ErrorQueue) parse(b []byte) {
	const size = 16
	if len(b) < size {
		return
	}
	q.Errno = Errno(binary.NativeEndian.Uint32(b))
	if origin := b[4]; origin == unix.SO_EE_ORIGIN_ICMP || origin == unix.SO_EE_ORIGIN_ICMP6 {
		var s sockaddr
		copy(s[:], b[size:])
		q.Offender = s.get().Addr()
	}
}

// Drain discards all messages of a socket.
func (q *ErrorQueue) Drain(fd int) {
	for q.Read(fd) == 0 {
	}
}
