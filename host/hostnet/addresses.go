package hostnet

import "net/netip"

// Addresses is the set of this node's own addresses; nil if they are not known. It
// never changes once it is made.
type Addresses map[netip.Addr]struct{}

// NewAddresses makes the set of a list.
func NewAddresses(list []netip.Addr) Addresses {
	set := make(Addresses, len(list))
	for _, a := range list {
		set[a] = struct{}{}
	}
	return set
}

// Known is false if nobody could say which addresses the node has.
func (s Addresses) Known() bool { return s != nil }

// Has reports whether an address is the node's own, as every loopback address is.
func (s Addresses) Has(a netip.Addr) bool {
	_, is := s[a]
	return is || a.IsLoopback()
}

// Within returns one of the addresses that lies in a range, if there is one.
func (s Addresses) Within(r netip.Prefix) (a netip.Addr, found bool) {
	for a := range s {
		if r.Contains(a) {
			return a, true
		}
	}
	return netip.Addr{}, false
}
