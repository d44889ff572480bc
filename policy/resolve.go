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
	d := t.find(service.Destination{Addr: dst.Addr(), Port: dst.Port(), Protocol: p})
	if d == nil {
		return t.unclaimed(dst.Addr())
	}
	v := Verdict{Port: t.snap.Ports[d.id], Kind: d.kind, Candidates: d.candidates}
	byLocal := d.is(local) // policy Local chose
	if d.kind == service.ClusterIP {
		t.internal(&v, client, dst.Addr())
	} else if t.external(&v, d, client) {
		byLocal = false
		v.Candidates = t.port(d.id).families[service.FamilyOf(dst.Addr())].cluster
	}
	switch {
	case !d.is(usable), len(v.Candidates) == 0 && !byLocal:
		return deny(v, Refuse, RuleNoEndpoints)
	case d.is(limited) && !t.admits(d, service.FamilyOf(dst.Addr()), client):
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

// find gives what is decided of a destination, or nil where no service has it
// (A3.1). An address with the very port of a service goes before a node port.
func (t *Table) find(at service.Destination) *decision {
	if t.numbers.has(at.Port) {
		if d := t.index.Get(at); d != nil {
			return d
		}
	}
	if d := t.index.GetNodePort(service.FamilyOf(at.Addr), at.Protocol, at.Port); d != nil && t.node.hasNodePorts(at.Addr) {
		return d
	}
	return nil
}

// unclaimed decides where no service has the address and port (A3.12, A3.13).
func (t *Table) unclaimed(dst netip.Addr) Verdict {
	switch {
	case t.snap.HasClusterIP(dst):
		return Verdict{Action: Refuse, Kind: service.ClusterIP, Rule: RuleUnknownPort}
	case t.isOthers(dst):
		return Verdict{Rule: RuleOtherProxy}
	case contains(t.node.serviceCIDRs, dst):
		return Verdict{Action: Drop, Kind: service.ClusterIP, Rule: RuleUnknownPort}
	}
	return Verdict{Rule: RuleNotOurs}
}

// isOthers tells whether another proxy serves the Service that has a cluster IP.
func (t *Table) isOthers(a netip.Addr) bool {
	if len(t.snap.Others) == 0 {
		return false
	}
	_, is := t.snap.Others[a]
	return is
}

// admits tells whether the source ranges let a client in to a load balancer
// IP. Local pods are not exempt (A3.10); the node's own connections are, if its
// primary address is in the ranges. Where the IP is assigned to the node, they
// may come from that very IP (A3.11).
func (t *Table) admits(d *decision, fam service.Family, client netip.Addr) bool {
	if in := d.welcomes(client); in || !d.is(more) {
		return in
	}
	c := t.port(d.id)
	w := c.families[fam].firewall
	return w.guests.holds(client) ||
		w.fromNode && (t.node.isLocal(client) || slices.Contains(c.port.Families[fam].LoadBalancerIPs, client))
}

// internal says by what a cluster IP's candidates were chosen (A3.2), and what
// the endpoint sees: a local pod, or the node for all others (A3.8). Where pods
// cannot be told from others, it is the client (A3.7).
func (t *Table) internal(v *Verdict, client, dst netip.Addr) {
	v.Rule = RuleInternalPolicy
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
}

// external does that for all other addresses (A3.3). Under policy Cluster the
// endpoint sees the node (A3.8). It tells whether the client passes policy
// Local by, so that the candidates are those of policy Cluster (A3.6).
func (t *Table) external(v *Verdict, d *decision, client netip.Addr) (bypass bool) {
	v.Rule = RuleExternalPolicy
	v.Source, v.SourceRule = SourceNode, RuleMasquerade
	switch {
	case !d.is(local):
	case t.node.isPod(client):
		v.Rule = RuleShortCircuit
		v.Source, v.SourceRule = SourceClient, RulePreserve
		return true
	case t.node.isLocal(client):
		v.Rule = RuleShortCircuit
		return true
	default:
		v.Source, v.SourceRule = SourceClient, RulePreserve
	}
	return false
}

// Steering tells what becomes of a destination as such: Accept if there may be
// a client that is accepted, Refuse or Drop if it would be that for every
// client, None if it is not ours.
func (t *Table) Steering(at service.Destination) Action {
	d := t.find(at)
	if d == nil {
		return t.unclaimed(at.Addr).Action
	}
	if !d.is(usable) {
		return Refuse
	}
	if len(d.candidates) > 0 {
		return Accept
	}
	switch {
	case d.kind == service.ClusterIP && d.is(local):
		return Drop
	case d.is(local) && len(t.port(d.id).families[service.FamilyOf(at.Addr)].cluster) > 0:
		return Accept // those who pass policy Local by (A3.6)
	}
	return Refuse
}
