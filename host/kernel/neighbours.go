package kernel

import (
	"errors"
	"net/netip"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
)

// Neighbours knows the addresses that nobody on a link answers to (ARP, ND). It asks the
// kernel when it is asked. It is not safe for concurrent use.
type Neighbours struct {
	// Namespace is the descriptor of a network namespace, or 0 for the calling thread's.
	Namespace int

	nl         *netlink.Handle
	unresolved map[neighbour]struct{}
	at         time.Time // of unresolved
}

// neighbour is an address on a link.
type neighbour struct {
	link int
	addr netip.Addr
}

// neighboursAge is how long a list of neighbours is used: it may be long.
const neighboursAge = 250 * time.Millisecond

// Unreachable reports whether packets to an address have no route, or wait until somebody on
// the link answers to it or to the route's gateway. It returns false if that is not known.
func (n *Neighbours) Unreachable(addr netip.Addr) bool {
	if n.nl == nil {
		nl, err := Open(n.Namespace, syscall.NETLINK_ROUTE)
		if err != nil {
			return false
		}
		n.nl = nl
	}
	routes, err := n.nl.RouteGet(addr.AsSlice())
	if err != nil || len(routes) == 0 {
		return errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH)
	}
	if now := time.Now(); now.Sub(n.at) > neighboursAge {
		n.list()
		n.at = now
	}
	if gateway, ok := netip.AddrFromSlice(routes[0].Gw); ok {
		addr = gateway
	}
	_, is := n.unresolved[neighbour{routes[0].LinkIndex, addr.Unmap()}]
	return is
}

// list lists the neighbours of all links.
func (n *Neighbours) list() {
	n.unresolved = make(map[neighbour]struct{})
	for _, family := range []int{syscall.AF_INET, syscall.AF_INET6} {
		all, _ := Uninterrupted(func() ([]netlink.Neigh, error) { return n.nl.NeighList(0, family) }) // else they are not known
		for i := range all {
			addr, ok := netip.AddrFromSlice(all[i].IP)
			if ok && all[i].State&(netlink.NUD_INCOMPLETE|netlink.NUD_FAILED) != 0 {
				n.unresolved[neighbour{all[i].LinkIndex, addr.Unmap()}] = struct{}{}
			}
		}
	}
}

// Close closes what Unreachable has opened.
func (n *Neighbours) Close() {
	if n.nl != nil {
		n.nl.Close()
		n.nl = nil
	}
}
