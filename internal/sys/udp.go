package sys

import (
	"fmt"
	"math"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// UDPOptions are the options of a bound UDP socket.
type UDPOptions struct {
	Transparent bool // IP_TRANSPARENT: datagrams to addresses that are not this host's, and replies from them; needs CAP_NET_ADMIN
	FreeBind    bool // IP_FREEBIND: bind to an address that no interface has yet
	// ReusePort lets several sockets of this program share the address (see
	// Disown). The kernel assigns each client to one of them.
	ReusePort bool
	// ReuseAddr lets other sockets have the address too, of every program that asks for
	// that. It is for sockets that receive nothing.
	ReuseAddr bool
	// Destination makes Inbox report the destination of each datagram.
	Destination bool
	// Class makes Inbox report the DSCP of each datagram.
	Class bool
	// Coalesce lets the kernel deliver equal-sized datagrams as one GSO batch
	// (UDP_GRO).
	Coalesce bool
	// MinTTL makes the socket ignore datagrams with a smaller TTL or hop limit; 0
	// for none.
	MinTTL int
	// Deaf makes the socket receive nothing, for sockets that only send.
	Deaf bool
	// ReceiveBuffer is the receive buffer in bytes; 0 keeps the kernel's default.
	// With CAP_NET_ADMIN, it may exceed net.core.rmem_max.
	ReceiveBuffer int
}

// BindUDP creates a UDP socket on addr. With port 0, the kernel chooses one; see
// LocalAddr. An IPv6 socket receives IPv6 only.
func BindUDP(addr netip.AddrPort, o UDPOptions) (fd int, err error) {
	fam := family(addr.Addr())
	fd, e := socket(fam, unix.SOCK_DGRAM, unix.IPPROTO_UDP)
	if e != 0 {
		return -1, fmt.Errorf("bind UDP %s: socket: %w", addr, e)
	}
	if o.ReusePort {
		Disown(fd) // without the right to that, the others of this user can join
	}
	what, e := prepareUDP(fd, fam == unix.AF_INET6, &o)
	if e == 0 {
		what, e = "bind", bind(fd, addr)
	}
	if e != 0 {
		Close(fd)
		return -1, fmt.Errorf("bind UDP %s: %s: %w", addr, what, e)
	}
	return fd, nil
}

func prepareUDP(fd int, v6 bool, o *UDPOptions) (what string, e Errno) {
	what, e = setAll([]setting{
		{v6, "IPV6_V6ONLY", func() Errno { return setInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1) }},
		{o.ReusePort, "SO_REUSEPORT", func() Errno { return setInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }},
		{o.ReuseAddr, "SO_REUSEADDR", func() Errno { return setInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }},
		{o.Transparent, "IP_TRANSPARENT", func() Errno { return SetTransparent(fd, v6) }},
		{o.FreeBind, "IP_FREEBIND", func() Errno { return setFreeBind(fd, v6) }},
		{o.Destination, "IP_RECVORIGDSTADDR", func() Errno { return setByFamily(fd, v6, unix.IP_RECVORIGDSTADDR, unix.IPV6_RECVORIGDSTADDR, 1) }},
		{o.Class, "IP_RECVTOS", func() Errno { return receiveClass(fd, v6, 1) }},
		{o.Deaf, "SO_ATTACH_FILTER", func() Errno { return setDeaf(fd) }},
		{o.MinTTL > 0, "SO_ATTACH_FILTER", func() Errno { return AttachFilter(fd, leastTTL(v6, o.MinTTL)) }},
		{o.ReceiveBuffer > 0, "SO_RCVBUF", func() Errno { return SetReceiveBuffer(fd, o.ReceiveBuffer) }},
	})
	if e != 0 {
		return what, e
	}
	if o.Coalesce {
		SetCoalesce(fd) // a kernel without it hands datagrams over one by one
	}
	if !v6 {
		setFragments(fd)
	}
	return "", 0
}

// ReceiveTTL makes Inbox report the TTL or hop limit of datagrams that are received
// from a socket from now on. It costs some 30 ns for each.
func ReceiveTTL(fd int, v6 bool) Errno {
	return setByFamily(fd, v6, unix.IP_RECVTTL, unix.IPV6_RECVHOPLIMIT, 1)
}

// leastTTL returns a program that drops packets with a smaller TTL, because UDP has
// no IP_MINTTL.
func leastTTL(v6 bool, ttl int) []FilterOp {
	at := uint32(8)
	if v6 {
		at = 7
	}
	return []FilterOp{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: FilterNetwork + at},
		{Code: FilterIfLeast, K: uint32(ttl), Jt: 1},
		{Code: FilterReturn, K: 0},
		{Code: FilterReturn, K: math.MaxUint32},
	}
}

// setDeaf drops all packets to the socket (F5) and sets a small receive buffer.
func setDeaf(fd int) Errno {
	if e := AttachFilter(fd, []FilterOp{{Code: FilterReturn, K: 0}}); e != 0 {
		return e
	}
	return SetRecvBuffer(fd, 0)
}

// SetCoalesce lets the kernel deliver equal-sized datagrams as one GSO batch
// (UDP_GRO, Linux 5.0).
func SetCoalesce(fd int) Errno { return setInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1) }

// SetReceiveBuffer is SetRecvBuffer beyond the system's limit, if the process has
// CAP_NET_ADMIN.
func SetReceiveBuffer(fd, bytes int) Errno {
	if e := setInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bytes); e != unix.EPERM {
		return e
	}
	return SetRecvBuffer(fd, bytes)
}

// UDPSocket creates an unbound UDP socket for ConnectUDP. It keeps ICMP messages
// (see ErrorQueue).
func UDPSocket(v6 bool) (int, Errno) {
	fd, e := socket(familyOf(v6), unix.SOCK_DGRAM, unix.IPPROTO_UDP)
	if e != 0 {
		return -1, e
	}
	if !v6 {
		setFragments(fd)
	}
	SetErrorQueue(fd, v6) // it cannot fail
	return fd, 0
}

// setFragments sends IPv4 datagrams without the DF flag, so that routers may
// fragment them. The original sender gets no Packet Too Big, and neither does this
// kernel for datagrams from another host's address.
func setFragments(fd int) {
	setInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT) // it cannot fail
}

// ConnectUDP connects an unconnected UDP socket. It then receives only from remote.
// If nothing listens there, the next call on the socket returns ECONNREFUSED.
// EADDRNOTAVAIL means that no local port is free.
//
// local is the source address; the zero value leaves it to the kernel. A non-local
// address needs CAP_NET_ADMIN. With port 0, the kernel chooses one. EADDRINUSE
// means that another socket has the port. A socket with a given local address
// cannot be connected again.
func ConnectUDP(fd int, remote, local netip.AddrPort) Errno {
	if local.Addr().IsValid() {
		e := SetTransparent(fd, local.Addr().Is6())
		if e == 0 {
			e = bind(fd, local)
		}
		if e != 0 {
			return e
		}
	}
	e := connect(fd, remote)
	if e == EAGAIN { // the kernel's error if no port is free
		return EADDRNOTAVAIL
	}
	return e
}

// DisconnectUDP removes a socket's peer and the port that the kernel chose for it.
// The socket then receives nothing; earlier datagrams are still queued (see Drain).
func DisconnectUDP(fd int) Errno {
	var s sockaddr // AF_UNSPEC
	_, _, e := syscall.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&s)), unix.SizeofSockaddrInet6)
	return e
}

// Drain discards a socket's queued datagrams and its pending error.
func Drain(fd int) {
	var b [1]byte
	for {
		if _, e := Recv(fd, b[:]); e == EAGAIN {
			return
		}
	}
}

// RawUDP creates a socket that sends UDP datagrams with a given header (see
// Outbox.AppendRaw) from an address, without being bound to a port. It needs
// CAP_NET_RAW.
func RawUDP(from netip.Addr) (fd int, err error) {
	fam := family(from)
	fd, e := socket(fam, unix.SOCK_RAW, unix.IPPROTO_UDP)
	if e != 0 {
		return -1, fmt.Errorf("raw UDP from %s: socket: %w", from, e)
	}
	what, e := setAll([]setting{
		{true, "SO_ATTACH_FILTER", func() Errno { return setDeaf(fd) }},
		{true, "IP_TRANSPARENT", func() Errno { return SetTransparent(fd, fam == unix.AF_INET6) }},
		{true, "bind", func() Errno { return bind(fd, netip.AddrPortFrom(from, 0)) }},
	})
	if e != 0 {
		Close(fd)
		return -1, fmt.Errorf("raw UDP from %s: %s: %w", from, what, e)
	}
	return fd, nil
}
