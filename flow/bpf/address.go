package bpf

import (
	"encoding/binary"
	"net/netip"
	"syscall"

	"github.com/sluice-proxy/sluice/service"
)

// AddressOf returns the form of an address in maps.
func AddressOf(a netip.Addr) (k KernelAddress) {
	b := a.As16()
	for i := range k.Word {
		k.Word[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return k
}

// bitsOf is how many bits of an address in maps a range determines.
func bitsOf(p netip.Prefix) uint32 {
	bits := uint32(p.Bits())
	if p.Addr().Is4() {
		bits += 96
	}
	return bits
}

// OriginOf returns the key of origins for a range of addresses.
func OriginOf(p netip.Prefix) KernelOriginKey {
	return KernelOriginKey{Bits: bitsOf(p), Addr: AddressOf(p.Masked().Addr())}
}

// RangeOf returns the key of ranges for one of a set.
func RangeOf(set KernelSet, p netip.Prefix) KernelRange {
	return KernelRange{Bits: 64 + bitsOf(p), Set: set, Addr: AddressOf(p.Masked().Addr())}
}

// Addr undoes AddressOf.
func (k KernelAddress) Addr() netip.Addr {
	var b [16]byte
	for i, w := range k.Word {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	return netip.AddrFrom16(b).Unmap()
}

// Wire converts a port to network byte order, or back.
func Wire(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

// TupleOf returns the key of packets from one address to another.
func TupleOf(protocol uint8, from, to netip.AddrPort) KernelTuple {
	return KernelTuple{
		Src: AddressOf(from.Addr()), Dst: AddressOf(to.Addr()),
		Sport: Wire(from.Port()), Dport: Wire(to.Port()), Protocol: protocol,
	}
}

// DestinationOf returns the key of a destination.
func DestinationOf(d service.Destination) KernelDestination {
	return KernelDestination{Addr: AddressOf(d.Addr), Port: Wire(d.Port), Protocol: NumberOf(d.Protocol)}
}

// NumberOf returns the number of a protocol in IP headers.
func NumberOf(p service.Protocol) uint8 {
	switch p {
	case service.UDP:
		return syscall.IPPROTO_UDP
	case service.SCTP:
		return syscall.IPPROTO_SCTP
	}
	return syscall.IPPROTO_TCP
}

// ProtocolOf undoes numberOf.
func ProtocolOf(number uint8) service.Protocol {
	switch number {
	case syscall.IPPROTO_UDP:
		return service.UDP
	case syscall.IPPROTO_SCTP:
		return service.SCTP
	}
	return service.TCP
}

// PortOf returns an address and a port of maps, which is in network byte order there.
func PortOf(a KernelAddress, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr(), Wire(port))
}
