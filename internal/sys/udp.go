package sys

import (
	"fmt"
	"math"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// UDPOptions are what a bound UDP socket is set to.
type UDPOptions struct {
	Transparent bool // IP_TRANSPARENT: datagrams to addresses that are not this host's, and replies from them; needs CAP_NET_ADMIN
	FreeBind    bool // IP_FREEBIND: bind to an address that no interface has yet
	// ReusePort lets several sockets of this program share the address (see
	// Disown); the kernel gives each client to one of them.
	ReusePort bool
	// Destination has Inbox know the destination that each datagram was sent to.
	Destination bool
	// Class has Inbox know the DSCP of each datagram.
	Class bool
	// Coalesce lets the kernel hand a batch of equal datagrams over in one piece
	// (UDP_GRO).
	Coalesce bool
	// MinTTL has the socket ignore datagrams with a smaller TTL, or hop limit; 0
	// for none.
	MinTTL int
	// Deaf makes the socket receive nothing: it is for sending only.
	Deaf bool
	// ReceiveBuffer is in bytes; 0 leaves it as the kernel has it. It may exceed
	// net.core.rmem_max with CAP_NET_ADMIN.
	ReceiveBuffer int
}

// BindUDP makes a UDP socket on addr (port 0: the kernel picks one, see
// LocalAddr). An IPv6 one takes IPv6 alone.
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

// ReceiveTTL has Inbox know the TTL, or hop limit, of each datagram that is taken
// from a socket from now on. That costs some 30 ns for each.
func ReceiveTTL(fd int, v6 bool) Errno {
	return setByFamily(fd, v6, unix.IP_RECVTTL, unix.IPV6_RECVHOPLIMIT, 1)
}

// leastTTL is a program that drops packets with a smaller TTL: UDP has no
// IP_MINTTL.
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

// setDeaf drops all that the socket would receive (F5), and keeps little room
// for it.
func setDeaf(fd int) Errno {
	if e := AttachFilter(fd, []FilterOp{{Code: FilterReturn, K: 0}}); e != 0 {
		return e
	}
	return SetRecvBuffer(fd, 0)
}

// SetCoalesce lets the kernel hand batches of equal datagrams over in one piece
// (UDP_GRO, Linux 5.0).
func SetCoalesce(fd int) Errno { return setInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1) }

// SetReceiveBuffer is SetRecvBuffer over the system's limit where the process
// has the right to that.
func SetReceiveBuffer(fd, bytes int) Errno {
	if e := setInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bytes); e != unix.EPERM {
		return e
	}
	return SetRecvBuffer(fd, bytes)
}

// UDPSocket makes a UDP socket that is bound to nothing, for ConnectUDP. It
// keeps ICMP messages (see ErrorQueue).
func UDPSocket(v6 bool) (int, Errno) {
	fam := uintptr(unix.AF_INET)
	if v6 {
		fam = unix.AF_INET6
	}
	fd, e := socket(fam, unix.SOCK_DGRAM, unix.IPPROTO_UDP)
	if e != 0 {
		return -1, e
	}
	if !v6 {
		setFragments(fd)
	}
	SetErrorQueue(fd, v6) // it cannot fail
	return fd, 0
}

// setFragments has IPv4 datagrams leave without the flag that forbids routers to
// cut them up: who sent them first is not told when they do not fit, and from
// the address of somebody else the kernel is not told either.
func setFragments(fd int) {
	setInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT) // it cannot fail
}

// ConnectUDP connects a UDP socket that is not connected. Afterwards it
// receives from remote only, and is told when nobody listens there
// (ECONNREFUSED, by the next call on the socket). EADDRNOTAVAIL means that no
// local port is free.
//
// local is where it sends from; the zero value leaves that to the kernel. It need
// not be an address of this host, which needs CAP_NET_ADMIN; with port 0 the
// kernel picks one. EADDRINUSE means that the port is another socket's. A socket
// that was given a local address cannot be connected again.
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
	if e == EAGAIN { // what the kernel says when it finds no port
		return EADDRNOTAVAIL
	}
	return e
}

// DisconnectUDP takes a socket's peer, and the port that the kernel chose for
// it, away. Nothing reaches it any more; what it received before is still
// there (see Drain).
func DisconnectUDP(fd int) Errno {
	var s sockaddr // AF_UNSPEC
	_, _, e := syscall.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&s)), unix.SizeofSockaddrInet6)
	return e
}

// Drain throws away what a socket has received and its pending error.
func Drain(fd int) {
	var b [1]byte
	for {
		if _, e := Recv(fd, b[:]); e == EAGAIN {
			return
		}
	}
}

// RawUDP makes a socket that sends UDP datagrams of which it is given the
// header too (see Outbox.AppendRaw), from an address without being bound to a port of it. It
// needs CAP_NET_RAW.
func RawUDP(from netip.Addr) (fd int, err error) {
	fam := family(from)
	fd, e := socket(fam, unix.SOCK_RAW, unix.IPPROTO_UDP)
	if e != 0 {
		return -1, fmt.Errorf("raw UDP from %s: socket: %w", from, e)
	}
	what, e := "SO_ATTACH_FILTER", setDeaf(fd)
	if e == 0 {
		what, e = "IP_TRANSPARENT", SetTransparent(fd, fam == unix.AF_INET6)
	}
	if e == 0 {
		what, e = "bind", bind(fd, netip.AddrPortFrom(from, 0))
	}
	if e != 0 {
		Close(fd)
		return -1, fmt.Errorf("raw UDP from %s: %s: %w", from, what, e)
	}
	return fd, nil
}
