package policy

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Uniform is what holds for all clients of a destination alike that SourceRanges admits, other than this
// node's own if OfNode is not set. It accepts connections. Exceptions: a client that is the endpoint, which sees the node's
// address, or has the destination as its address (A3.8).
type Uniform struct {
	Port *service.Port
	// Candidates are those of clients that are no Pods; where they are none, Resolve drops such a client
	// (A3.5). ForPods are those of Pods, which reach endpoints on other nodes, too (A3.6).
	Candidates, ForPods []service.Endpoint
	// HidesPods says that endpoints see the node's address instead of a Pod's, HidesOthers the same of all
	// other clients (A3.8).
	HidesPods, HidesOthers bool
	// OfNode says that this node's own clients are like others, or like Pods at an address of a Pod range;
	// but for loopback addresses, and for source ranges.
	OfNode bool
}

// Uniform returns what Resolve answers to clients of a destination, or false: no client is accepted.
func (t *Table) Uniform(at service.Destination) (u Uniform, ok bool) {
	d := t.find(at)
	if d == nil || !d.is(usable) {
		return u, false
	}
	family := service.FamilyOf(at.Addr)
	u = Uniform{Port: t.snap.Ports[d.id], Candidates: d.candidates, ForPods: d.candidates, OfNode: d.kind == service.ClusterIP || !d.is(local)}
	switch {
	case d.kind == service.ClusterIP:
		u.HidesPods, u.HidesOthers = t.node.masqueradeAll, t.node.masqueradeAll || t.node.podsKnown[family]
	case d.is(local):
		u.ForPods = t.port(d.id).families[family].cluster
	default:
		u.HidesPods, u.HidesOthers = true, true
	}
	return u, len(u.Candidates)+len(u.ForPods) > 0
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
