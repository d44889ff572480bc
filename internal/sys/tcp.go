package sys

import (
	"fmt"
	"math"
	"net/netip"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Liveness configures the detection of dead peers. The kernel uses the first three
// in whole seconds; 0 keeps the kernel's value.
type Liveness struct {
	Idle        time.Duration // silence before the first keepalive probe
	Interval    time.Duration // between probes
	Count       int           // unanswered probes until the connection is given up
	UserTimeout time.Duration // how long data may stay unacknowledged (TCP_USER_TIMEOUT); milliseconds
}

// IsZero reports whether all fields are zero.
func (l Liveness) IsZero() bool { return l == Liveness{} }

// SetLiveness enables keepalive probes and the user timeout with up to five system
// calls. Accepted sockets inherit them from their listening socket. On a connecting
// socket, set them only once the connection has existed for a while.
func SetLiveness(fd int, l Liveness) Errno {
	idle, interval := wholeSeconds(l.Idle), wholeSeconds(l.Interval)
	for _, o := range [...]struct{ level, option, value int }{
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, min(1, max(idle, interval, l.Count))},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, idle},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, interval},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, l.Count},
		{unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(l.UserTimeout / time.Millisecond)},
	} {
		if o.value > 0 {
			if e := setInt(fd, o.level, o.option, o.value); e != 0 {
				return e
			}
		}
	}
	return 0
}

// wholeSeconds rounds up.
func wholeSeconds(d time.Duration) int { return int((d + time.Second - 1) / time.Second) }

// ListenOptions are the options of a listening socket, which accepted sockets
// inherit. TCP_NODELAY and SO_OOBINLINE are always set, and Close resets a
// connection: see CloseInOrder.
type ListenOptions struct {
	Transparent bool     // IP_TRANSPARENT: accept connections to addresses that are not this host's (TPROXY); needs CAP_NET_ADMIN
	FreeBind    bool     // IP_FREEBIND: bind to an address that no interface has yet
	MinTTL      int      // IP_MINTTL: ignore packets with less, also in accepted sockets; 0: none
	ReusePort   bool     // SO_REUSEPORT: several listeners share the port
	Backlog     int      // connections not yet accepted; 0 means 4096, and net.core.somaxconn caps it
	Liveness    Liveness // inherited by accepted sockets
	Congestion  string   // TCP congestion control of accepted sockets; empty: the system's
	// Filter is attached before the socket listens; empty for none. See
	// AttachFilter.
	Filter []FilterOp
}

// ListenTCP creates a listening socket on addr. With port 0, the kernel chooses
// one; see LocalAddr. It is a plain TCP socket, unlike Go's Multipath TCP sockets,
// so that BPF maps accept it. An IPv6 socket accepts IPv6 only.
func ListenTCP(addr netip.AddrPort, o ListenOptions) (fd int, err error) {
	fam := family(addr.Addr())
	fd, e := socket(fam, unix.SOCK_STREAM, unix.IPPROTO_TCP)
	if e != 0 {
		return -1, fmt.Errorf("listen %s: socket: %w", addr, e)
	}
	Disown(fd) // for ListenInPlaceOf; without the right to that, the others of this user can join
	v6 := fam == unix.AF_INET6
	what, e := setAll([]setting{
		{true, "SO_REUSEADDR", func() Errno { return setInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }},
		{v6, "IPV6_V6ONLY", func() Errno { return setInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1) }},
		{o.ReusePort, "SO_REUSEPORT", func() Errno { return setInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }},
		{o.Transparent, "IP_TRANSPARENT", func() Errno { return SetTransparent(fd, v6) }},
		{o.FreeBind, "IP_FREEBIND", func() Errno { return setFreeBind(fd, v6) }},
		{o.MinTTL != 0, "IP_MINTTL", func() Errno { return setByFamily(fd, v6, unix.IP_MINTTL, unix.IPV6_MINHOPCOUNT, o.MinTTL) }},
		{true, "SO_LINGER, SO_OOBINLINE", func() Errno { return prepare(fd) }},
		{true, "TCP_NODELAY", func() Errno { return SetNoDelay(fd) }},
		{true, "TCP_NOTSENT_LOWAT", func() Errno { return LimitUnsent(fd, UnsentLimit) }},
		{true, "keepalive", func() Errno { return SetLiveness(fd, o.Liveness) }},
		{true, "IP_RECVTOS", func() Errno { return receiveClass(fd, v6, 1) }},
		{o.Congestion != "", "congestion control " + o.Congestion, func() Errno { return setCongestion(fd, o.Congestion) }},
		{true, "bind", func() Errno { return bind(fd, addr) }},
		{len(o.Filter) > 0, "filter", func() Errno { return AttachFilter(fd, o.Filter) }},
		{true, "listen", func() Errno { return startListening(fd, o.Backlog) }},
	})
	if e != 0 {
		Close(fd)
		return -1, fmt.Errorf("listen %s: %s: %w", addr, what, e)
	}
	return fd, nil
}

// AcceptTCP is Accept on a socket of ListenTCP. The connection's receive buffer is
// ReceiveBuffer, for the reasons that ConnectTCP has; the listening socket's would bound the
// scale of the window as well. By itself, the kernel opens no larger window than that before
// somebody reads.
func AcceptTCP(listener int) (fd int, client netip.AddrPort, e Errno) {
	if fd, client, e = Accept(listener); e == 0 {
		fixReceiveBuffer(fd, ReceiveBuffer)
	}
	return fd, client, e
}

func startListening(fd, backlog int) Errno {
	if backlog <= 0 {
		backlog = 4096
	}
	_, _, e := syscall.RawSyscall(unix.SYS_LISTEN, uintptr(fd), uintptr(backlog), 0)
	return e
}

// Hide makes the kernel refuse new connections to a listening socket's address and
// port. The socket keeps both, so that no other program can listen there.
// Handshakes in progress are completed, and waiting connections remain acceptable.
// Without CAP_NET_RAW, a hidden socket cannot listen again; see ListenInPlaceOf. It
// needs Linux 5.7, or CAP_NET_RAW (EPERM) and Linux 5.0 (ENOPROTOOPT).
func Hide(fd int) Errno {
	// A socket that is bound to a nonexistent interface matches no SYN. A handshake
	// in progress has an entry of its own, bound to the interface of its SYN.
	return setInt(fd, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, math.MaxInt32)
}

// StopListening is Hide for older kernels. It resets connections that were not
// accepted.
func StopListening(fd int) Errno {
	// Sockets that share an address may be bound together only while none of them
	// listens.
	if e := setInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 0); e != 0 {
		return e
	}
	_, _, e := syscall.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), unix.SHUT_RD, 0)
	return e
}

// LetGo is StopListening for a socket that cannot be closed yet. Afterwards, other
// sockets with SO_REUSEADDR, such as those of ListenTCP, can listen on its address
// and port. It may follow StopListening.
func LetGo(fd int) Errno {
	syscall.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), unix.SHUT_RD, 0) // ENOTCONN: it listens no more
	return setInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
}

// ListenInPlaceOf is ListenTCP for an address and port that other sockets of this
// process hold, after Hide or StopListening. No other program can take the port in
// between, unless Disown failed and the program has the same user and sets
// SO_REUSEPORT.
func ListenInPlaceOf(old []int, addr netip.AddrPort, o ListenOptions) (fd int, err error) {
	share := func(fd, on int) {
		setInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, on) // if it fails, bind says so
	}
	for _, other := range old {
		share(other, 1)
		defer share(other, 0)
	}
	o.ReusePort = true
	fd, err = ListenTCP(addr, o)
	if err == nil {
		share(fd, 0)
	}
	return fd, err
}

// SetTransparent allows a socket to use non-local addresses (IP_TRANSPARENT). It
// needs CAP_NET_ADMIN.
func SetTransparent(fd int, v6 bool) Errno {
	return setByFamily(fd, v6, unix.IP_TRANSPARENT, unix.IPV6_TRANSPARENT, 1)
}

func setFreeBind(fd int, v6 bool) Errno {
	return setByFamily(fd, v6, unix.IP_FREEBIND, unix.IPV6_FREEBIND, 1)
}

// ConnectOptions are the options of a connecting socket.
type ConnectOptions struct {
	Transparent bool   // IP_TRANSPARENT: the local address need not be this host's (the client's own is kept)
	Congestion  string // TCP congestion control; empty: the system's
	Class       uint8  // DSCP of its packets, as bits of the traffic class
	Mark        uint32 // of its packets, which needs CAP_NET_ADMIN; 0: none
	TTL         int    // or hop limit, of its packets; 0: the system's
}

// ConnectTCP begins to connect to remote and does not wait. It returns a
// descriptor with 0 (connected already) or EINPROGRESS (it becomes writable, or
// fails, later), else -1 and why: EADDRNOTAVAIL means that no local port is
// free for this remote address, which is our own trouble, never the remote
// side's.
//
// local may be the zero AddrPort (the kernel picks both), an address with port
// 0 (the kernel picks the port when it knows the remote address, so that one
// port serves many remote addresses), or both; the address may be 0.0.0.0 or ::
// with a port. A port that is given may still be in TIME_WAIT from an earlier
// connection to the same remote address: the kernel takes it over, if both
// sides use timestamps.
//
// The socket has SO_OOBINLINE, and Close resets it: see CloseInOrder. What short
// connections can do without is left for later: the first write needs no
// TCP_NODELAY (SetNoDelay), and keepalive takes four system calls (SetLiveness). Its
// receive buffer is ReceiveBuffer once the SYN is sent. Before, it would bound the scale
// of the window, which GrowReceiveBuffer could not open further then. Later, the kernel
// would drop what arrives in a window that it advertised before, and the peer sends that
// again after seconds only.
func ConnectTCP(remote, local netip.AddrPort, o ConnectOptions) (int, Errno) {
	fam := family(remote.Addr())
	fd, e := socket(fam, unix.SOCK_STREAM, unix.IPPROTO_TCP)
	if e != 0 {
		return -1, e
	}
	e = prepare(fd)
	if e == 0 && o.Congestion != "" {
		e = setCongestion(fd, o.Congestion)
	}
	if e == 0 && o.Class != 0 {
		e = SetClass(fd, fam == unix.AF_INET6, o.Class)
	}
	if e == 0 && o.Mark != 0 {
		e = SetMark(fd, o.Mark)
	}
	if e == 0 && o.TTL != 0 {
		e = SetTTL(fd, fam == unix.AF_INET6, o.TTL)
	}
	if e == 0 && o.Transparent {
		e = SetTransparent(fd, fam == unix.AF_INET6)
	}
	if e == 0 && local.Addr().IsValid() {
		e = bindSource(fd, local)
	}
	if e == 0 {
		e = connect(fd, remote)
	}
	if e != 0 && e != EINPROGRESS {
		Close(fd)
		return -1, e
	}
	fixReceiveBuffer(fd, ReceiveBuffer)
	return fd, e
}

// SetTTL sets the TTL or hop limit of a socket's packets.
func SetTTL(fd int, v6 bool, ttl int) Errno {
	return setByFamily(fd, v6, unix.IP_TTL, unix.IPV6_UNICAST_HOPS, ttl)
}

// ClientTTL returns the TTL or hop limit of the client's packet that completed the
// handshake of an accepted connection, or 0 if unknown. The kernel stores it where
// datagram sockets have their multicast TTL.
func ClientTTL(fd int, v6 bool) int {
	level, option := unix.IPPROTO_IP, unix.IP_MULTICAST_TTL
	if v6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS
	}
	ttl, _ := getInt(fd, level, option)
	return ttl
}

// SetMark sets the mark of a socket's packets; 0 for none. It needs CAP_NET_ADMIN.
func SetMark(fd int, mark uint32) Errno {
	return setInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark))
}

func bindSource(fd int, local netip.AddrPort) Errno {
	// IP_BIND_ADDRESS_NO_PORT avoids reserving a port for each connection alone.
	// SO_REUSEADDR lets bind share the port with connections in TIME_WAIT and with
	// other connections of ours.
	level, option := unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT
	if local.Port() != 0 {
		level, option = unix.SOL_SOCKET, unix.SO_REUSEADDR
	}
	if e := setInt(fd, level, option, 1); e != 0 {
		return e
	}
	return bind(fd, local)
}

// ConnectResult returns the result of a connect: 0 if connected, EAGAIN while in
// progress, or else the error.
func ConnectResult(fd int) Errno {
	_, e := Send(fd, nil, false)
	return e
}

// SocketError returns and clears a socket's pending error.
func SocketError(fd int) Errno {
	v, e := getInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if e != 0 {
		return e
	}
	return Errno(v)
}

// setCongestion sets the TCP congestion control by name. Set it before connecting,
// because BBR leaves its pacing timers behind.
func setCongestion(fd int, name string) Errno {
	_, _, e := syscall.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, uintptr(unsafe.Pointer(unsafe.StringData(name))), uintptr(len(name)), 0)
	return e
}

// CheckCongestion returns nil if a TCP congestion control can be used here, or else
// the reason. Empty means the system's default.
func CheckCongestion(name string) error {
	if name == "" {
		return nil
	}
	fd, e := socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_TCP)
	if e == 0 {
		e = setCongestion(fd, name)
		Close(fd)
	}
	if e != 0 {
		return e
	}
	return nil
}

// CloseInOrder closes a connection that Close would reset: the kernel delivers the
// written bytes, then sends a FIN.
func CloseInOrder(fd int) {
	setLinger(fd, unix.Linger{})
	Close(fd)
}

func setLinger(fd int, l unix.Linger) Errno {
	return setOption(fd, unix.SOL_SOCKET, unix.SO_LINGER, &l)
}

// prepare sets the options of all TCP sockets of the data path: urgent bytes inline,
// where Recv finds them, and a reset on close, so that a stream truncated by the death
// of the process does not look complete.
func prepare(fd int) Errno {
	if e := setLinger(fd, unix.Linger{Onoff: 1, Linger: 0}); e != 0 {
		return e
	}
	return setInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1)
}

// SetNoDelay has the kernel send small writes at once also while earlier ones are
// not acknowledged.
func SetNoDelay(fd int) Errno { return setInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) }

// Delivery is the state of the bytes that were written to a connection.
type Delivery struct {
	Pending    bool          // some are not acknowledged, or not sent because the peer has no room
	Silence    time.Duration // since the peer's last acknowledgement
	Unanswered int           // retransmissions or window probes since then
	RTT        time.Duration // the shortest that was measured lately
}

// DeliveryOf reads TCP_INFO. A peer with a closed window acknowledges window
// probes, whose interval grows to 120 s.
func DeliveryOf(fd int) (Delivery, Errno) {
	var info unix.TCPInfo
	e := getOption(fd, unix.IPPROTO_TCP, unix.TCP_INFO, &info)
	return Delivery{
		Pending:    info.Unacked > 0 || info.Notsent_bytes > 0,
		Silence:    time.Duration(info.Last_ack_recv) * time.Millisecond,
		Unanswered: int(max(info.Retransmits, info.Probes)),
		RTT:        time.Duration(info.Min_rtt) * time.Microsecond,
	}, e
}

// Peer is what the kernel knows of a connection's peer and of the way to it.
type Peer struct {
	RTT         time.Duration // smoothed
	Silence     time.Duration // since the peer's last bytes
	Unacked     int           // bytes that were written and not acknowledged
	Unsent      int           // those of them that were not sent
	Window      uint32        // bytes that the peer takes now
	Retransmits uint32        // segments that were sent again
	Unanswered  uint32        // retransmissions or window probes since the last acknowledgement
}

// PeerOf reads TCP_INFO and the length of the send queue.
func PeerOf(fd int) (Peer, Errno) {
	var info unix.TCPInfo
	if e := getOption(fd, unix.IPPROTO_TCP, unix.TCP_INFO, &info); e != 0 {
		return Peer{}, e
	}
	unacked, _ := unix.IoctlGetInt(fd, unix.SIOCOUTQ) // works wherever TCP_INFO does
	return Peer{
		RTT:         time.Duration(info.Rtt) * time.Microsecond,
		Silence:     time.Duration(info.Last_data_recv) * time.Millisecond,
		Unacked:     unacked,
		Unsent:      int(info.Notsent_bytes),
		Window:      info.Snd_wnd,
		Retransmits: info.Total_retrans,
		Unanswered:  uint32(max(info.Retransmits, info.Probes)),
	}, 0
}

// ReceiveBuffer is what the kernel holds at most of what a connection has received and
// nobody has read, headers included: a window of some 256 KiB. By itself it lets that
// grow to net.ipv4.tcp_rmem's 6 MiB.
const ReceiveBuffer = 512 << 10

// GrowReceiveBuffer sets a larger receive buffer and advertises its window to the
// peer.
func GrowReceiveBuffer(fd, bytes int) {
	fixReceiveBuffer(fd, bytes)
	setInt(fd, unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP, bytes)
}

// fixReceiveBuffer sets a fixed size of a socket's receive buffer. Without
// CAP_NET_ADMIN, net.core.rmem_max bounds it. Errors are ignored.
func fixReceiveBuffer(fd, bytes int) {
	if setInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bytes/2) != 0 { // the kernel doubles it
		SetRecvBuffer(fd, bytes/2)
	}
}

// FreeReceiveBuffer lets the kernel tune a connection's receive buffer again, up to
// net.ipv4.tcp_rmem. It needs Linux 5.14; on older kernels the buffer grows to 6
// MiB.
func FreeReceiveBuffer(fd int) {
	if setInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK, 0) != 0 {
		GrowReceiveBuffer(fd, 6<<20)
	}
}

// LimitUnsent bounds the bytes that the kernel accepts beyond those that it can
// send at once (TCP_NOTSENT_LOWAT), and so the memory for a peer that does not
// read. Accepted sockets inherit it.
func LimitUnsent(fd, bytes int) Errno {
	return setInt(fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, bytes)
}

// UnsentLimit is the LimitUnsent of accepted sockets.
const UnsentLimit = 256 << 10

// SetRecvBuffer sets a fixed receive buffer, which disables the kernel's tuning.
// The kernel doubles the value and enforces a minimum. Accepted sockets inherit it.
func SetRecvBuffer(fd, bytes int) Errno {
	return setInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, bytes)
}
