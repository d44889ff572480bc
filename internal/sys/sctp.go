package sys

import (
	"fmt"
	"net/netip"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Numbers of linux/sctp.h.
const (
	sctpRTOInfo      = 0
	sctpAssocInfo    = 1
	sctpInitMsg      = 2
	sctpNoDelay      = 3
	sctpPeerParams   = 9
	sctpEvents       = 11
	sctpStatus       = 14
	sctpDelayedSACK  = 16
	sctpRecvRcvInfo  = 32
	sctpHeartbeatsOn = 1 // SPP_HB_ENABLE
)

// TrySCTP returns nil if the kernel supports SCTP sockets, or else the reason. The
// kernel may load a module.
func TrySCTP() error {
	fd, e := socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP)
	if e != 0 {
		return e
	}
	Close(fd)
	return nil
}

// SCTPOptions are the options of SCTP sockets. Accepted sockets inherit them from
// their listening socket, but not Mark and TTL. SCTP_NODELAY, SCTP_RECVRCVINFO and
// the events that SCTPMailbox needs are always set, and Close aborts an association.
type SCTPOptions struct {
	// OutStreams are the streams to ask the peer for, InStreams those to grant it;
	// 0: the kernel's.
	OutStreams, InStreams uint16
	// SendBuffer and ReceiveBuffer are in bytes of messages; 0: the kernel's. A
	// message that is larger than SendBuffer cannot be sent. Without CAP_NET_ADMIN,
	// net.core.wmem_max and rmem_max bound them.
	SendBuffer, ReceiveBuffer int
	// Liveness says when a peer counts as lost; the zero value: as the kernel's.
	Liveness SCTPLiveness
	// SACKDelay bounds how long an acknowledgement is delayed; 0: the kernel's. The
	// peer's SHUTDOWN waits for it.
	SACKDelay time.Duration
	// InitTimeout is the time until the first INIT is sent again; 0: the kernel's.
	// Connecting sockets only.
	InitTimeout time.Duration
	Mark        uint32 // of packets, which needs CAP_NET_ADMIN; 0: none. Connecting sockets only
	// Backlog is the number of associations not yet accepted; beyond it, the kernel
	// aborts. Listening sockets only; 0 means 4096, and net.core.somaxconn caps it.
	Backlog int
	// Filter is attached before the socket listens; empty for none.
	Filter []FilterOp
}

// SCTPLiveness configures the detection of dead peers and paths.
type SCTPLiveness struct {
	Heartbeat      time.Duration // between probes of a quiet path, beside the time for an answer
	Unanswered     int           // retransmissions and heartbeats in a row without an answer until the association is given up
	PathUnanswered int           // the same until another path is used
	MaxTimeout     time.Duration // between two of them, from a second on that doubles
}

// ListenSCTP creates a one-to-one SCTP socket that listens on addr, which need not be
// this host's yet. An IPv6 socket accepts IPv6 only. The kernel lists no other address
// of the host in the handshake.
func ListenSCTP(addr netip.AddrPort, o SCTPOptions) (fd int, err error) {
	fam := family(addr.Addr())
	fd, e := socket(fam, unix.SOCK_STREAM, unix.IPPROTO_SCTP)
	if e != 0 {
		return -1, fmt.Errorf("listen %s: socket: %w", addr, e)
	}
	v6 := fam == unix.AF_INET6
	what, e := setAll([]setting{
		{true, "SO_REUSEADDR", func() Errno { return setInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }},
		{v6, "IPV6_V6ONLY", func() Errno { return setInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1) }},
		{true, "IP_FREEBIND", func() Errno { return setFreeBind(fd, v6) }},
		{true, "SCTP options", func() Errno { return prepareSCTP(fd, &o) }},
		{true, "bind", func() Errno { return bind(fd, addr) }},
		{len(o.Filter) > 0, "filter", func() Errno { return AttachFilter(fd, o.Filter) }},
		{true, "listen", func() Errno { return ListenAgain(fd, o.Backlog) }},
	})
	if e != 0 {
		Close(fd)
		return -1, fmt.Errorf("listen %s: %s: %w", addr, what, e)
	}
	return fd, nil
}

// RefuseSCTP stops a listening SCTP socket: the kernel answers each INIT with an ABORT.
// The socket stays bound. Associations that wait in its queue cannot be accepted before
// ListenAgain.
func RefuseSCTP(fd int) Errno {
	_, _, e := syscall.RawSyscall(unix.SYS_LISTEN, uintptr(fd), 0, 0)
	return e
}

// ListenAgain makes a bound socket listen, also after RefuseSCTP. Peers of a unix socket see
// the calling process from then on.
func ListenAgain(fd, backlog int) Errno { return startListening(fd, backlog) }

// ConnectSCTP begins to connect to remote from an address of this host, and does not
// wait. It returns a descriptor with 0 or EINPROGRESS (see SCTPConnected), else -1
// and the error.
func ConnectSCTP(remote netip.AddrPort, local netip.Addr, o SCTPOptions) (int, Errno) {
	fd, e := socket(family(remote.Addr()), unix.SOCK_STREAM, unix.IPPROTO_SCTP)
	if e != 0 {
		return -1, e
	}
	e = prepareSCTP(fd, &o)
	if e == 0 && local.IsValid() {
		// An unbound socket lists all addresses of the host in its INIT.
		e = bind(fd, netip.AddrPortFrom(local, 0))
	}
	if e == 0 {
		e = connect(fd, remote)
	}
	if e != 0 && e != EINPROGRESS {
		Close(fd)
		return -1, e
	}
	return fd, e
}

// SCTPConnected returns the result of ConnectSCTP: 0 and the status if connected, EAGAIN
// while in progress, or else the error, which it clears. A send cannot tell: it fails
// with EPIPE meanwhile.
func SCTPConnected(fd int) (SCTPStatus, Errno) {
	s, e := SCTPStatusOf(fd)
	if e != 0 {
		if e = SocketError(fd); e == 0 {
			e = EAGAIN
		}
	}
	return s, e
}

// SourceOf returns the address of this host from which the kernel would send to remote.
func SourceOf(remote netip.AddrPort) (netip.Addr, Errno) {
	fd, e := socket(family(remote.Addr()), unix.SOCK_DGRAM, 0)
	if e != 0 {
		return netip.Addr{}, e
	}
	defer Close(fd)
	if e := connect(fd, remote); e != 0 {
		return netip.Addr{}, e
	}
	local, e := LocalAddr(fd)
	return local.Addr(), e
}

// prepareSCTP sets the options that listening and connecting sockets share.
func prepareSCTP(fd int, o *SCTPOptions) Errno {
	// Not SCTP_RECVNXTINFO: with it, recvmsg loses the error of an association.
	events := [8]byte{1: 1, 6: 1} // association changes, end of a partial delivery
	sack := struct {
		assoc            int32
		delay, frequency uint32
	}{0, milliseconds(o.SACKDelay), 2}
	if o.SendBuffer > 0 {
		fixSendBuffer(fd, o.SendBuffer)
	}
	if o.ReceiveBuffer > 0 {
		fixReceiveBuffer(fd, 2*o.ReceiveBuffer) // the kernel advertises half of it
	}
	_, e := setAll([]setting{
		// Messages are sent at once, and Close aborts, as does the death of the process.
		{true, "SCTP_NODELAY", func() Errno { return setInt(fd, unix.IPPROTO_SCTP, sctpNoDelay, 1) }},
		{true, "SO_LINGER", func() Errno { return setLinger(fd, unix.Linger{Onoff: 1}) }},
		{true, "SCTP_RECVRCVINFO", func() Errno { return setInt(fd, unix.IPPROTO_SCTP, sctpRecvRcvInfo, 1) }},
		{true, "SCTP_EVENTS", func() Errno { return setOption(fd, unix.IPPROTO_SCTP, sctpEvents, &events) }},
		{o.OutStreams|o.InStreams != 0, "SCTP_INITMSG", func() Errno { return SetStreams(fd, o.OutStreams, o.InStreams) }},
		{o.Liveness != SCTPLiveness{}, "liveness", func() Errno { return setSCTPLiveness(fd, &o.Liveness) }},
		{o.SACKDelay > 0, "SCTP_DELAYED_SACK", func() Errno { return setOption(fd, unix.IPPROTO_SCTP, sctpDelayedSACK, &sack) }},
		{o.InitTimeout > 0, "SCTP_RTOINFO", func() Errno { return SetInitTimeout(fd, o.InitTimeout) }},
		{o.Mark != 0, "SO_MARK", func() Errno { return SetMark(fd, o.Mark) }},
	})
	return e
}

func setSCTPLiveness(fd int, l *SCTPLiveness) Errno {
	p := peerParams{interval: milliseconds(l.Heartbeat), flags: sctpHeartbeatsOn, pathAttempts: uint16(l.PathUnanswered)}
	b := p.encode()
	if e := setOption(fd, unix.IPPROTO_SCTP, sctpPeerParams, &b); e != 0 {
		return e
	}
	info := struct {
		assoc                    int32
		attempts, peers          uint16
		peerWindow, window, life uint32
	}{attempts: uint16(l.Unanswered)}
	if e := setOption(fd, unix.IPPROTO_SCTP, sctpAssocInfo, &info); e != 0 {
		return e
	}
	return setTimeouts(fd, timeouts{max: milliseconds(l.MaxTimeout)})
}

// timeouts is struct sctp_rtoinfo; 0 leaves a value as it is.
type timeouts struct {
	_            int32 // the association
	initial, max uint32
	_            uint32 // min
}

func setTimeouts(fd int, t timeouts) Errno {
	return setOption(fd, unix.IPPROTO_SCTP, sctpRTOInfo, &t)
}

// SetStreams sets the streams that a socket's next associations ask for and grant.
func SetStreams(fd int, out, in uint16) Errno {
	m := struct{ out, in, attempts, timeout uint16 }{out: out, in: in}
	return setOption(fd, unix.IPPROTO_SCTP, sctpInitMsg, &m)
}

// SetInitTimeout sets the time until the first INIT is sent again, which is also that
// of the first message until a round trip was measured.
func SetInitTimeout(fd int, d time.Duration) Errno {
	return setTimeouts(fd, timeouts{initial: milliseconds(d)})
}

// DefaultInitTimeout is the kernel's, unless net.sctp.rto_initial says otherwise.
const DefaultInitTimeout = 3 * time.Second

func milliseconds(d time.Duration) uint32 { return uint32(max(1, d/time.Millisecond)) }

// peerParams are the fields of struct sctp_paddrparams that are used here.
type peerParams struct {
	interval     uint32
	pathAttempts uint16
	flags        uint32
}

// encode returns the kernel's layout, which is packed.
func (p *peerParams) encode() (b [156]byte) {
	put32 := func(at int, v uint32) { *(*[4]byte)(b[at:]) = *(*[4]byte)(unsafe.Pointer(&v)) }
	put32(132, p.interval)
	*(*[2]byte)(b[136:]) = *(*[2]byte)(unsafe.Pointer(&p.pathAttempts))
	put32(146, p.flags)
	return b
}

func fixSendBuffer(fd, bytes int) {
	if setInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, bytes) != 0 {
		setInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, bytes)
	}
}

// SCTPStatus is the state of an association.
type SCTPStatus struct {
	Unsent  int    // chunks that are not sent or not acknowledged
	In, Out uint16 // streams
}

// SCTPStatusOf reads SCTP_STATUS. EINVAL means that there is no association, not yet or
// no more.
func SCTPStatusOf(fd int) (SCTPStatus, Errno) {
	var s struct {
		assoc, state     int32
		window           uint32
		unacked, pending uint16
		in, out          uint16
		fragment         uint32
		primary          [152]byte
	}
	e := getOption(fd, unix.IPPROTO_SCTP, sctpStatus, &s)
	return SCTPStatus{Unsent: int(s.unacked) + int(s.pending), In: s.in, Out: s.out}, e
}
