package flow

import (
	"encoding/binary"
	"net/netip"
	"syscall"
)

// tcpHeader is the length of a TCP header without options.
const tcpHeader = 20

// Offsets of checksums in the transport headers.
const (
	tcpChecksum = 16
	udpChecksum = 6
)

// TCP flags.
const (
	flagSYN = 2
	flagRST = 4
	flagACK = 16
)

// frame is the first packet of a flow as BPF hands it up: not fragmented, with an optional
// link header.
type frame struct {
	data      []byte
	ip        int // offset of the IP header
	transport int // of the transport header
	end       int // of what follows the packet, such as padding
	ipv6      bool
	protocol  uint8
	client    netip.AddrPort // source
	vip       netip.AddrPort // destination
	sequence  uint32         // of TCP; SCTP: the initiate tag; UDP: length and checksum
	ack       uint32
}

// parseFrame reads a frame with a link header of some length.
func parseFrame(data []byte, link int) (f frame, ok bool) {
	f = frame{data: data, ip: link}
	if link < 0 || len(data) < link+20 {
		return f, false
	}
	var src, dst netip.Addr
	switch ip := data[link:]; ip[0] >> 4 {
	case 4:
		f.transport = link + int(ip[0]&15)*4
		f.end = link + int(binary.BigEndian.Uint16(ip[2:]))
		f.protocol = ip[9]
		if f.transport < link+20 || binary.BigEndian.Uint16(ip[6:])&0x3fff != 0 {
			return f, false
		}
		src, dst = netip.AddrFrom4([4]byte(ip[12:])), netip.AddrFrom4([4]byte(ip[16:]))
	case 6:
		if len(ip) < 40 {
			return f, false
		}
		f.ipv6 = true
		f.end = link + 40 + int(binary.BigEndian.Uint16(ip[4:]))
		if f.protocol, f.transport, ok = skipOptions(data, link); !ok {
			return f, false
		}
		src, dst = netip.AddrFrom16([16]byte(ip[8:])), netip.AddrFrom16([16]byte(ip[24:]))
	default:
		return f, false
	}
	var least int
	switch f.protocol {
	case syscall.IPPROTO_TCP:
		least = tcpHeader
	case syscall.IPPROTO_UDP:
		least = 8
	case syscall.IPPROTO_SCTP:
		least = initLength
	default:
		return f, false
	}
	if f.end > len(data) || f.transport+least > f.end {
		return f, false
	}
	t := data[f.transport:]
	f.client = netip.AddrPortFrom(src, binary.BigEndian.Uint16(t))
	f.vip = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(t[2:]))
	switch f.protocol {
	case syscall.IPPROTO_TCP:
		f.sequence, f.ack = binary.BigEndian.Uint32(t[4:]), binary.BigEndian.Uint32(t[8:])
	case syscall.IPPROTO_UDP:
		f.sequence = binary.BigEndian.Uint32(t[4:])
	case syscall.IPPROTO_SCTP:
		f.sequence, ok = initiateTag(t)
		return f, ok
	}
	return f, true
}

// skipOptions returns the transport protocol of an IPv6 packet, and where its header is.
func skipOptions(data []byte, link int) (protocol uint8, at int, ok bool) {
	next, at := data[link+6], link+40
	for range 3 {
		if next != syscall.IPPROTO_HOPOPTS && next != syscall.IPPROTO_DSTOPTS {
			break
		}
		if at+2 > len(data) {
			return 0, 0, false
		}
		next, at = data[at], at+(int(data[at+1])+1)*8
	}
	return next, at, true
}

// complete makes the transport checksum complete if a device was to do so
// (CHECKSUM_PARTIAL, as between interfaces of one host). It returns false if the packet
// is damaged.
func (f *frame) complete() bool {
	if f.protocol == syscall.IPPROTO_SCTP {
		return completeCRC(f.data[f.transport:f.end])
	}
	at := f.transport + tcpChecksum
	if f.protocol == syscall.IPPROTO_UDP {
		at = f.transport + udpChecksum
	}
	if at+2 > f.end {
		return false
	}
	was := binary.BigEndian.Uint16(f.data[at:])
	if f.protocol == syscall.IPPROTO_UDP && was == 0 {
		return !f.ipv6
	}
	segment := f.data[f.transport:f.end]
	pseudo := pseudoSum(f.data[f.ip:], f.ipv6, f.protocol, len(segment))
	if folded(sum(pseudo, segment)) == 0xffff {
		return true
	}
	if folded(pseudo) != was {
		return false
	}
	f.data[at], f.data[at+1] = 0, 0
	binary.BigEndian.PutUint16(f.data[at:], checksum(pseudo, segment))
	return true
}

// payload returns how many bytes a datagram brings.
func (f *frame) payload() int { return f.end - f.transport - 8 }

// checksum returns the checksum of a segment whose checksum field is 0. In UDP 0 means "none", so
// 0xffff replaces a sum of 0.
func checksum(pseudo uint32, segment []byte) uint16 {
	if c := ^folded(sum(pseudo, segment)); c != 0 {
		return c
	}
	return 0xffff
}

// pseudoSum returns the sum of the pseudo header of a packet with an IP header.
func pseudoSum(ip []byte, ipv6 bool, protocol uint8, length int) uint32 {
	addresses := ip[12:20]
	if ipv6 {
		addresses = ip[8:40]
	}
	return sum(uint32(protocol)+uint32(length), addresses)
}

func sum(s uint32, b []byte) uint32 {
	for ; len(b) >= 2; b = b[2:] {
		s += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
	}
	return s
}

func folded(s uint32) uint16 {
	s = s>>16 + s&0xffff
	return uint16(s>>16 + s&0xffff)
}
