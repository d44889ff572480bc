package policy

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Admission returns the clients that a destination answers. Resolve drops a client
// of the destination's family if and only if limited is set and no range in allowed
// contains the client. Listening sockets use it to drop clients before there is a
// connection. It combines loadBalancerSourceRanges (A3.10, A3.11) and policy Local
// without a local endpoint (A3.5, A3.6). Where load balancers name clients by the PROXY
// protocol, source ranges are for those clients, so that they do not limit.
//
// The ranges are of the destination's family, sorted, and not nested. They may be
// shared and are read-only. Limited without ranges drops all clients.
func (t *Table) Admission(d service.Destination) (allowed []netip.Prefix, limited bool) {
	found := t.find(d)
	if found == nil {
		return nil, t.unclaimed(d.Addr).Action == Drop
	}
	c, kind, fam := t.port(found.id), found.kind, service.FamilyOf(d.Addr)
	f := &c.families[fam]
	if !f.usable && c.port.Hold == 0 {
		return nil, false // refused, not dropped
	}
	if kind == service.ClusterIP && !f.usable {
		return nil, false // held
	}
	if kind == service.ClusterIP {
		return nil, c.internalLocal && len(f.local) == 0
	}
	if c.externalLocal && len(f.local) == 0 && f.usable {
		allowed, limited = t.node.bypass[fam], true
	}
	if kind != service.LoadBalancer || f.firewall == nil || len(c.port.AcceptProxy) > 0 || !c.externalLocal && len(f.cluster) == 0 && c.port.Hold == 0 {
		return allowed, limited
	}
	inRanges := t.admitted(c, fam)
	if !limited {
		return inRanges, true
	}
	return intersect(allowed, inRanges), true
}

// admitted returns the ranges of the clients for which admits is true. The port
// must have a firewall.
func (t *Table) admitted(c *compiled, fam service.Family) []netip.Prefix {
	w := c.families[fam].firewall
	if !w.fromNode {
		return w.allowed.list
	}
	list := slices.Concat(w.allowed.list, t.node.self[fam].list)
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
