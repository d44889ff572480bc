package world

import (
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/bpffs"
)

// World is one client, one node and one server, joined client - node - server.
// The node forwards, so that the client reaches the server's own addresses too.
type World struct {
	Client, Node, Server *Namespace

	IPv6        bool
	SCTP        bool         // the service has SCTP ports too
	Clients     []netip.Addr // the client's addresses
	Endpoints   []netip.Addr // the server's addresses
	NodeAddr    netip.Addr   // the node's address on the client's side
	VIP         netip.Addr   // the service's address, inside ServiceCIDR
	ServiceCIDR netip.Prefix
	BPFRoot     string // a BPF file system, as the node has one

	unmount func()
}

// Options are a World's sizes.
type Options struct {
	IPv6      bool
	SCTP      bool
	Clients   int // addresses of the client, at least 1
	Endpoints int // addresses of the server, at least 1
	// Congestion is the TCP congestion control of all three; empty for the
	// system's.
	Congestion string
}

// New builds a World. The caller closes it.
func New(opts Options) (_ *World, err error) {
	w := &World{IPv6: opts.IPv6, SCTP: opts.SCTP, unmount: func() {}}
	defer func() {
		if err != nil {
			w.Close()
		}
	}()
	root, unmount, err := bpffs.Open()
	if err != nil {
		return nil, err
	}
	w.BPFRoot, w.unmount = root, unmount
	for _, ns := range []**Namespace{&w.Client, &w.Node, &w.Server} {
		if *ns, err = NewNamespace(); err != nil {
			return nil, err
		}
		if err = (*ns).Do(opts.settings); err != nil {
			return nil, err
		}
	}

	clientNet, serverNet := netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("10.2.0.0/16")
	w.ServiceCIDR, w.VIP = netip.MustParsePrefix("10.96.0.0/16"), netip.MustParseAddr("10.96.0.10")
	if opts.IPv6 {
		clientNet, serverNet = netip.MustParsePrefix("fd01::/64"), netip.MustParsePrefix("fd02::/64")
		w.ServiceCIDR, w.VIP = netip.MustParsePrefix("fd00:10:96::/112"), netip.MustParseAddr("fd00:10:96::10")
	}
	w.NodeAddr = clientNet.Addr().Next()
	nodeToServer := serverNet.Addr().Next()
	w.Clients = addresses(w.NodeAddr.Next(), opts.Clients)
	w.Endpoints = addresses(nodeToServer.Next(), opts.Endpoints)

	if err := w.Node.Do(w.forwarding); err != nil {
		return nil, err
	}
	if err := w.Client.Do(manyPorts); err != nil {
		return nil, err
	}
	if err := join(w.Node, "client", w.NodeAddr, w.Client, w.Clients, clientNet.Bits()); err != nil {
		return nil, err
	}
	if err := join(w.Node, "server", nodeToServer, w.Server, w.Endpoints, serverNet.Bits()); err != nil {
		return nil, err
	}
	return w, nil
}

// Strangers routes a range of unused addresses behind the client: packets to them
// end there. Only for an IPv4 World.
func (w *World) Strangers(addrs netip.Prefix) error {
	for ns, route := range map[*Namespace]*netlink.Route{
		w.Node:   {Dst: ipNet(addrs), Gw: w.Clients[0].AsSlice()},
		w.Client: {Dst: ipNet(addrs), Type: unix.RTN_BLACKHOLE},
	} {
		if err := ns.addRoute(route); err != nil {
			return fmt.Errorf("route to %s: %w", addrs, err)
		}
	}
	return nil
}

// Pods makes a range of unused addresses the server's, by one route. Only for an IPv4 World.
func (w *World) Pods(addrs netip.Prefix) error {
	for ns, route := range map[*Namespace]*netlink.Route{
		w.Node:   {Dst: ipNet(addrs), Gw: w.Endpoints[0].AsSlice()},
		w.Server: {Dst: ipNet(addrs), LinkIndex: 1, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST}, // lo
	} {
		if err := ns.addRoute(route); err != nil {
			return fmt.Errorf("route to %s: %w", addrs, err)
		}
	}
	return nil
}

func (n *Namespace) addRoute(route *netlink.Route) error {
	h, err := netlink.NewHandleAt(n.handle, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	defer h.Close()
	return h.RouteAdd(route)
}

// Close removes the World and kills its processes.
func (w *World) Close() {
	for _, ns := range []*Namespace{w.Client, w.Node, w.Server} {
		if ns != nil {
			ns.Close()
		}
	}
	w.unmount()
}

func addresses(first netip.Addr, n int) []netip.Addr {
	list := []netip.Addr{first}
	for len(list) < n {
		list = append(list, list[len(list)-1].Next())
	}
	return list
}

// join connects the node and a host with a veth pair and makes the node the host's
// default route.
func join(node *Namespace, name string, nodeAddr netip.Addr, host *Namespace, hostAddrs []netip.Addr, bits int) error {
	atNode, err := netlink.NewHandleAt(node.handle, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	defer atNode.Close()
	atHost, err := netlink.NewHandleAt(host.handle, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	defer atHost.Close()

	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "node", PeerNamespace: netlink.NsFd(host.FD())}
	if err := atNode.LinkAdd(veth); err != nil {
		return fmt.Errorf("veth %s: %w", name, err)
	}
	if _, err := raise(atNode, name, []netip.Addr{nodeAddr}, bits); err != nil {
		return err
	}
	link, err := raise(atHost, "node", hostAddrs, bits)
	if err != nil {
		return err
	}
	route := &netlink.Route{LinkIndex: link.Attrs().Index, Gw: nodeAddr.AsSlice()}
	if err := atHost.RouteAdd(route); err != nil {
		return fmt.Errorf("default route of %s: %w", name, err)
	}
	return nil
}

func raise(h *netlink.Handle, name string, addrs []netip.Addr, bits int) (netlink.Link, error) {
	link, err := h.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("link %s: %w", name, err)
	}
	for _, a := range addrs {
		addr := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, bits)), Flags: unix.IFA_F_NODAD}
		if err := h.AddrAdd(link, addr); err != nil {
			return nil, fmt.Errorf("address %s on %s: %w", a, name, err)
		}
	}
	if err := h.LinkSetUp(link); err != nil {
		return nil, fmt.Errorf("link %s up: %w", name, err)
	}
	return link, nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// settings are the sysctls of every namespace.
func (o Options) settings() error {
	if o.Congestion != "" {
		// Also for programs that cannot choose it, such as HAProxy.
		if err := sysctl("ipv4/tcp_congestion_control", o.Congestion); err != nil {
			return err
		}
	}
	if o.IPv6 {
		// No duplicate address detection.
		return sysctl("ipv6/conf/default/accept_dad", "0")
	}
	return nil
}

func (w *World) forwarding() error {
	if w.IPv6 {
		return sysctl("ipv6/conf/all/forwarding", "1")
	}
	return sysctl("ipv4/ip_forward", "1")
}

// manyPorts lets the load generator open tens of thousands of connections a second
// without running out of ports, which would measure the generator. They begin where
// Linux has them begin by default. The node keeps the kernel's defaults: its ports are
// part of what is measured.
func manyPorts() error {
	if err := sysctl("ipv4/ip_local_port_range", "32768 65535"); err != nil {
		return err
	}
	return sysctl("ipv4/tcp_tw_reuse", "1")
}

// sysctl writes a sysctl of the calling thread's network namespace.
func sysctl(name, value string) error {
	if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil {
		return fmt.Errorf("sysctl net/%s=%s: %w", name, value, err)
	}
	return nil
}
