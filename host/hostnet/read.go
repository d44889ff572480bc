package hostnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
)

// attempts bounds how often a list is read again because it changed during the
// dump.
const attempts = 5

// Read returns the current State.
func (w *Watcher) Read() (State, error) {
	var s State
	var err error
	for range attempts {
		if s, err = w.read(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err == nil {
		w.last = s
	}
	return s, err
}

func (w *Watcher) read() (State, error) {
	var s State
	addrs, err := w.nl.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return s, fmt.Errorf("addresses of interfaces: %w", err)
	}
	for _, a := range addrs {
		if a.IPNet == nil {
			continue
		}
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			s.Addresses = append(s.Addresses, ip.Unmap())
		}
		s.Broadcasts = append(s.Broadcasts, broadcasts(&a)...)
	}
	for _, list := range []*[]netip.Addr{&s.Addresses, &s.Broadcasts} {
		slices.SortFunc(*list, netip.Addr.Compare)
		*list = slices.Compact(*list)
	}
	main, err := w.mainTable()
	if err != nil {
		return s, err
	}
	s.links = newLinks(main)
	if w.opts.Pods == nil {
		return s, nil
	}
	routes, err := w.routes(main)
	if err != nil {
		return s, err
	}
	for _, a := range s.Addresses { // the local table takes precedence
		routes = append(routes, route{dst: netip.PrefixFrom(a, a.BitLen()), metric: -1})
	}
	s.PodRanges = podRanges(routes)
	return s, nil
}

// broadcasts returns the broadcast addresses of an address: the last one of its
// range, which the kernel adds itself, and the configured one.
func broadcasts(a *netlink.Addr) (list []netip.Addr) {
	ip := a.IP.To4()
	if ip == nil {
		return nil
	}
	bits, _ := a.Mask.Size()
	if bits < 31 {
		last := make(net.IP, len(ip))
		for i := range ip {
			last[i] = ip[i] | ^a.Mask[i]
		}
		list = append(list, netip.AddrFrom4([4]byte(last)))
	}
	if set, ok := netip.AddrFromSlice(a.Broadcast.To4()); ok && !set.IsUnspecified() && bits < 31 {
		list = append(list, set)
	}
	return list
}

// mainTable returns the routes of the main table.
func (w *Watcher) mainTable() ([]netlink.Route, error) {
	var all []netlink.Route
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		main := &netlink.Route{Table: syscall.RT_TABLE_MAIN}
		list, err := w.nl.RouteListFiltered(family, main, netlink.RT_FILTER_TABLE)
		// Without any route yet, as in a namespace whose lo is down, the kernel has no such
		// table.
		if err != nil && !errors.Is(err, syscall.ENOENT) {
			return nil, fmt.Errorf("routes: %w", err)
		}
		all = append(all, list...)
	}
	return all, nil
}

// routes returns the routes that matter for pod ranges.
func (w *Watcher) routes(main []netlink.Route) ([]route, error) {
	links, err := w.nl.LinkList()
	if err != nil {
		return nil, fmt.Errorf("interfaces: %w", err)
	}
	pods := make(map[int]bool)
	for _, l := range links {
		if w.opts.Pods(l.Attrs().Name) {
			pods[l.Attrs().Index] = true
		}
	}
	if len(pods) == 0 {
		return nil, nil
	}
	var out []route
	for i := range main {
		if r, ok := newRoute(&main[i], pods); ok {
			out = append(out, r)
		}
	}
	return out, nil
}

// newRoute converts a route. It returns false for default routes and those of
// link-local and multicast addresses, which do not identify pods, and for routes of
// type throw, which do not lead anywhere.
func newRoute(r *netlink.Route, pods map[int]bool) (route, bool) {
	dst, ok := prefixOf(r.Dst)
	if !ok || dst.Bits() == 0 || dst.Addr().IsMulticast() || dst.Addr().Is6() && dst.Addr().IsLinkLocalUnicast() ||
		r.Tos != 0 || r.Type == syscall.RTN_THROW || r.Flags&syscall.RTNH_F_DEAD != 0 {
		return route{}, false
	}
	out := route{dst: dst, metric: r.Priority}
	if r.Type == syscall.RTN_UNICAST {
		out.pods = pods[r.LinkIndex] || slices.ContainsFunc(r.MultiPath, func(n *netlink.NexthopInfo) bool { return pods[n.LinkIndex] })
	}
	return out, true
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if !ok || bits == 0 {
		return netip.Prefix{}, false
	}
	if bits == net.IPv4len*8 {
		a = a.Unmap()
	}
	return netip.PrefixFrom(a, ones).Masked(), true
}
