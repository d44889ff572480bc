package sys

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// quoteSize is how much of a quoted datagram is kept.
const quoteSize = 128

// ErrorQueue reads what ICMP messages say about datagrams that a UDP socket
// sent, and holds the last one. It belongs to one goroutine.
type ErrorQueue struct {
	header  unix.Msghdr
	vector  unix.Iovec
	name    sockaddr
	control [256]byte
	data    [quoteSize]byte

	// Errno is what the message means for the socket: ECONNREFUSED for port
	// unreachable.
	Errno Errno
	// Offender sent the message. It is not valid for an error of this host.
	Offender netip.Addr
	// Quote is the beginning of the datagram as the message quotes it; it may be
	// empty. It is valid until the next Read.
	Quote []byte
}

// SetErrorQueue has a UDP socket keep ICMP messages for ErrorQueue.Read. The
// socket's calls fail once for each of them, also for those that the kernel
// would hide otherwise.
func SetErrorQueue(fd int, v6 bool) Errno {
	return setByFamily(fd, v6, unix.IP_RECVERR, unix.IPV6_RECVERR, 1)
}

// Read takes the oldest message that a socket keeps, and with it the error that
// the socket's next call would fail with. EAGAIN means that there is none.
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
	for c := q.control[:q.header.Controllen]; len(c) >= unix.SizeofCmsghdr; {
		h, body, rest := nextControl(c)
		if h == nil {
			break
		}
		if h.Level == unix.IPPROTO_IP && h.Type == unix.IP_RECVERR || h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_RECVERR {
			q.parse(body)
		}
		c = rest
	}
	return 0
}

// parse reads a struct sock_extended_err and the address behind it.
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

// Drain takes all messages that a socket keeps.
func (q *ErrorQueue) Drain(fd int) {
	for q.Read(fd) == 0 {
	}
}
