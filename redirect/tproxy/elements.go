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

func (e *elements) steer(k kind, d service.Destination, t redirect.Target) {
	port := binary.BigEndian.AppendUint16(nil, t.Port)
	v := versionOf(d.Addr)
	e[k][v] = append(e[k][v], nftables.SetElement{Key: destinationKey(d), Val: port})
}

// steerKind gives the map that holds a plan's destination.
func steerKind(p *redirect.Plan, d service.Destination) kind {
	if p.Foreign.Has(d.Addr) {
		return take
	}
	return steer
}

func (e *elements) destination(k kind, d service.Destination) {
	v := versionOf(d.Addr)
	e[k][v] = append(e[k][v], nftables.SetElement{Key: destinationKey(d)})
}

func (e *elements) address(k kind, a netip.Addr) {
	v := versionOf(a)
	e[k][v] = append(e[k][v], nftables.SetElement{Key: a.AsSlice()})
}

func (e *elements) ownPort(v version, port uint16) {
	e[ownPort][v] = append(e[ownPort][v], nftables.SetElement{Key: binary.BigEndian.AppendUint16(nil, port)})
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

// planElements gives everything that a plan and the flows that it leaves alone
// put into the sets.
func planElements(p *redirect.Plan, flows map[flow]struct{}) *elements {
	e := &elements{}
	for k := range flows {
		e.flow(k)
	}
	for d, t := range p.Steer.All() {
		e.steer(steerKind(p, d), d, t)
	}
	for d := range p.Refuse.Keys() {
		e.destination(refuse, d)
	}
	for d := range p.Silent.Keys() {
		e.destination(silent, d)
	}
	for a := range p.ClusterIPs.Keys() {
		e.address(cluster, a)
	}
	for l := range p.Local.Keys() {
		e.local(l)
	}
	for a := range p.Foreign.Keys() {
		e.address(foreign, a)
	}
	for d := range p.Own.Keys() {
		e.destination(own, d)
	}
	for a := range p.Node.Keys() {
		e.address(node, a)
	}
	for v, ports := range countPorts(p.Own) {
		for port := range ports {
			e.ownPort(version(v), port)
		}
	}
	return e
}

// portCounts tell how many destinations have a port.
type portCounts [versions]map[uint16]int

func countPorts(destinations redirect.Set[service.Destination]) portCounts {
	c := portCounts{{}, {}}
	for d := range destinations.Keys() {
		c[versionOf(d.Addr)][d.Port]++
	}
	return c
}

// change gives the ports that come to be, or are no longer, those of any
// destination.
func (c portCounts) change(add, drop []service.Destination) (added, dropped elements) {
	before := portCounts{{}, {}}
	touch := func(d service.Destination, n int) {
		v := versionOf(d.Addr)
		if _, seen := before[v][d.Port]; !seen {
			before[v][d.Port] = c[v][d.Port]
		}
		if c[v][d.Port] += n; c[v][d.Port] == 0 {
			delete(c[v], d.Port)
		}
	}
	for _, d := range drop {
		touch(d, -1)
	}
	for _, d := range add {
		touch(d, 1)
	}
	for v := range versions {
		for port, was := range before[v] {
			switch now := c[v][port]; {
			case was == 0 && now > 0:
				added.ownPort(v, port)
			case was > 0 && now == 0:
				dropped.ownPort(v, port)
			}
		}
	}
	return added, dropped
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
	return append(key, redirect.ProtocolNumber(d.Protocol), 0, 0, 0, byte(d.Port>>8), byte(d.Port), 0, 0)
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
