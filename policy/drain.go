package policy

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Drained is a set of endpoints that an operator drains: new connections avoid them
// as they avoid terminating endpoints, so that they serve only if no other endpoint
// is ready (A2.4, A2.5). Port 0 means all ports of an address. A set must not change.
type Drained map[netip.AddrPort]struct{}

// Has reports whether an endpoint is drained.
func (d Drained) Has(ep netip.AddrPort) bool {
	if len(d) == 0 {
		return false
	}
	_, one := d[ep]
	_, all := d[netip.AddrPortFrom(ep.Addr(), 0)]
	return one || all
}

// withDrains returns the endpoints as decisions see them. It copies only if one is
// drained.
func (n *node) withDrains(all []service.Endpoint) []service.Endpoint {
	if len(n.drained) == 0 || !slices.ContainsFunc(all, func(e service.Endpoint) bool { return n.drained.Has(e.Addr) }) {
		return all
	}
	seen := slices.Clone(all)
	for i := range seen {
		if e := &seen[i]; n.drained.Has(e.Addr) && (e.Ready || e.Serving && e.Terminating) {
			e.Ready, e.Serving, e.Terminating = false, true, true
		}
	}
	return seen
}
