package policy

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Uniform is a verdict that holds for all clients of a destination alike that SourceRanges admits,
// other than this node's own. It accepts connections, and endpoints see the client's address. Exceptions: a client that is the
// endpoint, or has the destination as its address (A3.8).
type Uniform struct {
	Port       *service.Port
	Candidates []service.Endpoint
	// PodsOnly restricts it to the clients in Pods; of others, endpoints see the node's
	// address (A3.8). OutsideOnly restricts it to all others; Pods reach endpoints on other
	// nodes, too (A3.6).
	PodsOnly, OutsideOnly bool
}

// Uniform returns what Resolve answers to clients of a destination, or false: no client is accepted,
// or clients' addresses are hidden (A3.8).
func (t *Table) Uniform(at service.Destination) (u Uniform, ok bool) {
	d := t.find(at)
	if d == nil || !d.is(usable) || len(d.candidates) == 0 {
		return u, false
	}
	internal := d.kind == service.ClusterIP
	if internal && t.node.masqueradeAll || !internal && !d.is(local) {
		return u, false
	}
	return Uniform{
		Port:        t.snap.Ports[d.id],
		Candidates:  d.candidates,
		PodsOnly:    internal && t.node.podsKnown[service.FamilyOf(at.Addr)],
		OutsideOnly: !internal,
	}, true
}

// SourceRanges returns the ranges of clients that a destination admits (A3.10, A3.11), sorted and not
// nested. True means that Resolve drops all others of the destination's family, whatever else it
// says of them; false, that all are admitted. The ranges are shared and read-only.
func (t *Table) SourceRanges(at service.Destination) (admitted []netip.Prefix, is bool) {
	d := t.find(at)
	if d == nil || !d.is(limited) || !d.is(usable) {
		return nil, false
	}
	return t.admitted(t.port(d.id), service.FamilyOf(at.Addr)), true
}

// Pods returns the ranges of local pods (A4.6).
func (t *Table) Pods() []netip.Prefix {
	return slices.Concat(t.node.pods[service.IPv4].list, t.node.pods[service.IPv6].list)
}

// UniformAs reports whether Uniform says the same as prev's about service ports that have
// not changed.
func (t *Table) UniformAs(prev *Table) bool {
	return t.node.masqueradeAll == prev.node.masqueradeAll && t.node.podsKnown == prev.node.podsKnown
}
