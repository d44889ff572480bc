package policy

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Resolve decides about a connection from client to dst. IPv4 addresses mapped
// into IPv6 are for the caller to unmap. It takes no lock and allocates
// nothing.
func (t *Table) Resolve(p service.Protocol, client netip.Addr, dst netip.AddrPort) Verdict {
	c, kind := t.find(service.Destination{Addr: dst.Addr(), Port: dst.Port(), Protocol: p})
	if c == nil {
		return t.unclaimed(dst.Addr())
	}
	fam := service.FamilyOf(dst.Addr())
	f := &c.families[fam]
	v := Verdict{Port: c.port, Kind: kind}
	var local bool
	if kind == service.ClusterIP {
		local = t.internal(&v, c, f, client, dst.Addr())
	} else {
		local = t.external(&v, c, f, client)
	}
	switch {
	case !c.usable[fam], len(v.Candidates) == 0 && !local:
		return deny(v, Refuse, RuleNoEndpoints)
	case kind == service.LoadBalancer && !t.admits(c, fam, client):
		return deny(v, Drop, RuleSourceRanges)
	case len(v.Candidates) == 0:
		return deny(v, Drop, RuleNoLocalEndpoints)
	case len(v.Candidates) == 1 && v.Candidates[0].Addr.Addr() == client:
		v.Source, v.SourceRule = SourceNode, RuleMasquerade
	}
	v.Action = Accept
	return v
}

// deny makes a verdict that has no candidates.
func deny(v Verdict, a Action, r Rule) Verdict {
	return Verdict{Action: a, Port: v.Port, Kind: v.Kind, Rule: r}
}

// find gives the service port that a destination belongs to (A3.1). An address
// with the very port of a service goes before a node port.
func (t *Table) find(d service.Destination) (*compiled, service.AddressKind) {
	if id, kind, ok := t.snap.Find(d); ok {
		return t.port(id), kind
	}
	if id, ok := t.snap.FindNodePort(d.Protocol, d.Port); ok && t.node.hasNodePorts(d.Addr) {
		if c := t.port(id); c.exists[service.FamilyOf(d.Addr)] {
			return c, service.NodePort
		}
	}
	return nil, 0
}

// unclaimed decides where no service has the address and port (A3.12, A3.13).
func (t *Table) unclaimed(dst netip.Addr) Verdict {
	switch {
	case t.snap.HasClusterIP(dst):
		return Verdict{Action: Refuse, Kind: service.ClusterIP, Rule: RuleUnknownPort}
	case contains(t.node.serviceCIDRs, dst):
		return Verdict{Action: Drop, Kind: service.ClusterIP, Rule: RuleUnknownPort}
	}
	return Verdict{Rule: RuleNotOurs}
}

// admits tells whether the source ranges let a client in to a load balancer
// IP. Local pods are not exempt (A3.10); the node's own connections are, if its
// primary address is in the ranges. Where the IP is assigned to the node, they
// may come from that very IP (A3.11).
func (t *Table) admits(c *compiled, fam service.Family, client netip.Addr) bool {
	w := c.families[fam].firewall
	return w == nil || w.guests.holds(client) ||
		w.fromNode && (t.node.isLocal(client) || slices.Contains(c.port.Families[fam].LoadBalancerIPs, client))
}

// internal chooses for a cluster IP (A3.2) and says what the endpoint sees: a
// local pod, or the node for all others (A3.8). Where pods cannot be told from
// others, it is the client (A3.7). It tells whether policy Local chose.
func (t *Table) internal(v *Verdict, c *compiled, f *family, client, dst netip.Addr) (local bool) {
	v.Rule = RuleInternalPolicy
	v.Candidates = f.cluster
	if c.internalLocal {
		v.Candidates = f.local
	}
	known := t.node.podsKnown[service.FamilyOf(client)]
	switch {
	case t.node.masqueradeAll, known && !t.node.isPod(client),
		// A connection of the node itself may have an address that leads back
		// to the node from everywhere.
		client.IsLoopback(), client == dst:
		v.Source, v.SourceRule = SourceNode, RuleMasquerade
	default:
		v.Source, v.SourceRule = SourceClient, RulePreserve
	}
	return c.internalLocal
}

// external chooses for all other addresses (A3.3, A3.6). Under policy Cluster
// the endpoint sees the node (A3.8). It tells whether policy Local chose.
func (t *Table) external(v *Verdict, c *compiled, f *family, client netip.Addr) (local bool) {
	v.Rule = RuleExternalPolicy
	v.Candidates = f.cluster
	v.Source, v.SourceRule = SourceNode, RuleMasquerade
	if !c.externalLocal {
		return false
	}
	switch {
	case t.node.isPod(client):
		v.Rule = RuleShortCircuit
		v.Source, v.SourceRule = SourceClient, RulePreserve
		return false
	case t.node.isLocal(client):
		v.Rule = RuleShortCircuit
		return false
	}
	v.Candidates = f.local
	v.Source, v.SourceRule = SourceClient, RulePreserve
	return true
}

// Steering tells what becomes of a destination as such: Accept if there may be
// a client that is accepted, Refuse or Drop if it would be that for every
// client, None if it is not ours.
func (t *Table) Steering(d service.Destination) Action {
	c, kind := t.find(d)
	if c == nil {
		return t.unclaimed(d.Addr).Action
	}
	fam := service.FamilyOf(d.Addr)
	f := &c.families[fam]
	switch local := kind == service.ClusterIP && c.internalLocal; {
	case !c.usable[fam], !local && len(f.cluster) == 0:
		return Refuse
	case local && len(f.local) == 0:
		return Drop
	}
	return Accept
}
