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

// Opening is what policy says of one destination of a service port before a client
// is known: what a data path needs to serve it.
type Opening struct {
	service.Destination
	Name   service.PortName
	Kind   service.AddressKind
	Action Action // Accept, Refuse or Drop; None: no data path serves it
	// Limited says that only clients in Allowed get an answer; see Admission. It is
	// set only if the Action is Accept.
	Limited bool
	Allowed []netip.Prefix
}

// Equal reports whether two Openings say the same.
func (o *Opening) Equal(p *Opening) bool {
	return o.Destination == p.Destination && o.Name == p.Name && o.Kind == p.Kind && o.Action == p.Action &&
		o.Limited == p.Limited && slices.Equal(o.Allowed, p.Allowed)
}

// Open returns what policy says of a destination of a service port.
func (t *Table) Open(d service.Destination, name service.PortName, kind service.AddressKind) Opening {
	o := Opening{Destination: d, Name: name, Kind: kind, Action: t.Steering(d)}
	if o.Action == Accept {
		o.Allowed, o.Limited = t.Admission(d)
	}
	return o
}
