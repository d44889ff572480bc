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

// elementsOf returns what the changes from one plan to another put into the sets and
// take out of them, but for linger and ownPort.
func elementsOf(c *redirect.Changes, from, to *redirect.Plan) (add, drop elements) {
	for _, d := range c.Unsteer {
		drop.destination(steerKind(from, d), d)
	}
	for _, s := range c.Steer {
		if s.Replaces {
			drop.destination(steerKind(from, s.Destination), s.Destination)
		}
		add.add(steerKind(to, s.Destination), s.Destination.Addr, nftables.SetElement{
			Key: destinationKey(s.Destination), Val: binary.BigEndian.AppendUint16(nil, s.Target.Port)})
	}
	eachOf(refuse, &c.Refuse, &add, &drop, (*elements).destination)
	eachOf(silent, &c.Silent, &add, &drop, (*elements).destination)
	eachOf(own, &c.Own, &add, &drop, (*elements).destination)
	eachOf(cluster, &c.ClusterIPs, &add, &drop, (*elements).address)
	eachOf(foreign, &c.NonLocal, &add, &drop, (*elements).address)
	eachOf(node, &c.Node, &add, &drop, (*elements).address)
	eachOf(local, &c.Local, &add, &drop, func(e *elements, _ kind, p netip.Prefix) { e.local(p) })
	return add, drop
}

// eachOf puts what comes and what goes into the lists of a set.
func eachOf[K redirect.Key](k kind, d *redirect.Delta[K], add, drop *elements, put func(*elements, kind, K)) {
	for _, x := range d.Add {
		put(add, k, x)
	}
	for _, x := range d.Drop {
		put(drop, k, x)
	}
}

// steerKind returns the map that holds a plan's destination.
func steerKind(p *redirect.Plan, d service.Destination) kind {
	if p.NonLocal.Has(d.Addr) {
		return take
	}
	return steer
}

func (e *elements) add(k kind, a netip.Addr, x nftables.SetElement) {
	v := service.FamilyOf(a)
	e[k][v] = append(e[k][v], x)
}

func (e *elements) destination(k kind, d service.Destination) {
	e.add(k, d.Addr, nftables.SetElement{Key: destinationKey(d)})
}

func (e *elements) address(k kind, a netip.Addr) {
	e.add(k, a, nftables.SetElement{Key: a.AsSlice()})
}

// local adds a range: its first address, and the one after its last as an
// interval's end. A range up to the very last address has no end.
func (e *elements) local(p netip.Prefix) {
	e.address(local, p.Masked().Addr())
	if end := lastAddr(p).Next(); end.IsValid() {
		e.add(local, end, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
	}
}

// portCounts count how many destinations have a port.
type portCounts [versions]map[uint16]int

// change gives the ports that come to be, or are no longer, those of any
// destination.
func (c portCounts) change(d *redirect.Delta[service.Destination], add, drop *elements) {
	before := portCounts{{}, {}}
	touch := func(list []service.Destination, by int) {
		for _, d := range list {
			v := service.FamilyOf(d.Addr)
			if _, seen := before[v][d.Port]; !seen {
				before[v][d.Port] = c[v][d.Port]
			}
			if c[v][d.Port] += by; c[v][d.Port] == 0 {
				delete(c[v], d.Port)
			}
		}
	}
	touch(d.Drop, -1)
	touch(d.Add, 1)
	for v := range versions {
		for port, was := range before[v] {
			list := add
			if now := c[v][port]; now == 0 && was > 0 {
				list = drop
			} else if now == 0 || was > 0 {
				continue
			}
			list[ownPort][v] = append(list[ownPort][v], nftables.SetElement{Key: binary.BigEndian.AppendUint16(nil, port)})
		}
	}
}

// destinationKey joins address, protocol and port, each padded to four bytes.
func destinationKey(d service.Destination) []byte {
	return append(d.Addr.AsSlice(), redirect.ProtocolNumber(d.Protocol), 0, 0, 0, byte(d.Port>>8), byte(d.Port), 0, 0)
}

// lastAddr returns the last address of a range.
func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
