package route

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// routeChanges is what has to be done to one table in one family.
type routeChanges struct {
	add, remove []netlink.Route
	moved       []netlink.Route // that only get another source
}

// diffRoutes compares our routes in a table with those wanted, which do not overlap.
// The error names each route of another program that is in the way; those ranges are
// left out.
func (r *Router) diffRoutes(f service.Family, table int, want []netip.Prefix, source netip.Addr) (c routeChanges, err error) {
	have, err := r.routes(f, table)
	if err != nil {
		return c, err
	}
	ours := map[netip.Prefix]netlink.Route{}
	others := map[netip.Prefix]netlink.Route{}
	var clashes []error
	for _, k := range have {
		switch p := prefixOf(k.Dst, f); {
		case r.isOurRoute(&k):
			ours[p] = k
		case table == syscall.RT_TABLE_LOCAL:
			others[p] = k
		case len(want) > 0:
			clashes = append(clashes, &redirect.ClashError{
				What:   fmt.Sprintf("route %s (type %d, proto %d) of the table %d", p, k.Type, k.Protocol, table),
				Remedy: "give the proxy the number of a table that nobody uses",
			})
		}
	}
	if r.isReplyTable(table) {
		source = netip.Addr{} // nobody connects by that one
	}
	for _, p := range want {
		own, isOurs := ours[p]
		delete(ours, p)
		if other, taken := others[p]; taken && !isOurs {
			if other.Type != syscall.RTN_LOCAL { // else the address is assigned to an interface
				clashes = append(clashes, &redirect.ClashError{
					What: fmt.Sprintf("route %s (type %d, proto %d) of the table local", p, other.Type, other.Protocol),
				})
			}
			continue
		}
		switch {
		case isOurs && addrOf(own.Src) == source:
		case isOurs:
			c.moved = append(c.moved, *r.route(table, p, source))
		default:
			c.add = append(c.add, *r.route(table, p, source))
		}
	}
	for _, k := range ours {
		c.remove = append(c.remove, k)
	}
	return c, errors.Join(clashes...)
}

func (h *handles) replaceRoute(k *netlink.Route) error {
	if err := h.nl.RouteReplace(k); err != nil {
		return routeError("add", k, err)
	}
	return nil
}

// removeRoute accepts that a route is gone already.
func (h *handles) removeRoute(k *netlink.Route) error {
	if err := h.nl.RouteDel(k); err != nil && !errors.Is(err, syscall.ESRCH) {
		return routeError("remove", k, err)
	}
	return nil
}

// routes returns everything in a table.
func (h *handles) routes(f service.Family, table int) ([]netlink.Route, error) {
	routes, err := h.lister.RouteListFiltered(netlinkFamily(f), &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
	if noSuchFamily(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("routes of the table %s: %w", tableName(table), err)
	}
	return routes, nil
}

// isOurRoute reports whether a route of the table is ours.
func (r *Router) isOurRoute(k *netlink.Route) bool {
	if k.Protocol != Protocol || k.Type != syscall.RTN_LOCAL || k.LinkIndex != kernel.Loopback {
		return false
	}
	switch k.Table {
	case syscall.RT_TABLE_LOCAL:
		return r.isOurMetric(k.Priority)
	case r.opts.ReplyTable + 1: // it has clients; another proxy's reply table may have this number
		return k.Dst != nil && prefixOf(k.Dst, familyOf(k)).IsSingleIP()
	}
	return true
}

func familyOf(k *netlink.Route) service.Family {
	if k.Family == netlink.FAMILY_V6 {
		return service.IPv6
	}
	return service.IPv4
}

// metric tells our routes of the table local from those of another proxy of this
// kind beside us, which has a steer table of its own. The default is none.
func (r *Router) metric() int {
	if r.opts.SteerTable == DefaultSteerTable {
		return 0
	}
	return r.opts.SteerTable
}

func (r *Router) isOurMetric(n int) bool {
	return n == r.metric() || n == defaultMetric6 && r.metric() == 0
}

// defaultMetric6 is what IPv6 makes of none.
const defaultMetric6 = 1024

func (r *Router) route(table int, p netip.Prefix, source netip.Addr) *netlink.Route {
	k := &netlink.Route{
		Table:     table,
		Type:      syscall.RTN_LOCAL,
		Scope:     netlink.SCOPE_HOST,
		Protocol:  Protocol,
		LinkIndex: kernel.Loopback,
		Dst:       ipNet(p),
	}
	if table == syscall.RT_TABLE_LOCAL {
		k.Priority = r.metric()
	}
	if source.IsValid() {
		k.Src = source.AsSlice()
	}
	return k
}

// LocalRoutes returns the ranges that routes of ours in the table local make
// local now, as a cover; a process that was killed may have left some.
func (r *Router) LocalRoutes() ([]netip.Prefix, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var prefixes []netip.Prefix
	for f := range redirect.Families {
		routes, err := r.ourRoutes(f, syscall.RT_TABLE_LOCAL)
		if err != nil {
			return nil, err
		}
		for _, k := range routes {
			prefixes = append(prefixes, prefixOf(k.Dst, f))
		}
	}
	return redirect.Cover(prefixes), nil
}

// routeError says what usually is behind the kernel's short answers.
func routeError(verb string, k *netlink.Route, err error) error {
	hint := ""
	switch {
	case errors.Is(err, syscall.EPERM):
		return missingRight(err)
	case errors.Is(err, syscall.ENETDOWN):
		hint = " (is the interface lo up?)"
	case errors.Is(err, syscall.EINVAL):
		hint = " (is the node's address assigned to an interface?)"
	case errors.Is(err, syscall.EACCES):
		hint = " (is IPv6 switched off on lo?)"
	}
	return fmt.Errorf("%s %s: %w%s", verb, routeText(k), err, hint)
}

// routeText says a route as `ip route` takes it.
func routeText(k *netlink.Route) string {
	text := "route local "
	if bits, _ := k.Dst.Mask.Size(); bits == 0 {
		text += "default"
	} else {
		text += prefixOf(k.Dst, service.FamilyOf(addrOf(k.Dst.IP))).String()
	}
	text += " dev lo"
	if k.Table != syscall.RT_TABLE_LOCAL {
		text += " table " + strconv.Itoa(k.Table)
	}
	text += " proto " + strconv.Itoa(Protocol)
	if a := addrOf(k.Src); a.IsValid() {
		text += " src " + a.String()
	}
	return text
}

func tableName(table int) string {
	if table == syscall.RT_TABLE_LOCAL {
		return "local"
	}
	return strconv.Itoa(table)
}

// defaultRoute is the range of all addresses of a family.
func defaultRoute(f service.Family) netip.Prefix {
	if f == service.IPv6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// prefixOf reads a route's destination; the default route may have none.
func prefixOf(n *net.IPNet, f service.Family) netip.Prefix {
	if n == nil || n.IP == nil {
		return defaultRoute(f)
	}
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(addrOf(n.IP), bits)
}

func addrOf(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}
