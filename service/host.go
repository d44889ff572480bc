package service

import (
	"net/netip"
)

// Host holds the addresses of this node's interfaces. It is read-only.
type Host struct {
	Addresses  []netip.Addr // of all interfaces
	Broadcasts []netip.Addr // of all links, without 255.255.255.255
}

// hostAddresses are the addresses of a Host and of this node's Node object as sets.
type hostAddresses struct {
	host      Host
	own       map[netip.Addr]struct{} // this node's
	broadcast map[netip.Addr]struct{} // of its links
}

// next returns the sets after a change, and the addresses that were added or
// removed.
func (h *hostAddresses) next(host Host, nodes *Nodes, self string) (after hostAddresses, changed map[netip.Addr]struct{}) {
	after = hostAddresses{host, setOf(host.Addresses), setOf(host.Broadcasts)}
	if n := nodes.Get(self); n != nil {
		for _, a := range n.Addresses {
			after.own[a] = struct{}{}
		}
	}
	changed = make(map[netip.Addr]struct{})
	for _, sets := range [][2]map[netip.Addr]struct{}{{h.own, after.own}, {h.broadcast, after.broadcast}} {
		for i := range sets {
			for a := range sets[i] {
				if _, same := sets[1-i][a]; !same {
					changed[a] = struct{}{}
				}
			}
		}
	}
	return after, changed
}

func (h *hostAddresses) isOwn(a netip.Addr) bool       { return in(h.own, a) }
func (h *hostAddresses) isBroadcast(a netip.Addr) bool { return in(h.broadcast, a) }

func setOf(list []netip.Addr) map[netip.Addr]struct{} {
	set := make(map[netip.Addr]struct{})
	for _, a := range list {
		set[a.Unmap()] = struct{}{}
	}
	return set
}

func in(set map[netip.Addr]struct{}, a netip.Addr) bool {
	_, is := set[a]
	return is
}
