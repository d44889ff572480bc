package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"
)

// The demo's network. Client pods run on node-a, where the proxy is, and
// backend pods on node-b:
//
//	client pods              node-a                          node-b
//	10.244.0.11 to 14  ----  10.244.0.1    192.168.77.1  ---- 192.168.77.2
//	fd00:10:244::11          fd00:10:244::1  fd00:77::1       fd00:77::2
//	                                                          10.244.1.11 to 15 (lo)
//
// Each column is a network namespace; node-a is the one that the process
// itself runs in. IPv6 is left out where the machine has none.
type world struct {
	nodeA, clients, nodeB *namespace
	ipv6                  bool
}

const (
	clientCount  = 4
	serviceCIDR4 = "10.96.0.0/16"
	serviceCIDR6 = "fd00:10:96::/112"
)

var (
	nodeA4, nodeA6 = netip.MustParseAddr("192.168.77.1"), netip.MustParseAddr("fd00:77::1")
	nodeB4, nodeB6 = netip.MustParseAddr("192.168.77.2"), netip.MustParseAddr("fd00:77::2")
	podsA4, podsA6 = netip.MustParsePrefix("10.244.0.0/24"), netip.MustParsePrefix("fd00:10:244::/64")
	podsB4, podsB6 = netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")
)

// host returns the address of a range that ends in .n or ::n, where n is written
// in decimal digits.
func host(p netip.Prefix, n int) netip.Addr {
	if p.Addr().Is4() {
		b := p.Addr().As4()
		b[3] = byte(n)
		return netip.AddrFrom4(b)
	}
	b := p.Addr().As16()
	b[15] = byte(n/10<<4 | n%10)
	return netip.AddrFrom16(b)
}

// client returns the addresses of client i, which counts from 0. Those of an
// index below 0 are not valid: they stand for a program on the node itself.
func client(i int) (v4, v6 netip.Addr) {
	if i < 0 {
		return netip.Addr{}, netip.Addr{}
	}
	return host(podsA4, 11+i), host(podsA6, 11+i)
}

// buildWorld lays the network out. The process must be in an empty network
// namespace; any other is left alone. An error is fs.ErrPermission if the
// process may not change it.
func buildWorld(ctx context.Context) (_ *world, err error) {
	w := &world{ipv6: hasIPv6()}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	for _, n := range []struct {
		name  string
		to    **namespace
		enter func(string) (*namespace, error)
	}{
		{"node-a", &w.nodeA, ownNamespace},
		{"clients", &w.clients, newNamespace},
		{"node-b", &w.nodeB, newNamespace},
	} {
		if *n.to, err = n.enter(n.name); err != nil {
			return nil, err
		}
	}
	if err = w.nodeA.untouched(); err != nil {
		return nil, err
	}
	for _, n := range w.namespaces() {
		n.withoutDAD()
	}
	if err = w.attachClients(); err == nil {
		err = w.attachNodeB()
	}
	if err == nil {
		err = w.settle(ctx)
	}
	return w, err
}

func (w *world) namespaces() []*namespace {
	return slices.DeleteFunc([]*namespace{w.nodeA, w.clients, w.nodeB}, func(n *namespace) bool { return n == nil })
}

// settlePatience is more than duplicate address detection takes.
const settlePatience = 5 * time.Second

// settle waits until each address can be used. While an interface's link-local
// address cannot, the node asks for no IPv6 neighbour there.
func (w *world) settle(ctx context.Context) error {
	for _, n := range w.namespaces() {
		if err := until(ctx, settlePatience, n.settled); err != nil {
			return fmt.Errorf("the addresses of %s can be used: %w", n.name, err)
		}
	}
	return nil
}

func (w *world) attachClients() error {
	if err := w.nodeA.wire("pods", w.clients, "eth0"); err != nil {
		return err
	}
	gateway4, gateway6 := host(podsA4, 1), host(podsA6, 1)
	var addrs []netip.Prefix
	for i := range clientCount {
		v4, v6 := client(i)
		addrs = append(addrs, netip.PrefixFrom(v4, podsA4.Bits()), netip.PrefixFrom(v6, podsA6.Bits()))
	}
	return errors.Join(
		w.nodeA.addAddresses("pods", w.usable(netip.PrefixFrom(gateway4, podsA4.Bits()), netip.PrefixFrom(gateway6, podsA6.Bits()))...),
		w.clients.addAddresses("eth0", w.usable(addrs...)...),
		w.route(w.clients, everywhere4, gateway4),
		w.route(w.clients, everywhere6, gateway6),
	)
}

func (w *world) attachNodeB() error {
	if err := w.nodeA.wire("eth0", w.nodeB, "eth0"); err != nil {
		return err
	}
	var addrs []netip.Prefix
	for i := range backendNames {
		v4, v6 := backendAddrs(i)
		addrs = append(addrs, netip.PrefixFrom(v4, v4.BitLen()), netip.PrefixFrom(v6, v6.BitLen()))
	}
	return errors.Join(
		w.nodeA.addAddresses("eth0", w.usable(netip.PrefixFrom(nodeA4, 24), netip.PrefixFrom(nodeA6, 64))...),
		w.nodeB.addAddresses("eth0", w.usable(netip.PrefixFrom(nodeB4, 24), netip.PrefixFrom(nodeB6, 64))...),
		w.nodeB.addAddresses("lo", w.usable(addrs...)...),
		w.route(w.nodeA, podsB4, nodeB4),
		w.route(w.nodeA, podsB6, nodeB6),
		w.route(w.nodeB, everywhere4, nodeA4),
		w.route(w.nodeB, everywhere6, nodeA6),
	)
}

var (
	everywhere4 = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	everywhere6 = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
)

// route adds a route, unless it is an IPv6 one and there is no IPv6.
func (w *world) route(n *namespace, dst netip.Prefix, via netip.Addr) error {
	if via.Is6() && !w.ipv6 {
		return nil
	}
	return n.addRoute(dst, via)
}

// usable leaves IPv6 out where there is none.
func (w *world) usable(addrs ...netip.Prefix) []netip.Prefix {
	var list []netip.Prefix
	for _, a := range addrs {
		if w.ipv6 || a.Addr().Is4() {
			list = append(list, a)
		}
	}
	return list
}

func (w *world) close() {
	for _, n := range w.namespaces() {
		n.close()
	}
}

// dial connects from client i, or from the node itself if i is below 0.
func (w *world) dial(ctx context.Context, i int, to netip.AddrPort) (net.Conn, error) {
	n, from := w.nodeA, netip.Addr{}
	if i >= 0 {
		n = w.clients
		v4, v6 := client(i)
		if from = v4; to.Addr().Is6() {
			from = v6
		}
	}
	var d net.Dialer
	if from.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	}
	var c net.Conn
	err := n.do(func() (err error) {
		c, err = d.DialContext(ctx, "tcp", to.String())
		return err
	})
	return c, err
}

// listen opens a listening socket on node-b. It speaks plain TCP, not MPTCP.
func (w *world) listen(ctx context.Context, at netip.AddrPort) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	var l net.Listener
	err := w.nodeB.do(func() (err error) {
		l, err = lc.Listen(ctx, "tcp", at.String())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("backend: %w", err)
	}
	return l, nil
}

// hasIPv6 reports whether the kernel speaks IPv6 and new interfaces get it.
func hasIPv6() bool {
	off, err := os.ReadFile("/proc/sys/net/ipv6/conf/default/disable_ipv6")
	return err == nil && strings.TrimSpace(string(off)) == "0"
}
