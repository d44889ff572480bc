package flow

import (
	"encoding/binary"
	"net/netip"
	"syscall"
)

// reset is a TCP segment without data and link header, most with RST.
type reset struct {
	from, to      netip.AddrPort
	sequence, ack uint32
	flags         byte
}

// append appends the packet.
func (r *reset) append(b []byte) []byte {
	at := len(b)
	b = appendIP(b, r.from.Addr(), r.to.Addr(), syscall.IPPROTO_TCP, tcpHeader)
	tcp := len(b)
	b = binary.BigEndian.AppendUint16(b, r.from.Port())
	b = binary.BigEndian.AppendUint16(b, r.to.Port())
	b = binary.BigEndian.AppendUint32(b, r.sequence)
	b = binary.BigEndian.AppendUint32(b, r.ack)
	b = append(b, tcpHeader/4<<4, r.flags, 0, 0, 0, 0, 0, 0)
	binary.BigEndian.PutUint16(b[tcp+tcpChecksum:], checksum(pseudoSum(b[at:], r.from.Addr().Is6(), syscall.IPPROTO_TCP, tcpHeader), b[tcp:]))
	return b
}

// abort is an SCTP packet with an ABORT, without a link header.
type abort struct {
	from, to netip.AddrPort
	tag      uint32 // that the receiver expects
}

// append appends the packet.
func (a *abort) append(b []byte) []byte {
	b = appendIP(b, a.from.Addr(), a.to.Addr(), syscall.IPPROTO_SCTP, sctpHeader+chunkHeader)
	at := len(b)
	b = binary.BigEndian.AppendUint16(b, a.from.Port())
	b = binary.BigEndian.AppendUint16(b, a.to.Port())
	b = binary.BigEndian.AppendUint32(b, a.tag)
	b = append(b, 0, 0, 0, 0, chunkAbort, 0, 0, chunkHeader)
	binary.LittleEndian.PutUint32(b[at+sctpChecksum:], crcOf(b[at:]))
	return b
}

// appendIP appends an IP header for a packet of a protocol, whose length has one byte.
func appendIP(b []byte, from, to netip.Addr, protocol, length byte) []byte {
	const ttl = 64
	at := len(b)
	if from.Is6() {
		b = append(b, 0x60, 0, 0, 0, 0, length, protocol, ttl)
	} else {
		b = append(b, 0x45, 0, 0, 20+length, 0, 0, 0x40, 0, ttl, protocol, 0, 0)
	}
	b = append(b, from.AsSlice()...)
	b = append(b, to.AsSlice()...)
	if !from.Is6() {
		binary.BigEndian.PutUint16(b[at+10:], ^folded(sum(0, b[at:])))
	}
	return b
}
