package service

import (
	"net/netip"

	"k8s.io/apimachinery/pkg/util/sets"
)

// Host holds the addresses of this node's interfaces. It is read-only.
type Host struct {
	Addresses  []netip.Addr // of all interfaces
	Broadcasts []netip.Addr // of all links, without 255.255.255.255
}

// hostAddresses are the addresses of a Host and of this node's Node object as sets.
type hostAddresses struct {
	host      Host
	own       sets.Set[netip.Addr] // this node's
	broadcast sets.Set[netip.Addr] // of its links
}

// next returns the sets after a change, and the addresses that were added or
// removed.
func (h *hostAddresses) next(host Host, nodes *Nodes, self string) (after hostAddresses, changed sets.Set[netip.Addr]) {
	after = hostAddresses{host, unmapped(host.Addresses), unmapped(host.Broadcasts)}
	if n := nodes.Get(self); n != nil {
		after.own.Insert(n.Addresses...)
	}
	return after, h.own.SymmetricDifference(after.own).Union(h.broadcast.SymmetricDifference(after.broadcast))
}

func unmapped(list []netip.Addr) sets.Set[netip.Addr] {
	set := make(sets.Set[netip.Addr], len(list))
	for _, a := range list {
		set.Insert(a.Unmap())
	}
	return set
}
