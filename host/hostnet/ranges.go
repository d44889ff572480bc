package hostnet

import (
	"cmp"
	"net/netip"
	"slices"
	"sort"
)

// route is a destination and whether it leads to a pod interface. Of two routes to
// one destination, the lower metric wins.
type route struct {
	dst    netip.Prefix // masked
	metric int
	pods   bool
}

// podRanges returns the ranges whose longest matching route leads to pods, sorted
// and disjoint.
func podRanges(routes []route) []netip.Prefix {
	slices.SortFunc(routes, func(a, b route) int {
		return cmp.Or(a.dst.Compare(b.dst), cmp.Compare(a.metric, b.metric), -boolCompare(a.pods, b.pods))
	})
	routes = slices.CompactFunc(routes, func(a, b route) bool { return a.dst == b.dst })
	at := sort.Search(len(routes), func(i int) bool { return routes[i].dst.Addr().Is6() })
	out := carve(nil, netip.PrefixFrom(netip.IPv4Unspecified(), 0), false, routes[:at])
	return carve(out, netip.PrefixFrom(netip.IPv6Unspecified(), 0), false, routes[at:])
}

// carve appends the parts of a region that lead to pods. pods applies to the parts
// without a route of their own. The routes are sorted and lie within the region.
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
