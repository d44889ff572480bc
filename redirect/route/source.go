package route

import (
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// CheckLocal returns an error when a range takes in an address of this node: it
// would cut the node off. Addresses of dummy interfaces do not count, as
// kube-proxy's IPVS mode leaves service addresses on one.
func (r *Router) CheckLocal(prefixes []netip.Prefix) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	addrs, err := r.nl.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("addresses of the node: %w", err)
	}
	for _, a := range addrs {
		addr := addrOf(a.IP)
		i := slices.IndexFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(addr) })
		if i >= 0 && !r.isDummy(a.LinkIndex) {
			return fmt.Errorf("local %s: takes in this node's own address %s", prefixes[i], addr)
		}
	}
	return nil
}

// isDummy reports whether an interface leads nowhere.
func (r *Router) isDummy(index int) bool {
	l, err := r.nl.LinkByIndex(index)
	return err == nil && l.Type() == "dummy"
}

// source returns the address that connections from this node to services come
// from (F8): the one of the options, else that of the state, else that of the
// default route, else the first global one, those of lo and of dummy interfaces
// last, else none. But for the first, it has to be assigned to an interface.
func (r *Router) source(f service.Family, s *State) (netip.Addr, error) {
	for _, a := range r.opts.NodeIPs {
		if service.FamilyOf(a) == f {
			return a, nil
		}
	}
	addrs, err := r.nl.AddrList(nil, netlinkFamily(f))
	if noSuchFamily(err) {
		return netip.Addr{}, nil
	}
	if err != nil {
		return netip.Addr{}, fmt.Errorf("addresses of the node: %w", err)
	}
	assigned := func(want func(netlink.Addr) bool) bool { return slices.ContainsFunc(addrs, want) }
	if assigned(func(a netlink.Addr) bool { return addrOf(a.IP) == s.Sources[f] && a.Flags&unusableEver == 0 }) {
		return s.Sources[f], nil
	}
	if route, err := r.defaultRoute(f); err != nil {
		return netip.Addr{}, err
	} else if route != nil {
		preferred := addrOf(route.Src)
		i := slices.IndexFunc(addrs, func(a netlink.Addr) bool {
			if preferred.IsValid() {
				return addrOf(a.IP) == preferred
			}
			return a.LinkIndex == route.LinkIndex && a.Scope == syscall.RT_SCOPE_UNIVERSE && a.Flags&unusable == 0
		})
		if i >= 0 {
			return addrOf(addrs[i].IP), nil
		}
	}
	var last netip.Addr
	for _, a := range addrs {
		switch {
		case a.Scope != syscall.RT_SCOPE_UNIVERSE || a.Flags&unusable != 0:
		case a.LinkIndex != kernel.Loopback && !r.isDummy(a.LinkIndex):
			return addrOf(a.IP), nil
		case !last.IsValid():
			last = addrOf(a.IP)
		}
	}
	return last, nil
}

// Follow replaces the source of our routes if it is no longer assigned. It is the fast
// part of Verify: the kernel keeps IPv4 routes whose source was removed, unless they
// are in the table main, and fails this node's own connections by them (ENETUNREACH).
// Verify repairs everything else, and reports errors.
func (r *Router) Follow() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for f := range redirect.Families {
		if !r.sources[f].IsValid() {
			continue
		}
		if a, err := r.source(f, r.want); err != nil || a == r.sources[f] {
			continue // it was another address: do not read tables
		}
		w, err := r.wanted(f, r.want)
		if err != nil {
			continue
		}
		r.sources[f] = w.source
		for i, table := range r.tables() {
			if r.isReplyTable(table) {
				continue // no sources
			}
			c, _ := r.diffRoutes(f, table, w.routes[i], w.source)
			_, _ = each(c.moved, r.replaceRoute)
		}
	}
}

// defaultRoute returns the default route of the main table with the lowest metric;
// nil if there is none.
func (r *Router) defaultRoute(f service.Family) (best *netlink.Route, err error) {
	routes, err := r.routes(f, syscall.RT_TABLE_MAIN)
	if err != nil {
		return nil, err
	}
	for i := range routes {
		k := &routes[i]
		if prefixOf(k.Dst, f).Bits() == 0 && k.Type == syscall.RTN_UNICAST && (best == nil || k.Priority < best.Priority) {
			best = k
		}
	}
	return best, nil
}

// unusable are the flags of an address that is no source to rely on:
// IFA_F_TEMPORARY (of IPv4 the same bit means secondary), IFA_F_DADFAILED,
// IFA_F_DEPRECATED, IFA_F_TENTATIVE.
const unusable = 0x01 | unusableEver

// unusableEver are those of an address that is no source although it was asked
// for.
const unusableEver = 0x08 | 0x20 | 0x40
