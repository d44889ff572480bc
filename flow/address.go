package flow

import (
	"encoding/binary"
	"net/netip"
	"syscall"

	"github.com/sluice-proxy/sluice/service"
)

// addressOf returns the form of an address in maps.
func addressOf(a netip.Addr) (k kernelAddress) {
	b := a.As16()
	for i := range k.Word {
		k.Word[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return k
}

// addr undoes addressOf.
func (k kernelAddress) addr() netip.Addr {
	var b [16]byte
	for i, w := range k.Word {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	return netip.AddrFrom16(b).Unmap()
}

// wire converts a port to network byte order, or back.
func wire(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

// tupleOf returns the key of packets from one address to another.
func tupleOf(protocol uint8, from, to netip.AddrPort) kernelTuple {
	return kernelTuple{
		Src: addressOf(from.Addr()), Dst: addressOf(to.Addr()),
		Sport: wire(from.Port()), Dport: wire(to.Port()), Protocol: protocol,
	}
}

// destinationOf returns the key of a destination.
func destinationOf(d service.Destination) kernelDestination {
	return kernelDestination{Addr: addressOf(d.Addr), Port: wire(d.Port), Protocol: numberOf(d.Protocol)}
}

// numberOf returns the number of a protocol in IP headers.
func numberOf(p service.Protocol) uint8 {
	switch p {
	case service.UDP:
		return syscall.IPPROTO_UDP
	case service.SCTP:
		return syscall.IPPROTO_SCTP
	}
	return syscall.IPPROTO_TCP
}

// protocolOf undoes numberOf.
func protocolOf(number uint8) service.Protocol {
	switch number {
	case syscall.IPPROTO_UDP:
		return service.UDP
	case syscall.IPPROTO_SCTP:
		return service.SCTP
	}
	return service.TCP
}
