package sys

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mmsghdr is struct mmsghdr.
type mmsghdr struct {
	unix.Msghdr
	length uint32
	_      [4]byte
}

const (
	// slotSize suffices for the largest datagram and the largest GSO batch of
	// UDP_GRO.
	slotSize = 1 << 16
	// slotStride is not a power of two. Otherwise the starts of all slots would
	// compete for a few cache lines.
	slotStride = slotSize + 5*64
	// controlSize suffices for the control messages of a received datagram: its
	// destination, the segment size of a GSO batch, its class and its TTL.
	controlSize = 120
)

// Inbox is memory for received datagrams. Each slot holds one datagram or one GSO
// batch (UDP_GRO). An Inbox is not safe for concurrent use.
type Inbox struct {
	data     []byte
	headers  []mmsghdr
	vectors  []unix.Iovec
	names    []sockaddr
	controls [][controlSize]byte
}

// NewInbox creates an Inbox. Each slot takes 64 KiB of address space, but only as
// much memory as arriving datagrams need.
func NewInbox(slots int) *Inbox {
	b := &Inbox{
		data:     make([]byte, slots*slotStride),
		headers:  make([]mmsghdr, slots),
		vectors:  make([]unix.Iovec, slots),
		names:    make([]sockaddr, slots),
		controls: make([][controlSize]byte, slots),
	}
	for i := range slots {
		v := &b.vectors[i]
		v.Base = &b.data[i*slotStride]
		v.SetLen(slotSize)
		h := &b.headers[i]
		h.Iov = v
		h.SetIovlen(1)
		h.Name = &b.names[i][0]
		h.Control = &b.controls[i][0]
	}
	return b
}

// Slots returns the number of slots.
func (b *Inbox) Slots() int { return len(b.headers) }

// Receive receives up to n datagrams from a socket into the slots from first on,
// and returns their number. It does not wait.
func (b *Inbox) Receive(fd, first, n int) (int, Errno) {
	h := b.headers[first : first+n]
	for i := range h {
		h[i].Namelen = uint32(len(b.names[0]))
		h[i].SetControllen(controlSize)
	}
	r, _, e := syscall.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&h[0])), uintptr(n), 0, 0, 0)
	return result(r, e)
}

// ReceiveOne receives one datagram into a slot by the cheapest system call. Its
// source and destination are not available afterwards. The socket must not coalesce
// (SetCoalesce), because a GSO batch would look like one datagram.
func (b *Inbox) ReceiveOne(fd, slot int) Errno {
	r, _, e := syscall.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(b.vectors[slot].Base)), slotSize, 0, 0, 0)
	n, errno := result(r, e)
	if errno == 0 {
		h := &b.headers[slot]
		h.length, h.Flags, h.Namelen = uint32(n), 0, 0
		h.SetControllen(0)
	}
	return errno
}

// Data returns what a slot received. It is valid until the slot is used again.
func (b *Inbox) Data(i int) []byte {
	from := i * slotStride
	return b.data[from : from+int(b.headers[i].length)]
}

// Cut reports whether the datagram was longer than a slot. No UDP datagram is.
func (b *Inbox) Cut(i int) bool { return b.headers[i].Flags&unix.MSG_TRUNC != 0 }

// From returns the source of a slot's datagram.
func (b *Inbox) From(i int) netip.AddrPort { return b.names[i].get() }

// Details returns the contents of the control messages: the destination of the
// datagram, if the socket has UDPOptions.Destination; the size of each datagram of
// a GSO batch except the last, which may be shorter, or 0 for a single datagram;
// class, the DSCP, if the socket has UDPOptions.Class; and ttl, the TTL or hop
// limit, after ReceiveTTL. Unknown values are 0.
func (b *Inbox) Details(i int) (to netip.AddrPort, segment int, class uint8, ttl int) {
	for h, body, rest := nextControl(b.controls[i][:b.headers[i].Controllen]); h != nil; h, body, rest = nextControl(rest) {
		switch {
		case isClass(h) && len(body) > 0:
			class = classOf(body)
		case isTTL(h) && len(body) >= 4:
			ttl = int(binary.NativeEndian.Uint32(body))
		case h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO && len(body) >= 4:
			segment = int(binary.NativeEndian.Uint32(body))
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_ORIGDSTADDR,
			h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_ORIGDSTADDR:
			var s sockaddr
			copy(s[:], body)
			to = s.get()
		}
	}
	return to, segment, class, ttl
}

func isTTL(h *unix.Cmsghdr) bool {
	return h.Level == unix.IPPROTO_IP && h.Type == unix.IP_TTL || h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_HOPLIMIT
}

const (
	// maxSegments bounds the datagrams of one message: the smallest limit of
	// supported kernels.
	maxSegments = 64
	// maxJoin bounds the size of datagrams that join adds to a GSO batch, because
	// each must fit into one packet.
	maxJoin = 1472
	// maxSegmentsBytes bounds the total size of a GSO batch: that of an IPv4
	// packet.
	maxSegmentsBytes = 65507
	// udpHeader is the length of a UDP header.
	udpHeader = 8
)

// outgoing is one message of an Outbox.
type outgoing struct {
	name    sockaddr
	control [64]byte // a struct in6_pktinfo and the segment size
	header  [udpHeader]byte
	bytes   int
	segment int // size of the datagrams of a GSO batch; 0 for a single datagram
	closed  bool
}

// Outbox collects datagrams and sends them with few system calls. It sends
// consecutive datagrams of one size to one destination as one GSO batch
// (UDP_SEGMENT). It refers to the memory of the datagrams until they are sent. It
// is not safe for concurrent use.
type Outbox struct {
	headers []mmsghdr
	vectors []unix.Iovec
	out     []outgoing
	sent    int // number of sent messages
	n       int
	used    int        // number of used vectors
	source  netip.Addr // see SetSource
}

// NewOutbox creates an Outbox for at most so many datagrams.
func NewOutbox(datagrams int) *Outbox {
	return &Outbox{
		headers: make([]mmsghdr, datagrams),
		vectors: make([]unix.Iovec, 2*datagrams),
		out:     make([]outgoing, datagrams),
	}
}

// SetSource sets the source address of messages that are added from now on; the zero
// value leaves it to the socket. A socket needs UDPOptions.Transparent for an address that
// it is not bound to. The port is the socket's.
func (o *Outbox) SetSource(a netip.Addr) { o.source = a }

// Empty reports whether all messages were sent.
func (o *Outbox) Empty() bool { return o.sent == o.n }

// Full reports whether Append must not be called.
func (o *Outbox) Full() bool { return o.n == len(o.headers) || o.used+2 > len(o.vectors) }

// Append adds a datagram, or a GSO batch of datagrams of the size segment. to is
// the destination; it must be invalid for a connected socket. With join, the
// datagram may be added to the previous message if that has the same destination.
// The Outbox must not be full.
func (o *Outbox) Append(to netip.AddrPort, p []byte, segment int, join bool) {
	if segment >= len(p) {
		segment = 0
	}
	var name sockaddr
	var nameLen uintptr
	if to.IsValid() {
		nameLen = name.put(to)
	}
	if join && segment == 0 && o.join(&name, p) {
		return
	}
	v := &o.vectors[o.used]
	v.Base = (*byte)(base(p))
	v.SetLen(len(p))
	m := o.begin(name, nameLen, v, 1)
	m.bytes, m.segment, m.closed = len(p), segment, segment != 0
	o.used++
	if segment != 0 {
		o.setSegment(o.n-1, segment)
	}
}

// AppendRaw adds one datagram with its UDP header, for a socket of RawUDP.
func (o *Outbox) AppendRaw(from, to netip.AddrPort, p []byte) {
	var name sockaddr
	// In the destination of a raw socket, the port means a protocol and must be 0
	// here.
	nameLen := name.put(netip.AddrPortFrom(to.Addr(), 0))
	v := &o.vectors[o.used]
	m := o.begin(name, nameLen, v, 2)
	binary.BigEndian.PutUint16(m.header[0:], from.Port())
	binary.BigEndian.PutUint16(m.header[2:], to.Port())
	binary.BigEndian.PutUint16(m.header[4:], uint16(udpHeader+len(p)))
	binary.BigEndian.PutUint16(m.header[6:], 0)
	binary.BigEndian.PutUint16(m.header[6:], udpChecksum(from.Addr(), to.Addr(), m.header[:], p))
	m.bytes, m.closed = len(p), true
	v.Base = &m.header[0]
	v.SetLen(udpHeader)
	second := &o.vectors[o.used+1]
	second.Base = (*byte)(base(p))
	second.SetLen(len(p))
	o.used += 2
}

// begin adds a message.
func (o *Outbox) begin(name sockaddr, nameLen uintptr, v *unix.Iovec, vectors int) *outgoing {
	m := &o.out[o.n]
	*m = outgoing{name: name}
	h := &o.headers[o.n]
	*h = mmsghdr{}
	if nameLen != 0 {
		h.Name, h.Namelen = &m.name[0], uint32(nameLen)
	}
	h.Iov = v
	h.SetIovlen(vectors)
	o.n++
	if o.source.IsValid() {
		o.setSource(m, h)
	}
	return m
}

// setSource puts a struct in_pktinfo or in6_pktinfo into a message.
func (o *Outbox) setSource(m *outgoing, h *mmsghdr) {
	if o.source.Is6() {
		a := o.source.As16()
		copy(m.add(h, unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, unix.SizeofInet6Pktinfo), a[:])
		return
	}
	a := o.source.As4()
	copy(m.add(h, unix.IPPROTO_IP, unix.IP_PKTINFO, unix.SizeofInet4Pktinfo)[4:], a[:]) // ipi_spec_dst
}

// add appends a control message to a message and returns its body.
func (m *outgoing) add(h *mmsghdr, level, what int32, size int) []byte {
	at := int(h.Controllen)
	c := (*unix.Cmsghdr)(unsafe.Pointer(&m.control[at]))
	c.Level, c.Type = level, what
	c.SetLen(unix.CmsgLen(size))
	h.Control = &m.control[0]
	h.SetControllen(at + unix.CmsgSpace(size))
	return m.control[at+unix.SizeofCmsghdr:]
}

// join adds a datagram to the previous message, if possible.
func (o *Outbox) join(name *sockaddr, p []byte) bool {
	if o.n == o.sent {
		return false
	}
	m, h := &o.out[o.n-1], &o.headers[o.n-1]
	size := m.segment
	if size == 0 {
		size = m.bytes
	}
	// The datagrams of a GSO batch have one size; only the last may be shorter.
	if m.closed || len(p) == 0 || size == 0 || size > maxJoin || len(p) > size || m.bytes+len(p) > maxSegmentsBytes ||
		int(h.Iovlen) >= maxSegments || m.name != *name {
		return false
	}
	v := &o.vectors[o.used]
	v.Base = &p[0]
	v.SetLen(len(p))
	o.used++
	h.Iovlen++
	m.bytes += len(p)
	m.closed = len(p) < size
	if m.segment == 0 {
		m.segment = size
		o.setSegment(o.n-1, size)
	}
	return true
}

// setSegment marks a message as a GSO batch.
func (o *Outbox) setSegment(i, segment int) {
	binary.NativeEndian.PutUint16(o.out[i].add(&o.headers[i], unix.IPPROTO_UDP, unix.UDP_SEGMENT, 2), uint16(segment))
}

// Send sends all messages. 0 means that all were sent and the Outbox is empty.
// Otherwise it returns the error of the first unsent message, which remains the
// first: call Skip, Split or Send again.
func (o *Outbox) Send(fd int) Errno {
	for o.sent < o.n {
		var r uintptr
		var e Errno
		h := &o.headers[o.sent].Msghdr
		switch {
		case o.n-o.sent == 1 && h.Name == nil && h.Controllen == 0 && h.Iovlen == 1:
			_, _, e = syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(h.Iov.Base)), uintptr(h.Iov.Len), unix.MSG_NOSIGNAL, 0, 0)
			r = 1
		case o.n-o.sent == 1:
			_, _, e = syscall.RawSyscall6(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(h)), unix.MSG_NOSIGNAL, 0, 0, 0)
			r = 1
		default:
			r, _, e = syscall.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&o.headers[o.sent])), uintptr(o.n-o.sent), unix.MSG_NOSIGNAL, 0, 0)
		}
		if e == EINTR {
			continue
		}
		if e != 0 {
			return e
		}
		o.sent += int(r)
	}
	o.Reset()
	return 0
}

// IsGSO reports whether the first message is a GSO batch.
func (o *Outbox) IsGSO() bool { return o.sent < o.n && o.out[o.sent].segment != 0 }

// Skip drops the first message and returns the number of its datagrams.
func (o *Outbox) Skip() (datagrams int) {
	m := &o.out[o.sent]
	datagrams = 1
	if m.segment != 0 {
		datagrams = (m.bytes + m.segment - 1) / m.segment
	}
	o.next()
	return datagrams
}

// next goes on to the message after the first.
func (o *Outbox) next() {
	if o.sent++; o.sent == o.n {
		o.Reset()
	}
}

// Split sends the datagrams of the first message, a GSO batch, one by one. It
// returns the number of lost datagrams and the last error.
func (o *Outbox) Split(fd int) (lost int, e Errno) {
	m, h := &o.out[o.sent], o.headers[o.sent].Msghdr
	segment := m.segment
	h.SetControllen(int(h.Controllen) - unix.CmsgSpace(2)) // the segment size is last
	vectors := unsafe.Slice(h.Iov, int(h.Iovlen))
	var one unix.Iovec
	h.Iov = &one
	h.SetIovlen(1)
	for _, v := range vectors {
		rest := unsafe.Slice(v.Base, int(v.Len))
		for len(rest) > 0 {
			n := min(segment, len(rest))
			one.Base = &rest[0]
			one.SetLen(n)
			rest = rest[n:]
			if _, _, err := syscall.RawSyscall6(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&h)), unix.MSG_NOSIGNAL, 0, 0, 0); err != 0 {
				lost++
				e = err
			}
		}
	}
	o.next()
	return lost, e
}

// Rewind makes Send start with the first message again, for another socket.
func (o *Outbox) Rewind() { o.sent = 0 }

// Reset removes all messages.
func (o *Outbox) Reset() { o.sent, o.n, o.used = 0, 0, 0 }

// udpChecksum returns the checksum of a datagram from its pseudo-header, its header
// with a checksum of 0, and its data.
func udpChecksum(from, to netip.Addr, header, p []byte) uint16 {
	var sum uint64
	add := func(b []byte) {
		for len(b) >= 2 {
			sum += uint64(binary.BigEndian.Uint16(b))
			b = b[2:]
		}
		if len(b) == 1 {
			sum += uint64(b[0]) << 8
		}
	}
	for _, a := range [2]netip.Addr{from, to} {
		add(a.AsSlice())
	}
	sum += unix.IPPROTO_UDP + uint64(len(header)+len(p))
	add(header)
	add(p)
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	if sum == 0xffff {
		return 0xffff // 0 means no checksum
	}
	return ^uint16(sum)
}
