package capture

import (
	"encoding/binary"
	"net/netip"
)

// IP protocols.
const (
	icmp   = 1
	tcp    = 6
	udp    = 17
	icmpv6 = 58
	sctp   = 132
)

// leg names the packets between two sockets, in both directions: a is the lower one.
type leg struct {
	protocol uint8
	a, b     netip.AddrPort
}

func legOf(protocol uint8, a, b netip.AddrPort) leg {
	if a.Compare(b) > 0 {
		a, b = b, a
	}
	return leg{protocol, a, b}
}

// parse returns the leg of an IP packet, which may be cut, or of the packet that an ICMP
// error quotes; false if it has no ports. Fragments but the first have none.
func parse(p []byte) (leg, bool) { return parseQuoting(p, true) }

func parseQuoting(p []byte, quotes bool) (leg, bool) {
	protocol, source, destination, p, ok := network(p)
	if !ok {
		return leg{}, false
	}
	switch protocol {
	case tcp, udp, sctp:
		if len(p) < 4 {
			return leg{}, false
		}
		return legOf(protocol, netip.AddrPortFrom(source, binary.BigEndian.Uint16(p)), netip.AddrPortFrom(destination, binary.BigEndian.Uint16(p[2:]))), true
	case icmp, icmpv6:
		const header = 8
		if quotes && len(p) > header && isError(protocol, p[0]) {
			return parseQuoting(p[header:], false)
		}
	}
	return leg{}, false
}

// isError reports whether ICMP messages of a type quote a packet.
func isError(protocol, kind uint8) bool {
	if protocol == icmpv6 {
		return kind >= 1 && kind <= 4
	}
	return kind == 3 || kind == 5 || kind == 11 || kind == 12
}

// network reads an IP header, and returns what follows it.
func network(p []byte) (protocol uint8, source, destination netip.Addr, rest []byte, ok bool) {
	switch {
	case len(p) >= 20 && p[0]>>4 == 4:
		header := int(p[0]&15) * 4
		if header < 20 || len(p) < header || binary.BigEndian.Uint16(p[6:])&0x1fff != 0 {
			return 0, source, destination, nil, false
		}
		return p[9], netip.AddrFrom4([4]byte(p[12:])), netip.AddrFrom4([4]byte(p[16:])), p[header:], true
	case len(p) >= 40 && p[0]>>4 == 6:
		protocol, source, destination = p[6], netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:]))
		protocol, rest, ok = skipExtensions(protocol, p[40:])
		return protocol, source, destination, rest, ok
	}
	return 0, source, destination, nil, false
}

// skipExtensions passes over the extension headers of IPv6 (RFC 8200).
func skipExtensions(protocol uint8, p []byte) (uint8, []byte, bool) {
	const hopByHop, routing, fragment, destinationOptions = 0, 43, 44, 60
	for {
		length := 8
		switch protocol {
		case hopByHop, routing, destinationOptions:
			if len(p) < 2 {
				return 0, nil, false
			}
			length = (int(p[1]) + 1) * 8
		case fragment:
			if len(p) < 4 || binary.BigEndian.Uint16(p[2:])&^7 != 0 {
				return 0, nil, false
			}
		default:
			return protocol, p, true
		}
		if len(p) < length {
			return 0, nil, false
		}
		protocol, p = p[0], p[length:]
	}
}
