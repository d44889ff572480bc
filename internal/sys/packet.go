package sys

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// markControl is a control message with SO_MARK.
type markControl struct {
	header unix.Cmsghdr
	mark   uint32
	_      [4]byte
}

// PacketOutbox collects frames to send by interfaces, each with a mark of its own. It is
// not safe for concurrent use.
type PacketOutbox struct {
	messages []mmsghdr
	vectors  []unix.Iovec
	names    []unix.RawSockaddrLinklayer
	marks    []markControl
	used     int
}

// NewPacketOutbox creates an outbox for a number of frames.
func NewPacketOutbox(slots int) *PacketOutbox {
	o := &PacketOutbox{
		messages: make([]mmsghdr, slots),
		vectors:  make([]unix.Iovec, slots),
		names:    make([]unix.RawSockaddrLinklayer, slots),
		marks:    make([]markControl, slots),
	}
	for i := range o.messages {
		m, c := &o.messages[i], &o.marks[i]
		m.Iov = &o.vectors[i]
		m.SetIovlen(1)
		m.Name = (*byte)(unsafe.Pointer(&o.names[i]))
		m.Namelen = uint32(unsafe.Sizeof(o.names[i]))
		c.header.Level, c.header.Type = unix.SOL_SOCKET, unix.SO_MARK
		c.header.SetLen(unix.CmsgLen(4))
		m.Control = (*byte)(unsafe.Pointer(c))
		m.SetControllen(unix.CmsgSpace(4))
	}
	return o
}

// Len returns the number of frames.
func (o *PacketOutbox) Len() int { return o.used }

// Full reports whether no frame may be added.
func (o *PacketOutbox) Full() bool { return o.used == len(o.messages) }

// Add adds a frame, which begins with the interface's link header, if it has any. It must
// not change before Clear.
func (o *PacketOutbox) Add(ifindex int, ipv6 bool, mark uint32, frame []byte) {
	i := o.used
	o.used++
	o.vectors[i].Base = &frame[0]
	o.vectors[i].SetLen(len(frame))
	ethertype := uint16(unix.ETH_P_IP)
	if ipv6 {
		ethertype = unix.ETH_P_IPV6
	}
	o.names[i] = unix.RawSockaddrLinklayer{Family: unix.AF_PACKET, Ifindex: int32(ifindex)}
	binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(&o.names[i].Protocol))[:], ethertype)
	o.marks[i].mark = mark
}

// Send sends the frames from first on, and returns how many were sent. An error is about
// the one after those.
func (o *PacketOutbox) Send(fd, first int) (int, Errno) {
	m := o.messages[first:o.used]
	r, _, e := syscall.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), 0, 0, 0)
	return result(r, e)
}

// Clear empties the outbox.
func (o *PacketOutbox) Clear() {
	for i := range o.used {
		o.vectors[i].Base = nil
	}
	o.used = 0
}

// PacketSender opens a socket that sends frames and receives none. It needs CAP_NET_RAW.
func PacketSender() (int, error) {
	fd, e := socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
	if e != 0 {
		return -1, fmt.Errorf("packet socket: %w", e)
	}
	const buffer = 8 << 20
	setInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, buffer)
	return fd, nil
}

// RawSender opens a socket that sends IP packets with headers of their own, from any
// source, and receives none. It needs CAP_NET_RAW.
func RawSender(ipv6 bool) (int, error) {
	fd, e := socket(familyOf(ipv6), unix.SOCK_RAW, unix.IPPROTO_RAW)
	if e != 0 {
		return -1, fmt.Errorf("raw socket: %w", e)
	}
	if ipv6 {
		const headerIncluded = 36 // IPV6_HDRINCL
		if e := setInt(fd, unix.IPPROTO_IPV6, headerIncluded, 1); e != 0 {
			Close(fd)
			return -1, fmt.Errorf("raw socket: %w", e)
		}
	}
	return fd, nil
}

// SendRaw sends an IP packet by a socket of RawSender.
func SendRaw(fd int, to netip.Addr, packet []byte) Errno {
	var s sockaddr
	n := s.put(netip.AddrPortFrom(to, 0))
	_, _, e := syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&packet[0])), uintptr(len(packet)), 0, uintptr(unsafe.Pointer(&s)), n)
	return e
}
