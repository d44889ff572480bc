package demo

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/internal/scratch"
	"github.com/sluice-proxy/sluice/service"
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
	nodeA, clients, nodeB *scratch.Namespace
	ipv6                  bool
}

const clientCount = 4

const v4, v6 = service.IPv4, service.IPv6

// families are those that the network has.
func (w *world) families() []service.Family {
	if w.ipv6 {
		return []service.Family{v4, v6}
	}
	return []service.Family{v4}
}

// second is IPv6, or IPv4 where there is no IPv6.
func (w *world) second() service.Family { return w.families()[len(w.families())-1] }

// The addresses and ranges, by service.Family.
var (
	addrA        = [2]netip.Addr{netip.MustParseAddr("192.168.77.1"), netip.MustParseAddr("fd00:77::1")}
	addrB        = [2]netip.Addr{netip.MustParseAddr("192.168.77.2"), netip.MustParseAddr("fd00:77::2")}
	podsA        = [2]netip.Prefix{netip.MustParsePrefix("10.244.0.0/24"), netip.MustParsePrefix("fd00:10:244::/64")}
	podsB        = [2]netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")}
	serviceCIDRs = [2]netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}
	everywhere   = [2]netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
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

// client returns an address of client i, which counts from 0.
func client(i int, f service.Family) netip.Addr { return host(podsA[f], 11+i) }

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
		to    **scratch.Namespace
		enter func(string) (*scratch.Namespace, error)
	}{
		{"node-a", &w.nodeA, scratch.Own},
		{"clients", &w.clients, scratch.New},
		{"node-b", &w.nodeB, scratch.New},
	} {
		if *n.to, err = n.enter(n.name); err != nil {
			return nil, err
		}
	}
	if err = untouched(w.nodeA); err != nil {
		return nil, err
	}
	for _, n := range w.namespaces() {
		withoutDAD(n)
	}
	if err = w.attachClients(); err == nil {
		err = w.attachNodeB()
	}
	if err == nil {
		err = w.settle(ctx)
	}
	return w, err
}

func (w *world) namespaces() []*scratch.Namespace {
	return slices.DeleteFunc([]*scratch.Namespace{w.nodeA, w.clients, w.nodeB}, func(n *scratch.Namespace) bool { return n == nil })
}

// settlePatience is more than duplicate address detection takes.
const settlePatience = 5 * time.Second

// settle waits until each address can be used. While an interface's link-local
// address cannot, the node asks for no IPv6 neighbour there.
func (w *world) settle(ctx context.Context) error {
	for _, n := range w.namespaces() {
		if err := until(ctx, settlePatience, func() (bool, error) { return settled(n) }); err != nil {
			return fmt.Errorf("the addresses of %s can be used: %w", n, err)
		}
	}
	return nil
}

func (w *world) attachClients() error {
	err := w.nodeA.Wire("pods", w.clients, "eth0")
	for _, f := range w.families() {
		gateway := host(podsA[f], 1)
		var addrs []netip.Prefix
		for i := range clientCount {
			addrs = append(addrs, netip.PrefixFrom(client(i, f), podsA[f].Bits()))
		}
		err = cmp.Or(err,
			w.nodeA.AddAddresses("pods", netip.PrefixFrom(gateway, podsA[f].Bits())),
			w.clients.AddAddresses("eth0", addrs...),
			w.clients.AddRoute(everywhere[f], gateway))
	}
	return err
}

func (w *world) attachNodeB() error {
	err := w.nodeA.Wire("eth0", w.nodeB, "eth0")
	for _, f := range w.families() {
		length := [2]int{24, 64}[f]
		var addrs []netip.Prefix
		for i := range backendNames {
			addrs = append(addrs, netip.PrefixFrom(backendAddr(i, f), addrB[f].BitLen()))
		}
		err = cmp.Or(err,
			w.nodeA.AddAddresses("eth0", netip.PrefixFrom(addrA[f], length)),
			w.nodeB.AddAddresses("eth0", netip.PrefixFrom(addrB[f], length)),
			w.nodeB.AddAddresses("lo", addrs...),
			w.nodeA.AddRoute(podsB[f], addrB[f]),
			w.nodeB.AddRoute(everywhere[f], addrA[f]))
	}
	return err
}

func (w *world) close() {
	for _, n := range w.namespaces() {
		n.Close()
	}
}

// dial connects from client i, or from the node itself if i is below 0.
func (w *world) dial(ctx context.Context, i int, to netip.AddrPort) (net.Conn, error) {
	n := w.nodeA
	var d net.Dialer
	if i >= 0 {
		n = w.clients
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(client(i, service.FamilyOf(to.Addr())), 0))
	}
	var c net.Conn
	err := n.Do(func() (err error) {
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
	err := w.nodeB.Do(func() (err error) {
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
