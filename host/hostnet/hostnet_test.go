package hostnet

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// node is a namespace with an uplink eth0.
type node struct {
	t  *testing.T
	ns *netns.Namespace
}

func newNode(t *testing.T) *node {
	n := &node{t, netns.New(t, "node")}
	n.link("eth0")
	n.address("eth0", "172.16.0.1/24")
	n.address("eth0", "fd01::1/64")
	n.route("0.0.0.0/0", "eth0", nil)
	return n
}

func (n *node) check(what string, err error) {
	n.t.Helper()
	must.OKf(n.t, err, "%s", what)
}

// link adds a veth interface whose peer is up.
func (n *node) link(name string) {
	n.t.Helper()
	peer := "x" + name
	n.check(name, n.ns.Netlink().LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: peer}))
	for _, end := range []string{name, peer} {
		n.check(end, n.ns.Netlink().LinkSetUp(n.byName(end)))
	}
}

func (n *node) byName(name string) netlink.Link {
	n.t.Helper()
	l, err := n.ns.Netlink().LinkByName(name)
	n.check(name, err)
	return l
}

func (n *node) address(iface, cidr string) {
	n.t.Helper()
	a, err := netlink.ParseAddr(cidr)
	n.check(cidr, err)
	n.check(cidr, n.ns.Netlink().AddrAdd(n.byName(iface), a))
}

// route adds a route out of an interface; edit may change it.
func (n *node) route(dst, iface string, edit func(*netlink.Route)) {
	n.t.Helper()
	_, to, err := net.ParseCIDR(dst)
	n.check(dst, err)
	r := &netlink.Route{Dst: to, Scope: netlink.SCOPE_LINK}
	if iface != "" {
		r.LinkIndex = n.byName(iface).Attrs().Index
	}
	if edit != nil {
		edit(r)
	}
	n.check(dst, n.ns.Netlink().RouteAdd(r))
}

func (n *node) open(pods func(string) bool) *Watcher {
	n.t.Helper()
	var w *Watcher
	n.check("open", n.ns.Do(func() (err error) {
		w, err = Open(Options{Pods: pods})
		return err
	}))
	n.t.Cleanup(w.Close)
	return w
}

func (n *node) read(pods func(string) bool) State {
	n.t.Helper()
	s, err := n.open(pods).Read()
	n.check("read", err)
	return s
}

func text[T fmt.Stringer](list []T) string {
	var out []string
	for _, v := range list {
		if s := v.String(); !strings.HasPrefix(s, "fe80:") {
			out = append(out, s)
		}
	}
	return strings.Join(out, " ")
}

// TestRead checks which ranges are behind which interfaces (A4.6).
func TestRead(t *testing.T) {
	n := newNode(t)
	n.link("cbr0")
	n.address("cbr0", "10.244.1.1/29")
	n.address("cbr0", "fd44::1/126")
	for _, name := range []string{"cali1", "cali2"} {
		n.link(name)
	}
	n.route("10.244.2.5/32", "cali1", nil)
	n.route("10.244.2.9/32", "cali2", nil)
	n.route("fd44:0:0:2::5/128", "cali1", nil)
	n.route("10.244.2.0/26", "", func(r *netlink.Route) { r.Type = 6 })           // blackhole
	n.route("10.244.3.0/24", "cali1", func(r *netlink.Route) { r.Priority = 50 }) // the next route has precedence
	n.route("10.244.3.0/24", "eth0", nil)
	n.route("10.244.4.0/24", "cali1", func(r *netlink.Route) { r.Table = 100 })
	n.route("10.244.5.0/24", "", func(r *netlink.Route) {
		r.MultiPath = []*netlink.NexthopInfo{{LinkIndex: n.byName("eth0").Attrs().Index}, {LinkIndex: n.byName("cali2").Attrs().Index}}
	})
	n.route("::/0", "cali1", nil)

	const own = "10.244.1.1 127.0.0.1 172.16.0.1 ::1 fd01::1 fd44::1"
	for _, tt := range []struct {
		name string
		pods func(string) bool
		want string
	}{
		{"nobody asks for pods", nil, ""},
		{"BridgeInterface", Named("cbr0"), "10.244.1.0/32 10.244.1.2/31 10.244.1.4/30 fd44::/128 fd44::2/127"},
		{"BridgeInterface is one by its whole name", Named("cbr"), ""},
		{"InterfaceNamePrefix", Prefixed("cali"), "10.244.2.5/32 10.244.2.9/32 10.244.5.0/24 fd44:0:0:2::5/128"},
		{"InterfaceNamePrefix of one", Prefixed("cali2"), "10.244.2.9/32 10.244.5.0/24"},
		{"no such interface", Prefixed("veth"), ""},
	} {
		s := n.read(tt.pods)
		check.Equalf(t, text(s.PodRanges), tt.want, "A4.6 %s", tt.name)
		check.Equalf(t, text(s.Addresses), own, "A4.4 %s: addresses", tt.name)
		if !slices.IsSortedFunc(s.Addresses, netip.Addr.Compare) {
			t.Errorf("%v are not sorted", s.Addresses)
		}
	}
}

// follow runs a Watcher and returns a function that waits for a State.
func (n *node) follow(w *Watcher) (wait func(what string, want func(State) bool)) {
	n.t.Helper()
	states := make(chan State)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() {
		ended <- w.Run(ctx, func(s State) {
			select {
			case states <- s:
			case <-ctx.Done():
			}
		})
	}()
	n.t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			n.t.Errorf("run: %v", err)
		}
	})
	return func(what string, want func(State) bool) {
		n.t.Helper()
		var last State
		deadline := time.After(20 * time.Second)
		for {
			select {
			case last = <-states:
				if want(last) {
					return
				}
			case <-deadline:
				n.t.Fatalf("%s: the last was %v", what, last)
			}
		}
	}
}

// TestRun changes a node in all relevant ways and expects a State for each.
func TestRun(t *testing.T) {
	n := newNode(t)
	w := n.open(Prefixed("cali"))
	first, err := w.Read()
	n.check("read", err)
	if len(first.PodRanges) > 0 {
		t.Fatalf("pods before there are any: %v", first.PodRanges)
	}
	n.link("cali1") // before Run
	n.route("10.244.2.5/32", "cali1", nil)
	wait := n.follow(w)
	pods := func(want string) func(State) bool {
		return func(s State) bool { return text(s.PodRanges) == want }
	}
	wait("a pod came", pods("10.244.2.5/32"))

	n.link("veth2")
	n.route("10.244.2.9/32", "veth2", nil)
	n.address("eth0", "172.16.0.2/24")
	wait("the node got an address", func(s State) bool { return slices.Contains(s.Addresses, netip.MustParseAddr("172.16.0.2")) })

	n.check("down", n.ns.Netlink().LinkSetDown(n.byName("veth2")))
	n.check("rename", n.ns.Netlink().LinkSetName(n.byName("veth2"), "cali2"))
	n.check("up", n.ns.Netlink().LinkSetUp(n.byName("cali2")))
	n.route("10.244.2.9/32", "cali2", nil)
	wait("an interface got another name", pods("10.244.2.5/32 10.244.2.9/32"))

	n.check("delete", n.ns.Netlink().LinkDel(n.byName("cali1")))
	wait("a pod went", pods("10.244.2.9/32"))
}

// TestRunAfterOverflow: after the socket's buffer has overflowed, the State is still
// current.
func TestRunAfterOverflow(t *testing.T) {
	n := newNode(t)
	n.link("cali1")
	w := n.open(Prefixed("cali"))
	n.check("read buffer", w.events.SetReadBuffer(1)) // the kernel's least
	const routes = 300
	for i := range routes { // before Run reads
		n.route(fmt.Sprintf("10.244.%d.%d/32", i/250, i%250+1), "cali1", nil)
	}
	wait := n.follow(w)
	wait("all routes", func(s State) bool { return len(s.PodRanges) == routes })
	for i := routes; i < 2*routes; i++ { // while it reads
		n.route(fmt.Sprintf("10.244.%d.%d/32", i/250, i%250+1), "cali1", nil)
	}
	wait("all routes, added meanwhile", func(s State) bool { return len(s.PodRanges) == 2*routes })
}

func TestClosed(t *testing.T) {
	n := newNode(t)
	w := n.open(nil)
	w.Close()
	if err := w.Run(context.Background(), func(State) {}); err == nil {
		t.Error("a Watcher that is closed runs")
	}
}

// Hosts on one link answer each other without the node. Hosts with a route of their own,
// such as pods with an interface each, and hosts behind a gateway do not.
func TestSameLink(t *testing.T) {
	n := newNode(t)
	n.link("cbr0")
	n.address("cbr0", "10.244.1.1/24")
	n.address("cbr0", "fd44::1/64")
	n.link("veth1")
	n.route("172.16.0.50/32", "veth1", nil)
	n.route("172.16.0.51/32", "veth1", nil)
	n.route("10.245.0.0/16", "eth0", func(r *netlink.Route) { r.Gw, r.Scope = net.IPv4(172, 16, 0, 9), netlink.SCOPE_UNIVERSE })
	s := n.read(nil)
	for _, tt := range []struct {
		what, a, b string
		want       bool
	}{
		{"two on a bridge", "10.244.1.7", "10.244.1.8", true},
		{"two on a bridge, IPv6", "fd44::7", "fd44::8", true},
		{"one on a bridge, one beyond", "10.244.1.7", "10.244.2.8", false},
		{"two links", "10.244.1.7", "172.16.0.7", false},
		{"two in the node's own network", "172.16.0.7", "172.16.0.8", true},
		{"a pod with a route of its own, and a neighbour of the node", "172.16.0.50", "172.16.0.8", false},
		{"two pods with routes of their own", "172.16.0.50", "172.16.0.51", false},
		{"two behind one gateway", "10.245.1.1", "10.245.1.2", false},
		{"two by the default route", "192.0.2.1", "192.0.2.2", false},
	} {
		check.Equalf(t, s.SameLink(netip.MustParseAddr(tt.a), netip.MustParseAddr(tt.b)), tt.want, "%s", tt.what)
	}
	if got := testing.AllocsPerRun(100, func() { s.SameLink(netip.MustParseAddr("10.244.1.7"), netip.MustParseAddr("fd44::8")) }); got > 0 {
		t.Errorf("%v allocations", got)
	}
}

// TestNamespaceWithoutRoutes can be read: nobody has set up its interface lo.
func TestNamespaceWithoutRoutes(t *testing.T) {
	netns.Require(t)
	ns := must.Get(sys.NewNetNS())(t)
	defer ns.Close()
	if err := sys.InNetNS(int(ns.Fd()), func() error {
		w, err := Open(Options{Pods: func(string) bool { return true }})
		if err == nil {
			_, err = w.Read()
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}
