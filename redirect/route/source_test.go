package route

import (
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// F8: connections of the node come from the address that the plan names, if an
// interface has it, else from that of the default route, whatever interface comes
// first. A change of it is no repair, and no range is without a route.
func TestSourceOfTheNodesConnections(t *testing.T) {
	lab := netns.NewLab(t, 1)
	nl := lab.Node.Netlink()
	// The lab's first interface leads to the client, the second to the backend.
	uplink := lab.Backends[0]
	for _, via := range []netip.Addr{uplink.IPv4, uplink.IPv6} {
		must.OK(t, lab.Node.AddRoute(netip.PrefixFrom(zeroOf(via), 0), via))
	}
	r := open(t, lab.Node, Options{})
	s := State{Local: redirect.LocalOf(prefixes("10.96.0.0/16 fd01::/112")...), NonLocal: redirect.SetOf(addrs("192.0.2.7 2001:db8::7")...), MarkSteers: true}
	sources := func() string {
		t.Helper()
		var list []string
		for _, line := range strings.Split(dump(t, r), "\n") {
			if _, src, ok := strings.Cut(line, " src "); ok {
				list = append(list, src)
			}
		}
		return strings.Join(list, " ")
	}
	apply(t, r, s, true)
	const byDefault = "10.2.1.1 fd00:2:1::1 10.2.1.1 fd00:2:1::1"
	check.Equalf(t, sources(), byDefault, "by the default route")
	link := must.Get(nl.LinkByName(lab.Client.Name()))(t)
	own := addrs("10.1.0.77 fd00:1::77")
	s.Sources = redirect.Sources{own[0], own[1]}
	apply(t, r, s, false)
	check.Equalf(t, sources(), byDefault, "an address that no interface has")
	for round := range 2 {
		for _, a := range own {
			must.OK(t, lab.Node.AddAddr(lab.Client.Name(), netip.PrefixFrom(a, a.BitLen())))
		}
		apply(t, r, s, false)
		check.Equalf(t, sources(), "10.1.0.77 fd00:1::77 10.1.0.77 fd00:1::77", "round %d, the node's own address", round)
		list := must.Get(nl.AddrList(link, 0))(t)
		for _, a := range list {
			if ip := addrOf(a.IP); ip == own[0] || ip == own[1] {
				must.OK(t, nl.AddrDel(link, &a))
			}
		}
		for _, to := range addrs("10.96.3.4 fd01::34") {
			if routes, err := nl.RouteGet(to.AsSlice()); err != nil || len(routes) != 1 || routes[0].Table != 255 {
				t.Errorf("round %d, the address is gone: %s is routed by %v, %v", round, to, routes, err)
			}
		}
		r.Follow()
		check.Equalf(t, sources(), byDefault, "round %d, by the default route again", round)
		apply(t, r, s, false)
	}
	must.OK(t, nl.RouteDel(r.route(syscall.RT_TABLE_LOCAL, prefixes("10.96.0.0/16")[0], netip.Addr{})))
	r.Follow()
	if repaired, err := r.Verify(); err != nil || !repaired {
		t.Errorf("a route that another program removed: repaired %v, %v, want Verify to restore it", repaired, err)
	}
	if removed, err := r.Remove(); err != nil || len(removed) != 6 {
		t.Errorf("removed %q, %v", removed, err)
	}
	if left, err := r.Dump(); err != nil || len(left) != 0 {
		t.Errorf("left: %q, %v", left, err)
	}
}

func zeroOf(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}
