package policy

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Admission says which clients a destination answers at all: Resolve drops a
// client of the destination's family if and only if limited is set and none of
// the ranges in allowed holds it. It is what loadBalancerSourceRanges (A3.10,
// A3.11) and a policy Local without an endpoint here (A3.5, A3.6) come to, in a
// form that can be put in force before a connection is there.
//
// The ranges are sorted, none lies within another, and all are of the
// destination's family. They may be shared and are read-only. Limited with no
// range means that nobody gets an answer.
func (t *Table) Admission(d service.Destination) (allowed []netip.Prefix, limited bool) {
	c, kind := t.find(d)
	if c == nil {
		return nil, t.unclaimed(d.Addr).Action == Drop
	}
	fam := service.FamilyOf(d.Addr)
	f := &c.families[fam]
	if !c.usable[fam] {
		return nil, false // refused
	}
	if kind == service.ClusterIP {
		return nil, c.internalLocal && len(f.local) == 0
	}
	if c.externalLocal && len(f.local) == 0 {
		allowed, limited = t.node.bypass[fam], true
	}
	if kind != service.LoadBalancer || f.firewall == nil || !c.externalLocal && len(f.cluster) == 0 {
		return allowed, limited
	}
	guests := f.firewall.allowed(fam, t.node)
	if !limited {
		return guests, true
	}
	return intersect(allowed, guests), true
}

// allowed gives the ranges that admits tells of.
func (w *firewall) allowed(f service.Family, n *node) []netip.Prefix {
	list := slices.Clone(w.ranges)
	if w.fromNode {
		list = append(list, n.self[f]...)
		for _, a := range w.balancerIPs {
			list = append(list, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return tidy(list)
}

// selves finds the ranges of the node's own addresses, and of all clients that
// pass policy Local by (A3.6).
func (n *node) selves() {
	for f := range n.self {
		n.self[f] = []netip.Prefix{loopbackPrefix[f]}
	}
	for a := range n.local {
		f := service.FamilyOf(a)
		n.self[f] = append(n.self[f], netip.PrefixFrom(a, a.BitLen()))
	}
	for f := range n.self {
		n.self[f] = tidy(n.self[f])
		n.bypass[f] = n.self[f]
		if p := n.pods[f]; p.IsValid() {
			n.bypass[f] = tidy(append(slices.Clone(n.self[f]), p.Masked()))
		}
	}
}

// tidy sorts ranges and leaves out those that lie within others. It changes
// the list it is given.
func tidy(list []netip.Prefix) []netip.Prefix {
	slices.SortFunc(list, netip.Prefix.Compare) // the wider of two with one address first
	out := list[:0]
	for _, p := range list {
		if len(out) == 0 || !within(p, out[len(out)-1]) {
			out = append(out, p)
		}
	}
	return out
}

// intersect gives the ranges that are in both of two tidy lists, tidy too. Of
// two ranges that overlap, one lies within the other.
func intersect(a, b []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for len(a) > 0 && len(b) > 0 {
		switch p, q := a[0], b[0]; {
		case within(p, q):
			out, a = append(out, p), a[1:]
		case within(q, p):
			out, b = append(out, q), b[1:]
		case p.Addr().Less(q.Addr()):
			a = a[1:]
		default:
			b = b[1:]
		}
	}
	return out
}
