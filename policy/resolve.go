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
	port, kind := t.find(service.Destination{Addr: dst.Addr(), Port: dst.Port(), Protocol: p})
	if port == nil {
		return t.unclaimed(dst.Addr())
	}
	f := service.FamilyOf(dst.Addr())
	c := t.ports[port.ID]
	l := &c.lists[f]
	v := Verdict{Port: port, Kind: kind}
	if !l.any {
		v.Action, v.Rule = Refuse, RuleNoEndpoints
		return v
	}
	if kind == service.LoadBalancer && !t.mayEnter(c, f, client) {
		v.Action, v.Rule = Drop, RuleSourceRanges
		return v
	}
	if kind == service.ClusterIP {
		t.internal(&v, l, client, dst.Addr())
	} else {
		t.external(&v, l, client)
	}
	switch {
	case len(v.Candidates) == 0:
		v.Action, v.Rule, v.SourceRule = Drop, RuleNoLocalEndpoints, 0
	case len(v.Candidates) == 1 && v.Candidates[0].Addr.Addr() == client:
		v.Action, v.Source, v.SourceRule = Accept, SourceNode, RuleMasquerade
	default:
		v.Action = Accept
	}
	return v
}

// find gives the service port that a destination belongs to (A3.1). An address
// with the very port of a service goes before a node port.
func (t *Table) find(d service.Destination) (*service.Port, service.AddressKind) {
	if port, kind, ok := t.snap.Lookup(d); ok {
		return port, kind
	}
	if port, ok := t.snap.LookupNodePort(d.Protocol, d.Port); ok &&
		port.Families[service.FamilyOf(d.Addr)].Exists && t.node.hasNodePorts(d.Addr) {
		return port, service.NodePort
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

// mayEnter tells whether the source ranges of load balancer IPs let a client
// in. Local pods are not exempt (A3.10); the node's own connections are, if
// its primary address is in the ranges (A3.11).
func (t *Table) mayEnter(c *compiled, f service.Family, client netip.Addr) bool {
	view := &c.port.Families[f]
	return len(view.SourceRanges) == 0 || contains(view.SourceRanges, client) ||
		c.fromNode[f] && (t.node.isLocal(client) || slices.Contains(view.LoadBalancerIPs, client))
}

// internal chooses for a cluster IP (A3.2) and says what the endpoint sees: a
// local pod, or the node for all others (A3.8). Where pods cannot be told from
// others, it is the client (A3.7).
func (t *Table) internal(v *Verdict, l *lists, client, dst netip.Addr) {
	v.Rule = RuleInternalPolicy
	v.Candidates = l.cluster
	if v.Port.InternalLocal {
		v.Candidates = l.local
	}
	known := t.node.pods[service.FamilyOf(client)].IsValid()
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

// external chooses for all other addresses (A3.3, A3.6). Under policy Cluster
// the endpoint sees the node (A3.8).
func (t *Table) external(v *Verdict, l *lists, client netip.Addr) {
	v.Rule = RuleExternalPolicy
	v.Candidates = l.cluster
	v.Source, v.SourceRule = SourceNode, RuleMasquerade
	if !v.Port.ExternalLocal {
		return
	}
	switch {
	case t.node.isPod(client):
		v.Rule = RuleShortCircuit
		v.Source, v.SourceRule = SourceClient, RulePreserve
	case t.node.isLocal(client):
		v.Rule = RuleShortCircuit
	default:
		v.Candidates = l.local
		v.Source, v.SourceRule = SourceClient, RulePreserve
	}
}

// Steering tells what becomes of a destination as such: Accept if there may be
// a client that is accepted, Refuse or Drop if it would be that for every
// client, None if it is not ours.
func (t *Table) Steering(d service.Destination) Action {
	port, kind := t.find(d)
	if port == nil {
		return t.unclaimed(d.Addr).Action
	}
	l := &t.ports[port.ID].lists[service.FamilyOf(d.Addr)]
	switch {
	case !l.any:
		return Refuse
	case kind == service.ClusterIP && port.InternalLocal && len(l.local) == 0:
		return Drop
	}
	return Accept
}
