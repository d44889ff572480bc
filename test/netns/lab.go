package netns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Host is a namespace that is a host of a lab, with its address of each family.
type Host struct {
	*Namespace
	IPv4, IPv6 netip.Addr
}

// Lab is a small network: a client host, a node, and backend hosts, each
// joined to the node by a wire of its own.
//
//	client  10.1.0.2   fd00:1::2   --- 10.1.0.1  fd00:1::1   node
//	b1      10.2.1.2   fd00:2:1::2 --- 10.2.1.1  fd00:2:1::1 node
//	b2      10.2.2.2   fd00:2:2::2 --- 10.2.2.1  fd00:2:2::1 node
//
// The node forwards; the others have a default route to it. The node has no
// default route. The node's interfaces carry the names of the hosts that they
// lead to; each other host's interface is eth0.
type Lab struct {
	Client, Node *Host
	Backends     []*Host
}

// NewLab builds a lab that is released when the test ends. It has at most 250
// backends.
func NewLab(t testing.TB, backends int) *Lab {
	t.Helper()
	lab := &Lab{
		Client: &Host{New(t, "client"), netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("fd00:1::2")},
		Node:   &Host{New(t, "node"), netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00:1::1")},
	}
	lab.Node.forward(t)
	attach(t, lab.Node, lab.Client, lab.Node.IPv4, lab.Node.IPv6)
	for range backends {
		lab.AddBackend(t)
	}
	return lab
}

// Settle waits until the kernel has noticed that all links are up, which can take
// a second. Until then packets pass, but routes change by themselves, which would
// disturb tests that compare dumps.
func (lab *Lab) Settle(t testing.TB) {
	t.Helper()
	for _, h := range append([]*Host{lab.Client}, lab.Backends...) {
		must.OK(t, errors.Join(h.awaitUp("eth0"), lab.Node.awaitUp(h.Name())))
	}
}

// AddBackend connects one more backend host to the node.
func (lab *Lab) AddBackend(t testing.TB) *Host {
	t.Helper()
	i := len(lab.Backends) + 1
	b := &Host{
		Namespace: New(t, fmt.Sprintf("b%d", i)),
		IPv4:      netip.AddrFrom4([4]byte{10, 2, byte(i), 2}),
		IPv6:      netip.MustParseAddr(fmt.Sprintf("fd00:2:%x::2", i)),
	}
	attach(t, lab.Node, b, netip.AddrFrom4([4]byte{10, 2, byte(i), 1}), netip.MustParseAddr(fmt.Sprintf("fd00:2:%x::1", i)))
	lab.Backends = append(lab.Backends, b)
	return b
}

// forward makes a host a router.
func (h *Host) forward(t testing.TB) {
	t.Helper()
	for _, key := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		must.OKf(t, h.SetSysctl(key, "1"), "%s: %s", h.Name(), key)
	}
}

// attach connects a host to the node and sets its default routes.
func attach(t testing.TB, node, h *Host, gw4, gw6 netip.Addr) {
	t.Helper()
	Wire(t, node.Namespace, h.Name(), []netip.Prefix{netip.PrefixFrom(gw4, 24), netip.PrefixFrom(gw6, 64)},
		h.Namespace, "eth0", []netip.Prefix{netip.PrefixFrom(h.IPv4, 24), netip.PrefixFrom(h.IPv6, 64)})
	for _, gw := range []netip.Addr{gw4, gw6} {
		must.OKf(t, h.AddRoute(netip.PrefixFrom(zero(gw), 0), gw), "%s: default route via %s", h.Name(), gw)
	}
}

func zero(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// AddRoute adds a route to dst through a neighbour.
func (n *Namespace) AddRoute(dst netip.Prefix, via netip.Addr) error {
	return n.nl.RouteAdd(&netlink.Route{Dst: ipNet(dst), Gw: via.AsSlice()})
}

// AddLocalRoute makes all addresses of dst local to the namespace.
func (n *Namespace) AddLocalRoute(dst netip.Prefix) error {
	lo, err := n.nl.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	return n.nl.RouteAdd(&netlink.Route{Dst: ipNet(dst), LinkIndex: lo.Attrs().Index, Table: syscall.RT_TABLE_LOCAL, Type: syscall.RTN_LOCAL, Scope: netlink.SCOPE_HOST})
}

// Wire joins two namespaces by a pair of veth interfaces, both up, with the given
// addresses, which are usable at once.
func Wire(t testing.TB, a *Namespace, ifA string, addrsA []netip.Prefix, b *Namespace, ifB string, addrsB []netip.Prefix) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = ifA
	veth := netlink.NewVeth(attrs)
	veth.PeerName = ifB
	veth.PeerNamespace = netlink.NsFd(b.FD())
	err := a.nl.LinkAdd(veth)
	if err == nil {
		err = a.configure(ifA, addrsA)
	}
	if err == nil {
		err = b.configure(ifB, addrsB)
	}
	must.OKf(t, err, "wire %s/%s to %s/%s", a.name, ifA, b.name, ifB)
}

// awaitUp waits until an interface is operational.
func (n *Namespace) awaitUp(ifname string) error {
	updates, done := make(chan netlink.LinkUpdate, 16), make(chan struct{})
	defer close(done)
	err := netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{Namespace: &n.handle, ListExisting: true})
	if err != nil {
		return fmt.Errorf("%s: %w", ifname, err)
	}
	timeout := time.After(wait.Patience)
	for {
		select {
		case u := <-updates:
			if a := u.Attrs(); a.Name == ifname && a.OperState == netlink.OperUp {
				return n.awaitLinkLocal(u.Link)
			}
		case <-timeout:
			return fmt.Errorf("%s: did not come up", ifname)
		}
	}
}

// awaitLinkLocal waits for the kernel's link-local address of an operational
// interface, and its routes. The address is tentative until the kernel's worker adds
// the routes, which it does under the lock that every change of an interface takes.
func (n *Namespace) awaitLinkLocal(link netlink.Link) error {
	return wait.Poll(wait.Patience, func() error {
		addrs, err := n.nl.AddrList(link, netlink.FAMILY_V6)
		if err != nil {
			return fmt.Errorf("%s: addresses: %w", link.Attrs().Name, err)
		}
		for _, a := range addrs {
			if a.IP.IsLinkLocalUnicast() && a.Flags&syscall.IFA_F_TENTATIVE == 0 {
				return n.nl.LinkSetUp(link) // it is up; this waits for the lock
			}
		}
		return fmt.Errorf("%s: got no link-local address", link.Attrs().Name)
	})
}

// configure sets addresses and brings an interface up.
func (n *Namespace) configure(ifname string, addrs []netip.Prefix) error {
	link, err := n.nl.LinkByName(ifname)
	if err != nil {
		return fmt.Errorf("%s: %w", ifname, err)
	}
	// An interface may lose its first packets, neighbour solicitations, while it
	// comes up. So repeat them soon, not after a second, and more than three
	// times: after three the host would count as unreachable, which would take
	// only 60 ms with this interval, and a busy machine may answer later.
	for _, version := range []string{"ipv4", "ipv6"} {
		for _, s := range [][2]string{{"retrans_time_ms", "20"}, {"mcast_solicit", "250"}, {"ucast_solicit", "250"}} {
			if err := n.SetSysctl("net/"+version+"/neigh/"+ifname+"/"+s[0], s[1]); err != nil {
				return err
			}
		}
	}
	if err := n.nl.LinkSetUp(link); err != nil {
		return fmt.Errorf("%s up: %w", ifname, err)
	}
	for _, a := range addrs {
		if err := n.addAddr(link, a); err != nil {
			return err
		}
	}
	return nil
}

// SetDown sets an interface down.
func (n *Namespace) SetDown(ifname string) error {
	link, err := n.nl.LinkByName(ifname)
	if err == nil {
		err = n.nl.LinkSetDown(link)
	}
	if err != nil {
		return fmt.Errorf("%s down: %w", ifname, err)
	}
	return nil
}

// AddAddr adds an address to an interface.
func (n *Namespace) AddAddr(ifname string, a netip.Prefix) error {
	link, err := n.nl.LinkByName(ifname)
	if err != nil {
		return fmt.Errorf("%s: %w", ifname, err)
	}
	return n.addAddr(link, a)
}

func (n *Namespace) addAddr(link netlink.Link, a netip.Prefix) error {
	addr := &netlink.Addr{IPNet: ipNet(a)}
	if a.Addr().Is6() {
		addr.Flags = ifaFNoDAD
	}
	if err := n.nl.AddrAdd(link, addr); err != nil {
		return fmt.Errorf("%s: address %s: %w", link.Attrs().Name, a, err)
	}
	return nil
}

// ifaFNoDAD is IFA_F_NODAD: the address is usable at once.
const ifaFNoDAD = 0x02

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
