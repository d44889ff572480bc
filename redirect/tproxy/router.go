package tproxy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/sluice-proxy/sluice/redirect"
)

// router keeps the routes that make services' addresses local. They are in the
// kernel's table local, with a protocol number of ours: the kernel sends
// nothing from an IPv4 address that is not in that table, so that with a table
// of our own, ICMP port unreachable would not reach clients on this node. It
// also needs no policy routing, whose rules make each lookup of the node slower.
type router struct {
	opts Options
	nl   *netlink.Handle
	// lister asks for routes strictly: the kernel then sends those of one table
	// instead of all. Kernels before 4.20 send all.
	lister *netlink.Handle
	lo     int // interface number
}

var netlinkFamilies = [versions]int{netlink.FAMILY_V4, netlink.FAMILY_V6}

func openRouter(opts Options) (*router, error) {
	rt := &router{opts: opts}
	var err error
	if rt.nl, err = openRoutes(opts.NetNS); err != nil {
		return nil, err
	}
	if rt.lister, err = openRoutes(opts.NetNS); err != nil {
		rt.nl.Close()
		return nil, err
	}
	_ = rt.lister.SetStrictCheck(true)
	lo, err := rt.nl.LinkByName("lo")
	if err != nil {
		rt.close()
		return nil, fmt.Errorf("interface lo: %w", err)
	}
	rt.lo = lo.Attrs().Index
	return rt, nil
}

func openRoutes(namespace int) (nl *netlink.Handle, err error) {
	if namespace != 0 {
		nl, err = netlink.NewHandleAt(netns.NsHandle(namespace), syscall.NETLINK_ROUTE)
	} else {
		nl, err = netlink.NewHandle(syscall.NETLINK_ROUTE)
	}
	if err != nil {
		return nil, fmt.Errorf("route netlink: %w", err)
	}
	return nl, nil
}

func (rt *router) close() {
	rt.nl.Close()
	rt.lister.Close()
}

// isOurs tells a route of ours from others in the same table.
func (rt *router) isOurs(r *netlink.Route) bool {
	return r.Protocol == RouteProtocol && r.Type == syscall.RTN_LOCAL && r.LinkIndex == rt.lo && r.Dst != nil
}

// routes gives everything in the table local.
func (rt *router) routes(v version) ([]netlink.Route, error) {
	routes, err := rt.lister.RouteListFiltered(netlinkFamilies[v], &netlink.Route{Table: syscall.RT_TABLE_LOCAL}, netlink.RT_FILTER_TABLE)
	if noSuchFamily(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("routes of the table local: %w", err)
	}
	return routes, nil
}

// noSuchFamily tells the answers of a kernel that does not have an address
// family.
func noSuchFamily(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EAFNOSUPPORT) || errors.Is(err, syscall.EOPNOTSUPP)
}

// prefixes gives the ranges that routes of ours make local now, as a cover.
func (rt *router) prefixes() ([]netip.Prefix, error) {
	var prefixes []netip.Prefix
	for v := range versions {
		routes, err := rt.routes(v)
		if err != nil {
			return nil, err
		}
		for _, r := range routes {
			if rt.isOurs(&r) {
				prefixes = append(prefixes, prefixOf(r.Dst))
			}
		}
	}
	return redirect.Cover(prefixes), nil
}

// ownAddresses gives an error when a range takes in an address of this node:
// it would cut the node off. Addresses of dummy interfaces do not count, as
// kube-proxy's IPVS mode leaves service addresses on one.
func (rt *router) ownAddresses(prefixes []netip.Prefix) error {
	addrs, err := rt.nl.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("addresses of the node: %w", err)
	}
	for _, a := range addrs {
		addr := addrOf(a.IP)
		i := slices.IndexFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(addr) })
		if i >= 0 && !rt.isDummy(a.LinkIndex) {
			return fmt.Errorf("local %s: takes in this node's own address %s", prefixes[i], addr)
		}
	}
	return nil
}

// isDummy tells whether an interface leads nowhere.
func (rt *router) isDummy(index int) bool {
	l, err := rt.nl.LinkByIndex(index)
	return err == nil && l.Type() == "dummy"
}

// apply makes the routes those of the prefixes, a cover, and tells whether
// anything had to be changed. What is new is added before what is old goes.
func (rt *router) apply(prefixes []netip.Prefix) (changed bool, err error) {
	for v := range versions {
		var own []netip.Prefix
		for _, p := range prefixes {
			if versionOf(p.Addr()) == v {
				own = append(own, p)
			}
		}
		c, err := rt.applyFamily(v, own)
		changed = changed || c
		if err != nil {
			return changed, err
		}
	}
	return changed, nil
}

func (rt *router) applyFamily(v version, prefixes []netip.Prefix) (changed bool, err error) {
	routes, err := rt.routes(v)
	if err != nil {
		return false, err
	}
	ours := map[netip.Prefix]netlink.Route{}
	others := map[netip.Prefix]netlink.Route{}
	for _, r := range routes {
		switch {
		case rt.isOurs(&r):
			ours[prefixOf(r.Dst)] = r
		case r.Dst != nil:
			others[prefixOf(r.Dst)] = r
		}
	}
	var source netip.Addr
	if len(prefixes) > 0 {
		if source, err = rt.source(v); err != nil {
			return false, err
		}
	}
	for _, p := range prefixes {
		own, isOurs := ours[p]
		delete(ours, p)
		if isOurs && sourceOf(&own) == source {
			continue
		}
		if other, taken := others[p]; taken && !isOurs {
			if other.Type == syscall.RTN_LOCAL {
				continue // the address is assigned to an interface
			}
			return changed, &ClashError{What: fmt.Sprintf("route %s (type %d, proto %d) of the table local", p, other.Type, other.Protocol)}
		}
		changed = true
		if err := rt.nl.RouteReplace(rt.route(p, source)); err != nil {
			return changed, routeError("add", p, err)
		}
	}
	for p, r := range ours {
		changed = true
		if err := rt.nl.RouteDel(&r); err != nil && !errors.Is(err, syscall.ESRCH) {
			return changed, routeError("remove", p, err)
		}
	}
	return changed, nil
}

// remove takes all routes of ours away and gives a line for each.
func (rt *router) remove() (removed []string, err error) {
	for v := range versions {
		routes, err := rt.routes(v)
		if err != nil {
			return removed, err
		}
		for _, r := range routes {
			if !rt.isOurs(&r) {
				continue
			}
			if err := rt.nl.RouteDel(&r); err != nil && !errors.Is(err, syscall.ESRCH) {
				return removed, routeError("remove", prefixOf(r.Dst), err)
			}
			removed = append(removed, routeText(&r))
		}
	}
	return removed, nil
}

func (rt *router) route(p netip.Prefix, source netip.Addr) *netlink.Route {
	r := &netlink.Route{
		Table:     syscall.RT_TABLE_LOCAL,
		Type:      syscall.RTN_LOCAL,
		Scope:     netlink.SCOPE_HOST,
		Protocol:  RouteProtocol,
		LinkIndex: rt.lo,
		Dst:       &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
	}
	if source.IsValid() {
		r.Src = source.AsSlice()
	}
	return r
}

// source gives the address that connections from this node to services come
// from (F8): the one that was asked for, else the first global one, those of lo
// and of dummy interfaces last, else none.
func (rt *router) source(v version) (netip.Addr, error) {
	for _, a := range rt.opts.NodeIPs {
		if versionOf(a) == v {
			return a, nil
		}
	}
	addrs, err := rt.nl.AddrList(nil, netlinkFamilies[v])
	if noSuchFamily(err) {
		return netip.Addr{}, nil
	}
	if err != nil {
		return netip.Addr{}, fmt.Errorf("addresses of the node: %w", err)
	}
	var last netip.Addr
	for _, a := range addrs {
		switch {
		case a.Scope != syscall.RT_SCOPE_UNIVERSE || a.Flags&unusable != 0:
		case a.LinkIndex != rt.lo && !rt.isDummy(a.LinkIndex):
			return addrOf(a.IP), nil
		case !last.IsValid():
			last = addrOf(a.IP)
		}
	}
	return last, nil
}

// unusable are the flags of an address that is no source to rely on:
// IFA_F_TEMPORARY (of IPv4 the same bit means secondary), IFA_F_DADFAILED,
// IFA_F_DEPRECATED, IFA_F_TENTATIVE.
const unusable = 0x01 | 0x08 | 0x20 | 0x40

func addrOf(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

func prefixOf(n *net.IPNet) netip.Prefix {
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(addrOf(n.IP), bits)
}

func sourceOf(r *netlink.Route) netip.Addr { return addrOf(r.Src) }

// routeError says what usually is behind the kernel's short answers.
func routeError(verb string, p netip.Prefix, err error) error {
	hint := ""
	switch {
	case errors.Is(err, syscall.EPERM):
		return &MissingError{Feature: FeatureNetAdmin, Err: err}
	case errors.Is(err, syscall.ENETDOWN):
		hint = " (is the interface lo up?)"
	case errors.Is(err, syscall.EINVAL):
		hint = " (is the node's address assigned to an interface?)"
	case errors.Is(err, syscall.EACCES):
		hint = " (is IPv6 switched off on lo?)"
	}
	return fmt.Errorf("%s route local %s dev lo: %w%s", verb, p, err, hint)
}

func routeText(r *netlink.Route) string {
	text := "route local " + prefixOf(r.Dst).String() + " dev lo proto " + strconv.Itoa(RouteProtocol)
	if a := sourceOf(r); a.IsValid() {
		text += " src " + a.String()
	}
	return text
}
