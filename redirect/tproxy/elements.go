package tproxy

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// elements are lists of set elements, one for each set.
type elements [kinds][versions][]nftables.SetElement

func versionOf(a netip.Addr) version {
	if a.Is4() {
		return v4
	}
	return v6
}

func (e *elements) steer(d service.Destination, t redirect.Target) {
	port := binary.BigEndian.AppendUint16(nil, t.Port)
	v := versionOf(d.Addr)
	e[steer][v] = append(e[steer][v], nftables.SetElement{Key: destinationKey(d), Val: port})
}

func (e *elements) destination(k kind, d service.Destination) {
	v := versionOf(d.Addr)
	e[k][v] = append(e[k][v], nftables.SetElement{Key: destinationKey(d)})
}

func (e *elements) cluster(a netip.Addr) {
	v := versionOf(a)
	e[cluster][v] = append(e[cluster][v], nftables.SetElement{Key: a.AsSlice()})
}

// local adds a range: its first address, and the one after its last as an
// interval's end. A range up to the very last address has no end.
func (e *elements) local(p netip.Prefix) {
	v := versionOf(p.Addr())
	e[local][v] = append(e[local][v], nftables.SetElement{Key: p.Masked().Addr().AsSlice()})
	if end := lastAddr(p).Next(); end.IsValid() {
		e[local][v] = append(e[local][v], nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
	}
}

// planElements gives everything that a plan puts into the sets. Plan.Local is
// a cover.
func planElements(p *redirect.Plan) *elements {
	e := &elements{}
	for d, t := range p.Steer {
		e.steer(d, t)
	}
	for d := range p.Refuse {
		e.destination(refuse, d)
	}
	for d := range p.Silent {
		e.destination(silent, d)
	}
	for a := range p.ClusterIPs {
		e.cluster(a)
	}
	for _, l := range p.Local {
		e.local(l)
	}
	return e
}

// destinationKey joins address, protocol and port, each padded to four bytes.
func destinationKey(d service.Destination) []byte {
	key := make([]byte, 0, 24)
	if d.Addr.Is4() {
		a := d.Addr.As4()
		key = append(key, a[:]...)
	} else {
		a := d.Addr.As16()
		key = append(key, a[:]...)
	}
	return append(key, protocolNumber(d.Protocol), 0, 0, 0, byte(d.Port>>8), byte(d.Port), 0, 0)
}

// parseDestinationKey is destinationKey backwards.
func parseDestinationKey(key []byte) (service.Destination, bool) {
	n := len(key) - 8
	if n < 0 {
		return service.Destination{}, false
	}
	a, ok := netip.AddrFromSlice(key[:n])
	if !ok {
		return service.Destination{}, false
	}
	return service.Destination{Addr: a, Protocol: protocolOf(key[n]), Port: binary.BigEndian.Uint16(key[n+4:])}, true
}

var protocolNumbers = map[service.Protocol]byte{service.TCP: 6, service.UDP: 17, service.SCTP: protoSCTP}

func protocolNumber(p service.Protocol) byte { return protocolNumbers[p] }

func protocolOf(number byte) service.Protocol {
	for p, n := range protocolNumbers {
		if n == number {
			return p
		}
	}
	return 0
}

// lastAddr gives the last address of a range.
func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
