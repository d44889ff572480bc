package hostnet

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/service"
)

// onLink is a range whose hosts share a link. Link 0 marks a range inside another
// one that is routed differently, such as a pod's own route.
type onLink struct {
	dst  netip.Prefix // masked
	link int          // interface index
}

// links is an immutable lookup table of all such ranges.
type links struct {
	ranges  []onLink // sorted, each prefix once
	byRange map[netip.Prefix]int
	lengths [2][]int // prefix lengths by service.Family, longest first
}

// newLinks builds the table from the main table's routes. A range without a gateway
// is on its link. A single address has a link of its own.
func newLinks(routes []netlink.Route) *links {
	l := &links{byRange: make(map[netip.Prefix]int)}
	var on []netip.Prefix
	for i := range routes {
		if dst, ok := prefixOf(routes[i].Dst); ok && isOnLink(&routes[i], dst) {
			on = append(on, dst)
		}
	}
	for i := range routes {
		r := &routes[i]
		dst, ok := prefixOf(r.Dst)
		if !ok || !slices.ContainsFunc(on, func(p netip.Prefix) bool { return p.Bits() <= dst.Bits() && p.Contains(dst.Addr()) }) {
			continue
		}
		link := 0
		if isOnLink(r, dst) {
			link = r.LinkIndex
		}
		l.ranges = append(l.ranges, onLink{dst, link})
	}
	slices.SortFunc(l.ranges, func(a, b onLink) int {
		return cmp.Or(a.dst.Compare(b.dst), cmp.Compare(a.link, b.link))
	})
	l.ranges = slices.CompactFunc(l.ranges, func(a, b onLink) bool { return a.dst == b.dst })
	for _, r := range l.ranges {
		l.byRange[r.dst] = r.link
		of := &l.lengths[service.FamilyOf(r.dst.Addr())]
		if !slices.Contains(*of, r.dst.Bits()) {
			*of = append(*of, r.dst.Bits())
		}
	}
	for f := range l.lengths {
		slices.SortFunc(l.lengths[f], func(a, b int) int { return b - a })
	}
	return l
}

func (l *links) equal(o *links) bool {
	return l == o || l != nil && o != nil && slices.Equal(l.ranges, o.ranges)
}

func isOnLink(r *netlink.Route, dst netip.Prefix) bool {
	return r.Gw == nil && r.Via == nil && len(r.MultiPath) == 0 && r.LinkIndex != 0 &&
		dst.Bits() > 0 && !dst.IsSingleIP() && !dst.Addr().IsMulticast() && !dst.Addr().IsLinkLocalUnicast()
}

// of returns the link that an address shares with others, or 0.
func (l *links) of(a netip.Addr) int {
	for _, bits := range l.lengths[service.FamilyOf(a)] {
		p, err := a.Prefix(bits)
		if err != nil {
			return 0
		}
		if link, ok := l.byRange[p]; ok {
			return link
		}
	}
	return 0
}

// Link is a range of hosts that reach each other without this node. Hosts of ranges with
// one number do. Number 0 excepts a range from a wider one.
type Link struct {
	Range  netip.Prefix
	Number int
}

// Links returns the ranges that SameLink goes by. The longest range of an address counts.
func (s State) Links() (all []Link) {
	if s.links != nil {
		for _, r := range s.links.ranges {
			all = append(all, Link{Range: r.dst, Number: r.link})
		}
	}
	return all
}

// SameLink reports whether two hosts reach each other without this node: both are
// in the range of one interface, such as a bridge of pods, and neither has a route
// of its own. Their packets to each other do not pass this node's IP layer.
// SameLink takes no lock and does not allocate.
func (s State) SameLink(a, b netip.Addr) bool {
	if s.links == nil {
		return false
	}
	link := s.links.of(a)
	return link != 0 && link == s.links.of(b)
}
