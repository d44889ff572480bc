package flow

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestShortcutsKeepTheMTUOfRoutes: the sender hears of each datagram that is longer than a route
// allows, also if the MTU is not locked. When the route is gone, packets skip the stack again.
func TestShortcutsKeepTheMTUOfRoutes(t *testing.T) {
	t.Parallel()
	const mtu, long = 1300, 1300 // without headers
	for name, hops := range map[string]func(s *shortcutNet, r *netlink.Route, ip netip.Addr){
		"plain": func(s *shortcutNet, r *netlink.Route, _ netip.Addr) {
			r.LinkIndex, r.Scope = s.b1().Index, netlink.SCOPE_LINK
		},
		"multipath": func(s *shortcutNet, r *netlink.Route, ip netip.Addr) {
			for _, gateway := range []netip.Addr{ip, ip.Next()} {
				r.MultiPath = append(r.MultiPath, &netlink.NexthopInfo{LinkIndex: s.b1().Index, Gw: gateway.AsSlice(), Flags: int(netlink.FLAG_ONLINK)})
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newShortcutNet(t, false)
			b := s.lab.Backends[0]
			mac := b.Link(t, "eth0").Attrs().HardwareAddr
			for _, ip := range []netip.Addr{b.IPv4, b.IPv6} {
				must.OK(t, s.lab.Node.Netlink().NeighSet(&netlink.Neigh{LinkIndex: s.b1().Index, State: netlink.NUD_PERMANENT, IP: ip.Next().AsSlice(), HardwareAddr: mac}))
			}
			s.awaitMost()
			for _, ip := range []netip.Addr{b.IPv4, b.IPv6} {
				r := &netlink.Route{Dst: hostNet(ip), MTU: mtu}
				hops(s, r, ip)
				must.OK(t, s.lab.Node.Netlink().RouteAdd(r))
				s.awaitInto(false)
				for _, open := range []bool{true, false} {
					for _, c := range s.udp(ip, open) {
						always(t, c, long)
						s.refused(c, make([]byte, long))
						s.refused(c, make([]byte, 4*long))
					}
				}
				must.OK(t, s.lab.Node.Netlink().RouteDel(r))
				s.awaitMost()
			}
		})
	}
}

// TestShortcutsHeedRoutesAtOnce: if a change waited until interfaces are looked at anyway, these
// would take five times as long as they may.
func TestShortcutsHeedRoutesAtOnce(t *testing.T) {
	s := newShortcutNet(t, false)
	const interval = 5 * time.Second // of looks at all interfaces
	r := &netlink.Route{Dst: &net.IPNet{IP: net.IPv4(10, 77, 0, 0), Mask: net.CIDRMask(16, 32)}, LinkIndex: s.b1().Index, Scope: netlink.SCOPE_LINK, MTU: 1400}
	began := time.Now()
	for range 5 * patience / interval / 2 {
		number := atomic.LoadUint32(&s.server.kernel.Control.WaysNumber)
		must.OK(t, s.lab.Node.Netlink().RouteAdd(r))
		s.awaitInto(false)
		if atomic.LoadUint32(&s.server.kernel.Control.WaysNumber) == number {
			t.Error("packets go by the ways before, where others have just gone")
		}
		must.OK(t, s.lab.Node.Netlink().RouteDel(r))
		s.awaitInto(true)
	}
	if took := time.Since(began); took > patience {
		t.Errorf("took %v", took)
	}
}

func (s *shortcutNet) b1() *netlink.LinkAttrs {
	s.t.Helper()
	link := must.Get(s.lab.Node.Netlink().LinkByName("b1"))(s.t)
	return link.Attrs()
}

// awaitInto waits until packets may go straight into the backend's interface, or may not.
func (s *shortcutNet) awaitInto(open bool) {
	s.t.Helper()
	wait.For(s.t, "the way into b1 "+strconv.FormatBool(open), patience, func() error {
		var ways bpf.KernelWay
		if err := s.server.kernel.Maps.Ways.Lookup(uint32(s.b1().Index), &ways); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
		if ways&bpf.KernelWayWAY_INTO != 0 != open {
			return fmt.Errorf("ways %v", ways)
		}
		return nil
	})
}

// udp returns sockets to the endpoint of a family: that are open, or new ones.
func (s *shortcutNet) udp(ip netip.Addr, open bool) (list []*net.UDPConn) {
	s.t.Helper()
	for _, c := range s.conns {
		u, is := c.(*net.UDPConn)
		if !is || u.RemoteAddr().(*net.UDPAddr).AddrPort().Addr().Is4() != ip.Is4() {
			continue
		}
		if !open {
			another := s.lab.Client.Connect(s.t, "udp", u.RemoteAddr().String())
			u = another.(*net.UDPConn)
		}
		list = append(list, u)
	}
	if len(list) == 0 {
		s.t.Fatalf("no socket to %s", ip)
	}
	return list
}

func hostNet(ip netip.Addr) *net.IPNet {
	return &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(ip.BitLen(), ip.BitLen())}
}
