package flow

import (
	"encoding/binary"
	"net/netip"
	"syscall"
)

// Types of SCTP chunks.
const (
	chunkInit    = 1
	chunkInitAck = 2
	chunkAbort   = 6
)

const (
	sctpHeader  = 12
	chunkHeader = 4
	// initLength is the shortest SCTP packet with an INIT.
	initLength = sctpHeader + 20
)

// initiateTag reads the initiate tag of a packet with an INIT or an INIT ACK.
func initiateTag(packet []byte) (tag uint32, ok bool) {
	if len(packet) < initLength || packet[sctpHeader] != chunkInit && packet[sctpHeader] != chunkInitAck {
		return 0, false
	}
	return binary.BigEndian.Uint32(packet[sctpHeader+chunkHeader:]), true
}

// streamsOf returns the streams that a packet with an INIT asks for, each way.
func streamsOf(packet []byte) (out, in uint16) {
	b := packet[sctpHeader+chunkHeader+8:]
	return binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
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
