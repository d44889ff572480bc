package hostnet

import (
	"cmp"
	"net/netip"
	"slices"
	"sort"
)

// route is what counts of a route: where it leads to, and whether that is a
// pod's interface. Of two to one destination, the lower metric counts.
type route struct {
	dst    netip.Prefix // masked
	metric int
	pods   bool
}

// podRanges returns the ranges of addresses whose route, the longest that matches,
// leads to pods. They are sorted and lie apart.
func podRanges(routes []route) []netip.Prefix {
	slices.SortFunc(routes, func(a, b route) int {
		return cmp.Or(a.dst.Compare(b.dst), cmp.Compare(a.metric, b.metric), -boolCompare(a.pods, b.pods))
	})
	routes = slices.CompactFunc(routes, func(a, b route) bool { return a.dst == b.dst })
	at := sort.Search(len(routes), func(i int) bool { return routes[i].dst.Addr().Is6() })
	out := carve(nil, netip.PrefixFrom(netip.IPv4Unspecified(), 0), false, routes[:at])
	return carve(out, netip.PrefixFrom(netip.IPv6Unspecified(), 0), false, routes[at:])
}

// carve appends the ranges of a region that lead to pods. Where no route says
// otherwise, it is pods that tells. The routes are sorted and lie within.
func carve(out []netip.Prefix, region netip.Prefix, pods bool, routes []route) []netip.Prefix {
	if len(routes) > 0 && routes[0].dst == region {
		pods, routes = routes[0].pods, routes[1:]
	}
	if !slices.ContainsFunc(routes, func(r route) bool { return r.pods != pods }) {
		if pods {
			out = append(out, region)
		}
		return out
	}
	lower, upper := halves(region)
	at := sort.Search(len(routes), func(i int) bool { return !routes[i].dst.Addr().Less(upper.Addr()) })
	out = carve(out, lower, pods, routes[:at])
	return carve(out, upper, pods, routes[at:])
}

func halves(p netip.Prefix) (lower, upper netip.Prefix) {
	bits := p.Bits()
	b := p.Addr().AsSlice()
	b[bits/8] |= 0x80 >> (bits % 8)
	high, _ := netip.AddrFromSlice(b)
	return netip.PrefixFrom(p.Addr(), bits+1), netip.PrefixFrom(high, bits+1)
}

func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}
