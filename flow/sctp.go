package flow

import (
	"encoding/binary"
	"hash/crc32"
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

// castagnoli is the polynomial of SCTP's checksum.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sctpChecksum is the offset of the checksum in SCTP's common header.
const sctpChecksum = 8

// crcOf returns the checksum of an SCTP packet, computed with its checksum field as 0.
func crcOf(packet []byte) uint32 {
	crc := crc32.Update(0, castagnoli, packet[:sctpChecksum])
	crc = crc32.Update(crc, castagnoli, []byte{0, 0, 0, 0})
	return crc32.Update(crc, castagnoli, packet[sctpChecksum+4:])
}

// completeCRC computes an SCTP packet's checksum if it is 0, because a device or the kernel was to
// compute it later. It returns false if the packet is damaged.
func completeCRC(packet []byte) bool {
	was, is := binary.LittleEndian.Uint32(packet[sctpChecksum:]), crcOf(packet)
	if was == 0 {
		binary.LittleEndian.PutUint32(packet[sctpChecksum:], is)
	}
	return was == 0 || was == is
}
