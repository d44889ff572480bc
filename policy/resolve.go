package policy

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Resolve decides about a connection from client to dst. The caller must unmap
// IPv4-mapped IPv6 addresses. Resolve takes no lock and does not allocate.
func (t *Table) Resolve(p service.Protocol, client netip.Addr, dst netip.AddrPort) Verdict {
	d := t.find(service.Destination{Addr: dst.Addr(), Port: dst.Port(), Protocol: p})
	if d == nil {
		return t.unclaimed(dst.Addr())
	}
	v := Verdict{Port: t.snap.Ports[d.id], Kind: d.kind, Candidates: d.candidates}
	byLocal := d.is(local) // policy Local selected the candidates
	if d.kind == service.ClusterIP {
		t.internal(&v, client, dst.Addr())
	} else if t.external(&v, d, client) {
		byLocal = false
		v.Candidates = t.port(d.id).families[service.FamilyOf(dst.Addr())].cluster
	}
	switch {
	case (!d.is(usable) || len(v.Candidates) == 0 && !byLocal) && !d.is(holds):
		return deny(v, Refuse, RuleNoEndpoints)
	case d.is(limited) && !t.admits(d, service.FamilyOf(dst.Addr()), client):
		return deny(v, Drop, RuleSourceRanges)
	case d.kind == service.LoadBalancer && client.Is4() != dst.Addr().Is4() && !t.admitsOther(d, client):
		return deny(v, Drop, RuleSourceRanges)
	case !d.is(usable), len(v.Candidates) == 0 && !byLocal:
		return deny(v, Hold, RuleNoEndpoints)
	case len(v.Candidates) == 0:
		return deny(v, Drop, RuleNoLocalEndpoints)
	case len(v.Candidates) == 1 && v.Candidates[0].Addr.Addr() == client:
		v.Source, v.SourceRule = SourceNode, RuleMasquerade
	}
	v.Action = Accept
	return v
}

// deny returns a verdict without candidates.
func deny(v Verdict, a Action, r Rule) Verdict {
	return Verdict{Action: a, Port: v.Port, Kind: v.Kind, Rule: r}
}

// find returns the decision about a destination, or nil if no service has it (A3.1).
// A service's own address and port takes precedence over a node port.
func (t *Table) find(at service.Destination) *decision {
	if t.ownPorts.has(at.Port) {
		if d := t.index.Get(at); d != nil {
			return d
		}
	}
	if d := t.index.GetNodePort(service.FamilyOf(at.Addr), at.Protocol, at.Port); d != nil && t.node.hasNodePorts(at.Addr) {
		return d
	}
	return nil
}

// unclaimed returns the verdict for an address and port that no service has (A3.12,
// A3.13).
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

// isOthers reports whether the cluster IP belongs to a Service of another proxy.
func (t *Table) isOthers(a netip.Addr) bool {
	if len(t.snap.Others) == 0 {
		return false
	}
	_, is := t.snap.Others[a]
	return is
}

// admits reports whether the source ranges of a load balancer IP allow a client.
// Local pods are not exempt (A3.10). The node's own connections are allowed if the
// ranges contain its primary address. If the load balancer IP is assigned to the
// node, these connections may have that IP as their source (A3.11).
func (t *Table) admits(d *decision, fam service.Family, client netip.Addr) bool {
	if in := d.allowsInline(client); in || !d.is(overflow) {
		return in
	}
	c := t.port(d.id)
	w := c.families[fam].firewall
	return w.allowed.holds(client) ||
		w.fromNode && (t.node.isLocal(client) || slices.Contains(c.port.Families[fam].LoadBalancerIPs, client))
}

// admitsOther is admits for a client that a PROXY header names and that has not the family
// of the load balancer IP: the ranges of its own family count too.
func (t *Table) admitsOther(d *decision, client netip.Addr) bool {
	w := t.port(d.id).families[service.FamilyOf(client)].firewall
	return w == nil || w.allowed.holds(client)
}

// internal sets rule and source of a connection to a cluster IP (A3.2). The endpoint
// sees the address of a local pod, and the node's for all other clients (A3.8). If
// pods are unknown, it sees the client (A3.7).
func (t *Table) internal(v *Verdict, client, dst netip.Addr) {
	v.Rule = RuleInternalPolicy
	known := t.node.podsKnown[service.FamilyOf(client)]
	switch {
	case t.node.masqueradeAll, known && !t.node.isPod(client),
		// The node's own connections may have a source address that every host
		// routes to itself.
		client.IsLoopback(), client == dst:
		v.Source, v.SourceRule = SourceNode, RuleMasquerade
	default:
		v.Source, v.SourceRule = SourceClient, RulePreserve
	}
}

// external sets rule and source of a connection to any other address (A3.3). With
// policy Cluster, the endpoint sees the node (A3.8). external reports whether the
// client bypasses policy Local and uses the candidates of policy Cluster (A3.6).
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

// Steering returns the action for a destination without regard to the client:
// Accept if some client may be accepted, Refuse or Drop if that applies to all
// clients, None if no service has the destination.
func (t *Table) Steering(at service.Destination) Action {
	d := t.find(at)
	if d == nil {
		return t.unclaimed(at.Addr).Action
	}
	if !d.is(usable) && !d.is(holds) {
		return Refuse
	}
	if len(d.candidates) > 0 || !d.is(usable) {
		return Accept
	}
	switch {
	case d.kind == service.ClusterIP && d.is(local):
		return Drop
	case d.is(local) && len(t.port(d.id).families[service.FamilyOf(at.Addr)].cluster) > 0:
		return Accept // clients that bypass policy Local (A3.6)
	case d.is(holds):
		return Accept
	}
	return Refuse
}
