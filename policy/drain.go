package policy

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Drain names endpoints: those with an address and port, of which port 0 means all, and
// with a pod if one is named. So a drain of a pod ends with it: neither the next pod with
// its address is drained, nor another one in the host's network, which shares it.
type Drain struct {
	Addr netip.AddrPort
	Pod  service.Name // or none
}

// Names reports whether a Drain names an endpoint.
func (d Drain) Names(e *service.Endpoint) bool {
	return slices.Contains(drainsOf(e), d)
}

// drainsOf returns all that would name an endpoint.
func drainsOf(e *service.Endpoint) []Drain {
	whole := netip.AddrPortFrom(e.Addr.Addr(), 0)
	list := []Drain{{Addr: e.Addr}, {Addr: whole}}
	if e.Pod.Name != "" {
		list = append(list, Drain{e.Addr, e.Pod}, Drain{whole, e.Pod})
	}
	return list
}

// Drained are the endpoints that an operator drains: new connections avoid them
// as they avoid terminating endpoints, so that they serve only if no other endpoint
// is ready (A2.4, A2.5). A set must not change.
type Drained map[Drain]struct{}

// By returns the entries that name an endpoint.
func (d Drained) By(e *service.Endpoint) []Drain {
	if len(d) == 0 {
		return nil
	}
	return slices.DeleteFunc(drainsOf(e), func(one Drain) bool { _, is := d[one]; return !is })
}

// Has reports whether an endpoint is drained.
func (d Drained) Has(e *service.Endpoint) bool { return len(d.By(e)) > 0 }

// withDrains returns the endpoints as decisions see them. It copies only if one is
// drained.
func (n *node) withDrains(all []service.Endpoint) []service.Endpoint {
	if len(n.drained) == 0 || !slices.ContainsFunc(all, func(e service.Endpoint) bool { return n.drained.Has(&e) }) {
		return all
	}
	seen := slices.Clone(all)
	for i := range seen {
		if e := &seen[i]; n.drained.Has(e) && (e.Ready || e.Serving && e.Terminating) {
			e.Ready, e.Serving, e.Terminating = false, true, true
		}
	}
	return seen
}
