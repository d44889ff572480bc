package bypass

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"strings"
	"testing"

	"github.com/rs/zerolog"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// routesNet is a node whose routes are followed.
type routesNet struct {
	t      *testing.T
	node   *netns.Host
	routes *routes
}

func newRoutesNet(t *testing.T, buffer int, log io.Writer) *routesNet {
	requireRoot(t)
	lab := netns.NewLab(t, 2)
	lab.Settle(t)
	return &routesNet{t: t, node: lab.Node, routes: openedRoutes(t, lab.Node, buffer, log)}
}

func openedRoutes(t *testing.T, node *netns.Host, buffer int, log io.Writer) *routes {
	t.Helper()
	r := must.Get(openRoutes(node.FD(), buffer, zerolog.New(log)))(t)
	t.Cleanup(r.close)
	wait.True(t, "routes are known", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.known
	})
	return r
}

func (n *routesNet) ip(args ...string) {
	n.t.Helper()
	must.Run(n.t, n.node.Command(n.t, "ip", args...))
}

// await waits until packets may go straight into the interfaces, each or not, as interfaces are
// looked at whenever routes say that something has changed.
func (n *routesNet) await(when string, b1, b2 bool) {
	n.t.Helper()
	wait.For(n.t, when, patience, func() error {
		list, err := n.node.Netlink().LinkList()
		if err != nil {
			return err
		}
		n.routes.look(list)
		for _, l := range list {
			want, is := map[string]bool{"b1": b1, "b2": b2}[l.Attrs().Name]
			if got := n.routes.limit(l.Attrs(), Into) != 0; is && got != want {
				return fmt.Errorf("into %s: %v", l.Attrs().Name, got)
			}
		}
		return nil
	})
}

// TestRoutes: each kind of route with an MTU of its own takes the way into its interfaces while it
// is there.
func TestRoutes(t *testing.T) {
	n := newRoutesNet(t, routesBuffer, zerolog.NewTestWriter(t))
	n.await("no route has an MTU", true, true)
	was := [2]bool{true, true}
	for _, c := range []struct {
		b1, b2  bool
		command string
	}{
		{false, true, "route add 10.77.0.0/16 via 10.2.1.2 mtu 1300"},
		{false, false, "route replace 10.77.0.0/16 mtu 1300 nexthop via 10.2.1.2 nexthop via 10.2.2.2"},
		{true, false, "route replace 10.77.0.0/16 via 10.2.2.2 mtu 1300"},
		{true, true, "route replace 10.77.0.0/16 via 10.2.2.2"},
		{false, true, "route append 10.77.0.0/16 via 10.2.1.2 mtu 1400"},
		{false, true, "route prepend 10.77.0.0/16 via 10.2.1.3 mtu 1300"},
		{false, true, "route del 10.77.0.0/16 via 10.2.1.3"},
		{true, true, "route del 10.77.0.0/16 via 10.2.1.2"},
		{true, true, "route add 10.78.0.0/16 via 10.2.1.2 mtu 1500"},
		{true, true, "route add 10.79.0.0/16 via 10.2.1.2 mtu lock 1300"},
		{false, true, "route add 10.77.0.0/16 via 10.2.1.2 mtu 1300 table 100"},
		{true, true, "route flush table 100"},
		{false, true, "route add 10.77.0.0/16 via 10.2.1.2 mtu 1300 tos 0x10"},
		{true, true, "route del 10.77.0.0/16 tos 0x10"},

		{false, true, "-6 route add fd77::/64 via fd00:2:1::2 mtu 1300"},
		{false, false, "-6 route append fd77::/64 via fd00:2:2::2 mtu 1300"},
		{false, true, "-6 route del fd77::/64 via fd00:2:2::2"},
		{true, false, "-6 route replace fd77::/64 via fd00:2:2::2 mtu 1300"},
		{true, true, "-6 route change fd77::/64 via fd00:2:2::2"},
		{false, false, "-6 route replace fd77::/64 mtu 1300 nexthop via fd00:2:1::2 nexthop via fd00:2:2::2"},
		{true, true, "-6 route del fd77::/64"},
		{false, true, "-6 route add default via fd00:2:1::2 mtu 1300"},

		// The kernel says nothing of IPv4 routes that a down interface loses.
		{false, false, "route replace 10.77.0.0/16 via 10.2.2.2 mtu 1300"},
		{false, false, "link set b2 down"},
		{false, true, "link set b2 up"},
		{true, true, "-6 route del default"},

		// Routes to nexthop objects.
		{true, true, "nexthop add id 1 via 10.2.1.2 dev b1"},
		{true, true, "nexthop add id 2 via 10.2.2.2 dev b2"},
		{true, true, "nexthop add id 3 group 1/2"},
		{false, true, "route add 10.80.0.0/16 nhid 1 mtu 1300"},
		{true, false, "nexthop replace id 1 via 10.2.2.3 dev b2"},
		{true, true, "route replace 10.80.0.0/16 nhid 3"},
		{true, false, "route replace 10.80.0.0/16 nhid 3 mtu 1300"},
		{false, false, "nexthop replace id 1 via 10.2.1.2 dev b1"},
		{true, true, "route del 10.80.0.0/16"},
	} {
		for len(n.routes.changed) > 0 {
			<-n.routes.changed
		}
		n.ip(strings.Fields(c.command)...)
		n.await(c.command, c.b1, c.b2)
		if was != [2]bool{c.b1, c.b2} && len(n.routes.changed) == 0 {
			t.Errorf("%s: nobody was told", c.command)
		}
		was = [2]bool{c.b1, c.b2}
	}
}

// TestRoutesOfUnnamedNextHops: where the kernel names only a nexthop object, any interface may be
// meant.
func TestRoutesOfUnnamedNextHops(t *testing.T) {
	n := newRoutesNet(t, routesBuffer, zerolog.NewTestWriter(t))
	must.OK(t, n.node.SetSysctl("net/ipv4/nexthop_compat_mode", "0"))
	n.ip("nexthop", "add", "id", "1", "via", "10.2.1.2", "dev", "b1")
	n.ip("route", "add", "10.80.0.0/16", "nhid", "1", "mtu", "1300")
	n.await("a route to a nexthop object", false, false)
	n.ip("route", "del", "10.80.0.0/16")
	n.await("no route has an MTU", true, true)
}

// TestRoutesOfAnInterfaceThatGoes: nothing is left of them.
func TestRoutesOfAnInterfaceThatGoes(t *testing.T) {
	n := newRoutesNet(t, routesBuffer, zerolog.NewTestWriter(t))
	n.ip("route", "add", "10.77.0.0/16", "via", "10.2.1.2", "mtu", "1300")
	n.ip("-6", "route", "add", "fd77::/64", "via", "fd00:2:1::2", "mtu", "1300")
	n.await("routes", false, true)
	n.ip("link", "del", "b1")
	wait.True(t, "nothing is left", func() bool {
		n.await("b1 is gone", true, true)
		n.routes.mu.Lock()
		defer n.routes.mu.Unlock()
		return n.routes.known && len(n.routes.hops) == 0 && len(n.routes.mtus) == 0
	})
}

// TestRoutesAreListedAgain: when changes were lost, no packet takes a shortcut until the routes
// are known again.
func TestRoutesAreListedAgain(t *testing.T) {
	said := saying{make(chan string), t.Context().Done()}
	n := newRoutesNet(t, 1, said) // the kernel's least
	n.await("no route has an MTU", true, true)
	b2 := n.node.Link(t, "b2").Attrs()
	r := &netlink.Route{Dst: ipNet("10.77.0.0/16"), LinkIndex: b2.Index, Scope: netlink.SCOPE_LINK}
	n.routes.mu.Lock() // a change waits, and those after it
	for range 1000 {
		must.OK(t, errors.Join(n.node.Netlink().RouteAdd(r), n.node.Netlink().RouteDel(r)))
	}
	n.ip("route", "add", "10.77.0.0/16", "via", "10.2.1.2", "mtu", "1300") // this is not heard of
	n.routes.mu.Unlock()
	// The goroutine that says it waits here.
	check.Contains(t, <-said.lines, "no buffer space")
	check.Equalf(t, n.routes.limit(b2, Into), 0, "packets take shortcuts although changes of routes were lost")
	<-said.lines
	n.await("routes are known again", false, true)
}

// saying has who logs a line wait until it is read, and until another read says to go on.
type saying struct {
	lines chan string
	over  <-chan struct{} // nobody reads
}

func (s saying) Write(line []byte) (int, error) {
	for _, each := range []string{string(line), ""} {
		select {
		case s.lines <- each:
		case <-s.over:
		}
	}
	return len(line), nil
}

// TestRoutesAtRandom compares what follows changes with what lists the routes anew.
func TestRoutesAtRandom(t *testing.T) {
	n := newRoutesNet(t, routesBuffer, zerolog.NewTestWriter(t))
	links := []int{n.node.Link(t, "b1").Attrs().Index, n.node.Link(t, "b2").Attrs().Index}
	nl := n.node.Netlink()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for round := range 20 {
		for range 200 {
			r := &netlink.Route{Priority: 100 + random.IntN(2), Table: 254 + random.IntN(2)*10, MTU: []int{0, 1300, 1400}[random.IntN(3)]}
			gateways := []string{"10.2.1.2", "10.2.2.2"}
			if r.Dst = ipNet(fmt.Sprintf("10.77.%d.0/24", random.IntN(3))); random.IntN(2) == 0 {
				r.Dst = ipNet(fmt.Sprintf("fd77:%d::/64", random.IntN(3)))
				gateways = []string{"fd00:2:1::2", "fd00:2:2::2"}
			}
			if i := random.IntN(3); i < 2 {
				r.LinkIndex, r.Gw = links[i], net.ParseIP(gateways[i])
			} else {
				for i, gateway := range gateways {
					r.MultiPath = append(r.MultiPath, &netlink.NexthopInfo{LinkIndex: links[i], Gw: net.ParseIP(gateway)})
				}
			}
			switch random.IntN(3) { // many fail: they are there, or are not
			case 0:
				_ = nl.RouteAdd(r)
			case 1:
				_ = nl.RouteReplace(r)
			case 2:
				_ = nl.RouteDel(r)
			}
		}
		fresh := openedRoutes(t, n.node, routesBuffer, zerolog.NewTestWriter(t))
		wait.For(t, fmt.Sprintf("round %d", round), patience, func() error {
			n.routes.mu.Lock()
			defer n.routes.mu.Unlock()
			fresh.mu.Lock()
			defer fresh.mu.Unlock()
			if !maps.EqualFunc(n.routes.mtus, fresh.mtus, maps.Equal) {
				return fmt.Errorf("followed %v, listed %v", n.routes.mtus, fresh.mtus)
			}
			return nil
		})
	}
}
