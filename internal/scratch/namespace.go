// Package scratch makes network namespaces with interfaces, addresses and routes, for
// trials and for the demo. They live as long as a descriptor or a process refers to
// them, so that a process that is killed leaves none behind.
package scratch

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Namespace is one network namespace. Its methods may be called from any goroutine.
type Namespace struct {
	*netlink.Handle

	name string
	file *os.File
}

// Own returns the namespace that the process runs in, with lo up. The name is for
// errors.
func Own(name string) (*Namespace, error) { return open(name, sys.OwnNetNS) }

// New makes an empty namespace, with lo up.
func New(name string) (*Namespace, error) { return open(name, sys.NewNetNS) }

func open(name string, open func() (*os.File, error)) (*Namespace, error) {
	n := &Namespace{name: name}
	var err error
	if n.file, err = open(); err == nil {
		n.Handle, err = netlink.NewHandleAt(netns.NsHandle(n.FD()), syscall.NETLINK_ROUTE)
	}
	if err == nil {
		err = n.Up("lo")
	}
	if err != nil {
		n.Close()
		return nil, fmt.Errorf("network namespace %s: %w", name, err)
	}
	return n, nil
}

// String returns the name.
func (n *Namespace) String() string { return n.name }

// FD returns the descriptor of the namespace.
func (n *Namespace) FD() int { return int(n.file.Fd()) }

// Close lets go of the namespace.
func (n *Namespace) Close() {
	if n.Handle != nil {
		n.Handle.Close()
	}
	if n.file != nil {
		_ = n.file.Close()
	}
}

// Do runs f inside the namespace, on a thread that runs nothing else. Sockets and
// processes that f makes belong to the namespace for ever; goroutines that f starts
// are outside of it.
func (n *Namespace) Do(f func() error) error { return sys.InNetNS(n.FD(), f) }

// Up brings an interface up.
func (n *Namespace) Up(ifname string) error {
	link, err := n.LinkByName(ifname)
	if err == nil {
		err = n.LinkSetUp(link)
	}
	if err != nil {
		return fmt.Errorf("bring up %s: %w", ifname, err)
	}
	return nil
}

// Wire connects the namespace to another by a pair of veth interfaces, both up.
func (n *Namespace) Wire(ifname string, peer *Namespace, peerIf string) error {
	return n.wire(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: ifname}, PeerName: peerIf}, peer)
}

// WireQuietly is Wire for interfaces that have the same hardware address and ask nobody
// for others', so that no packet waits for that.
func (n *Namespace) WireQuietly(ifname string, peer *Namespace, peerIf string) error {
	address := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	return n.wire(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: ifname, HardwareAddr: address}, PeerName: peerIf, PeerHardwareAddr: address}, peer)
}

func (n *Namespace) wire(veth *netlink.Veth, peer *Namespace) error {
	veth.PeerNamespace = netlink.NsFd(peer.FD())
	if err := n.LinkAdd(veth); err != nil {
		return fmt.Errorf("veth pair %s and %s: %w", veth.Name, veth.PeerName, err)
	}
	// The end that is up first sends once the kernel has noticed the other.
	for _, end := range []struct {
		of   *Namespace
		name string
	}{{peer, veth.PeerName}, {n, veth.Name}} {
		if veth.PeerHardwareAddr != nil {
			link, err := end.of.LinkByName(end.name)
			if err == nil {
				err = end.of.LinkSetARPOff(link)
			}
			if err != nil {
				return fmt.Errorf("interface %s: %w", end.name, err)
			}
		}
		if err := end.of.Up(end.name); err != nil {
			return err
		}
	}
	return nil
}

// AddAddresses adds addresses to an interface, usable at once.
func (n *Namespace) AddAddresses(ifname string, addrs ...netip.Prefix) error {
	link, err := n.LinkByName(ifname)
	if err != nil {
		return fmt.Errorf("%s: %w", ifname, err)
	}
	for _, a := range addrs {
		addr := &netlink.Addr{IPNet: ipNet(a)}
		if a.Addr().Is6() {
			addr.Flags = syscall.IFA_F_NODAD // no duplicate address detection
		}
		if err := n.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("address %s on %s: %w", a, ifname, err)
		}
	}
	return nil
}

// AddRoute adds a route by a router.
func (n *Namespace) AddRoute(dst netip.Prefix, via netip.Addr) error {
	if err := n.RouteAdd(&netlink.Route{Dst: ipNet(dst), Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("route to %s via %s: %w", dst, via, err)
	}
	return nil
}

// AddLinkRoute adds a route by an interface.
func (n *Namespace) AddLinkRoute(dst netip.Prefix, ifname string) error {
	link, err := n.LinkByName(ifname)
	if err == nil {
		err = n.RouteAdd(&netlink.Route{Dst: ipNet(dst), LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK})
	}
	if err != nil {
		return fmt.Errorf("route to %s by %s: %w", dst, ifname, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
