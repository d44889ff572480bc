package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/must"
)

// Cluster is a network as Kubernetes has it, seen from one node.
//
//	outside  10.1.0.2   fd00:1::2     --- 10.1.0.1   fd00:1::1    node
//	world    10.9.0.2   fd00:9::2     --- 10.9.0.1   fd00:9::1    node
//	node2    10.1.1.2   fd00:1:1::2   --- 10.1.1.1   fd00:1:1::1  node
//	pod-1    10.244.1.2 fd00:244:1::2 ---  (routed)               node
//	pod-2    10.244.1.3 fd00:244:1::3 ---  (routed)               node
//	pod-3    10.244.2.2 fd00:244:2::2 ---  (routed)               node2
//
// Outside is a client that sends everything by way of the node, as a load
// balancer does; it has a second address too, 10.1.0.3 and fd00:1::3. World is
// where the node's own default route leads, and has NonLocalIPs: addresses that
// are not the node's to own. Pods have single addresses, and all that they
// send passes their node, also to each other. OwnIPs are further addresses of
// the node, on its interface to outside.
//
// The node's interfaces carry the names of the hosts that they lead to; each
// other host's first interface is eth0.
type Cluster struct {
	Node, Node2, Outside, World *Host
	Pods                        []*Host // on the node
	Remote                      []*Host // on node2
}

// Addresses of every Cluster.
var (
	PodCIDRs    = prefixes("10.244.0.0/16", "fd00:244::/32")
	NodePods    = prefixes("10.244.1.0/24", "fd00:244:1::/64")
	Node2Pods   = prefixes("10.244.2.0/24", "fd00:244:2::/64")
	Strangers   = addrs("10.1.0.3", "fd00:1::3") // outside's second addresses
	OwnIPs      = addrs("10.1.0.50", "fd00:1::50")
	NonLocalIPs = addrs("203.0.113.10", "2001:db8:113::10", "198.51.100.10", "2001:db8:51::10", "198.51.100.30", "2001:db8:51::30")
)

// NewCluster builds a cluster that is released when the test ends.
func NewCluster(t testing.TB) *Cluster {
	t.Helper()
	host := func(name, v4, v6 string) *Host {
		return &Host{New(t, name), netip.MustParseAddr(v4), netip.MustParseAddr(v6)}
	}
	c := &Cluster{
		Node:    host("node", "10.1.0.1", "fd00:1::1"),
		Node2:   host("node2", "10.1.1.2", "fd00:1:1::2"),
		Outside: host("outside", "10.1.0.2", "fd00:1::2"),
		World:   host("world", "10.9.0.2", "fd00:9::2"),
		Pods:    []*Host{host("pod-1", "10.244.1.2", "fd00:244:1::2"), host("pod-2", "10.244.1.3", "fd00:244:1::3")},
		Remote:  []*Host{host("pod-3", "10.244.2.2", "fd00:244:2::2")},
	}
	for _, n := range []*Host{c.Node, c.Node2} {
		n.forward(t)
	}
	attach(t, c.Node, c.Outside, c.Node.IPv4, c.Node.IPv6)
	attach(t, c.Node, c.World, netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd00:9::1"))
	attach(t, c.Node, c.Node2, netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("fd00:1:1::1"))
	for _, p := range c.Pods {
		attachPod(t, c.Node, p, NodePods)
	}
	for _, p := range c.Remote {
		attachPod(t, c.Node2, p, Node2Pods)
	}
	var err error
	keep := func(e error) {
		if err == nil {
			err = e
		}
	}
	for i, via := range []netip.Addr{c.Node2.IPv4, c.Node2.IPv6} {
		keep(c.Node.AddRoute(Node2Pods[i], via))
	}
	for _, via := range []netip.Addr{c.World.IPv4, c.World.IPv6} {
		keep(c.Node.AddRoute(netip.PrefixFrom(zero(via), 0), via))
	}
	for _, a := range NonLocalIPs {
		keep(c.World.AddAddr("lo", single(a)))
	}
	for _, a := range Strangers {
		keep(c.Outside.AddAddr("eth0", single(a)))
	}
	for _, a := range OwnIPs {
		keep(c.Node.AddAddr(c.Outside.Name(), single(a)))
	}
	must.OK(t, err)
	return c
}

// Hosts gives all hosts but the node.
func (c *Cluster) Hosts() []*Host {
	return append(append([]*Host{c.Node2, c.Outside, c.World}, c.Pods...), c.Remote...)
}

// Settle waits until the kernel has taken note that all wires are plugged in:
// see [Lab.Settle].
func (c *Cluster) Settle(t testing.TB) {
	t.Helper()
	for _, h := range c.Hosts() {
		router := c.Node
		if slices.Contains(c.Remote, h) {
			router = c.Node2
		}
		must.OK(t, errors.Join(h.awaitUp("eth0"), router.awaitUp(h.Name())))
	}
}

// NodeAddrs gives all addresses of the node but loopback.
func (c *Cluster) NodeAddrs(t testing.TB) []netip.Addr {
	t.Helper()
	return c.Node.Addrs(t)
}

// Addrs gives all global addresses of the namespace's interfaces, each once.
func (n *Namespace) Addrs(t testing.TB) []netip.Addr {
	t.Helper()
	list, err := n.nl.AddrList(nil, netlink.FAMILY_ALL)
	must.OKf(t, err, "%s: addresses", n.name)
	seen := map[netip.Addr]bool{}
	var out []netip.Addr
	for _, a := range list {
		ip, ok := netip.AddrFromSlice(a.IP)
		if ip = ip.Unmap(); ok && ip.IsGlobalUnicast() && !seen[ip] {
			seen[ip] = true
			out = append(out, ip)
		}
	}
	return out
}

// attachPod joins a pod to its node the way the ptp plugin of CNI does: the pod
// has a single address, the gateway is the first address of the node's pod
// range on each wire, and there is a route for each pod.
func attachPod(t testing.TB, node, pod *Host, ranges []netip.Prefix) {
	t.Helper()
	gateways := []netip.Addr{ranges[0].Addr().Next(), ranges[1].Addr().Next()}
	own := []netip.Addr{pod.IPv4, pod.IPv6}
	Wire(t, node.Namespace, pod.Name(), []netip.Prefix{single(gateways[0]), single(gateways[1])},
		pod.Namespace, "eth0", []netip.Prefix{single(own[0]), single(own[1])})
	for i := range own {
		err := node.AddLinkRoute(single(own[i]), pod.Name())
		if err == nil {
			err = pod.AddLinkRoute(single(gateways[i]), "eth0")
		}
		if err == nil {
			err = pod.AddRoute(netip.PrefixFrom(zero(own[i]), 0), gateways[i])
		}
		must.OKf(t, err, "routes of %s", pod.Name())
	}
}

// AddLinkRoute adds a route to neighbours on an interface.
func (n *Namespace) AddLinkRoute(dst netip.Prefix, ifname string) error {
	link, err := n.nl.LinkByName(ifname)
	if err != nil {
		return fmt.Errorf("%s: %w", ifname, err)
	}
	return n.nl.RouteAdd(&netlink.Route{Dst: ipNet(dst), LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK})
}

// Pick gives the one of two addresses, IPv4 first, that is of another's family.
func Pick(pair []netip.Addr, like netip.Addr) netip.Addr {
	if like.Is4() {
		return pair[0]
	}
	return pair[1]
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func addrs(texts ...string) []netip.Addr {
	var list []netip.Addr
	for _, t := range texts {
		list = append(list, netip.MustParseAddr(t))
	}
	return list
}

func prefixes(texts ...string) []netip.Prefix {
	var list []netip.Prefix
	for _, t := range texts {
		list = append(list, netip.MustParsePrefix(t))
	}
	return list
}
