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
	found := t.find(d)
	if found == nil {
		return nil, t.unclaimed(d.Addr).Action == Drop
	}
	c, kind, fam := t.port(found.id), found.kind, service.FamilyOf(d.Addr)
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
	guests := t.admitted(c, fam)
	if !limited {
		return guests, true
	}
	return intersect(allowed, guests), true
}

// admitted gives the ranges that admits tells of, where there is a firewall.
func (t *Table) admitted(c *compiled, fam service.Family) []netip.Prefix {
	w := c.families[fam].firewall
	if !w.fromNode {
		return w.guests.list
	}
	list := slices.Concat(w.guests.list, t.node.self[fam].list)
	for _, a := range c.port.Families[fam].LoadBalancerIPs {
		list = append(list, whole(a))
	}
	return tidy(list)
}
