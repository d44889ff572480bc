package demo

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// namespace is one network namespace. It lives as long as a descriptor or a
// process refers to it, so that a demo that is killed leaves none behind. Its
// methods may be called from any goroutine.
type namespace struct {
	name string
	file *os.File
	nl   *netlink.Handle
}

// ownNamespace returns the namespace that the process runs in, with lo up.
func ownNamespace(name string) (*namespace, error) { return openNamespace(name, sys.OwnNetNS) }

// newNamespace makes an empty namespace, with lo up.
func newNamespace(name string) (*namespace, error) { return openNamespace(name, sys.NewNetNS) }

func openNamespace(name string, open func() (*os.File, error)) (*namespace, error) {
	n := &namespace{name: name}
	var err error
	if n.file, err = open(); err == nil {
		n.nl, err = netlink.NewHandleAt(netns.NsHandle(n.file.Fd()), syscall.NETLINK_ROUTE)
	}
	if err == nil {
		err = n.up("lo")
	}
	if err != nil {
		n.close()
		return nil, fmt.Errorf("network namespace %s: %w", name, err)
	}
	return n, nil
}

func (n *namespace) close() {
	if n.nl != nil {
		n.nl.Close()
	}
	if n.file != nil {
		_ = n.file.Close()
	}
}

// do runs f inside the namespace, on a thread that runs nothing else. Sockets
// and processes that f makes belong to the namespace for ever; goroutines that
// f starts are outside of it.
func (n *namespace) do(f func() error) error {
	return sys.InNetNS(int(n.file.Fd()), f)
}

// untouched returns an error if the namespace has any interface but lo: then it was
// not made for the demo.
func (n *namespace) untouched() error {
	links, err := n.nl.LinkList()
	if err != nil {
		return fmt.Errorf("interfaces of %s: %w", n.name, err)
	}
	for _, l := range links {
		if name := l.Attrs().Name; name != "lo" && l.Attrs().Flags&net.FlagUp != 0 {
			return fmt.Errorf("the network namespace of %s is in use: it has the interface %s", n.name, name)
		}
	}
	return nil
}

func (n *namespace) up(ifname string) error {
	link, err := n.nl.LinkByName(ifname)
	if err == nil {
		err = n.nl.LinkSetUp(link)
	}
	if err != nil {
		return fmt.Errorf("bring up %s: %w", ifname, err)
	}
	return nil
}

// addAddresses adds addresses to an interface, usable at once.
func (n *namespace) addAddresses(ifname string, addrs ...netip.Prefix) error {
	link, err := n.nl.LinkByName(ifname)
	if err != nil {
		return fmt.Errorf("%s: %w", ifname, err)
	}
	for _, a := range addrs {
		addr := &netlink.Addr{IPNet: ipNet(a)}
		if a.Addr().Is6() {
			addr.Flags = ifaFNoDAD
		}
		if err := n.nl.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("address %s on %s: %w", a, ifname, err)
		}
	}
	return nil
}

// ifaFNoDAD is IFA_F_NODAD: no duplicate address detection.
const ifaFNoDAD = 0x02

// withoutDAD switches duplicate address detection off for new interfaces: it takes
// seconds and finds nothing on a veth pair. Where it cannot be switched off (/proc
// is read-only in some containers), settled waits for its end.
func (n *namespace) withoutDAD() {
	_ = n.do(func() error {
		var all error
		for _, of := range []string{"all", "default"} {
			all = errors.Join(all, os.WriteFile("/proc/sys/net/ipv6/conf/"+of+"/accept_dad", []byte("0"), 0))
		}
		return all
	})
}

// settled reports whether each IPv6 address can be used.
func (n *namespace) settled() (bool, error) {
	addrs, err := n.nl.AddrList(nil, netlink.FAMILY_V6)
	if err != nil {
		return false, fmt.Errorf("addresses: %w", err)
	}
	return !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.Flags&ifaFTentative != 0 }), nil
}

// ifaFTentative is IFA_F_TENTATIVE: duplicate address detection is not finished.
const ifaFTentative = 0x40

func (n *namespace) addRoute(dst netip.Prefix, via netip.Addr) error {
	if err := n.nl.RouteAdd(&netlink.Route{Dst: ipNet(dst), Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("route to %s via %s: %w", dst, via, err)
	}
	return nil
}

// wire connects the namespace to another by a pair of veth interfaces, both up.
func (n *namespace) wire(ifname string, peer *namespace, peerIf string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = ifname
	veth := netlink.NewVeth(attrs)
	veth.PeerName = peerIf
	veth.PeerNamespace = netlink.NsFd(peer.file.Fd())
	if err := n.nl.LinkAdd(veth); err != nil {
		return fmt.Errorf("veth pair %s and %s: %w", ifname, peerIf, err)
	}
	if err := n.up(ifname); err != nil {
		return err
	}
	return peer.up(peerIf)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
