package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/service"
)

// Explanation is Resolve's verdict about a connection with its reasons. It is safe
// for concurrent reads.
type Explanation struct {
	Verdict Verdict
	// Local reports whether the service's traffic policy for this kind of
	// address is Local (A2.2).
	Local bool
	// Rules are the IDs of the rules that decided: on the action first, then on
	// the endpoints, then on the source.
	Rules []string
	// Reason is the explanation in one sentence without a full stop.
	Reason string

	table  *Table
	client netip.Addr
	dst    netip.AddrPort
	from   *choice // nil without a service port
}

// choice describes how the candidates were selected from a list of endpoints.
type choice struct {
	all   []service.Endpoint
	local bool // by policy Local
	// ready and draining count endpoints of the list. Draining ones are used
	// only if none is ready (A2.4, A2.5).
	ready, draining int
	mode            mode
	keys            []string
	key             string // the topology key that matched; "" if none did
	drained         Drained
}

// EndpointGrounds explains why an endpoint is a candidate or not.
type EndpointGrounds struct {
	Endpoint  *service.Endpoint
	Candidate bool
	Reason    string
	Rule      string // the ID of the deciding rule; may be empty
}

// Explain calls Resolve and explains the verdict.
func (t *Table) Explain(p service.Protocol, client netip.Addr, dst netip.AddrPort) Explanation {
	e := Explanation{Verdict: t.Resolve(p, client, dst), table: t, client: client, dst: dst}
	v := &e.Verdict
	if v.Port == nil {
		e.Rules = []string{v.Rule.String()}
		e.Reason = e.unclaimed(p)
		return e
	}
	e.Local = v.Port.ExternalLocal
	if v.Kind == service.ClusterIP {
		e.Local = v.Port.InternalLocal
	}
	view := &v.Port.Families[service.FamilyOf(dst.Addr())]
	e.from = e.choose(view)
	e.Rules = append(e.Rules, v.Rule.String())
	if v.Action != Accept {
		if e.Reason = e.denied(view); v.Action == Hold {
			e.Reason += fmt.Sprintf(", and connections wait for one up to %s", v.Port.Hold)
		}
		return e
	}
	e.accepted()
	return e
}

// unclaimed returns the reason if no service has the destination.
func (e *Explanation) unclaimed(p service.Protocol) string {
	at := e.dst.Addr()
	switch {
	case e.Verdict.Rule == RuleOtherProxy:
		return fmt.Sprintf("%s is the cluster IP of %s", at, e.table.snap.Others[at])
	case e.Verdict.Action == None:
		return "no service has this address and port"
	case e.table.snap.HasClusterIP(at):
		return fmt.Sprintf("%s is a cluster IP, but its service has no %s port %d", at, p, e.dst.Port())
	}
	return fmt.Sprintf("%s is in a range of cluster IPs, but no service has it", at)
}

// bypassed reports whether the client bypasses policy Local (A3.6).
func (e *Explanation) bypassed() bool {
	return e.Verdict.Kind != service.ClusterIP && e.Local &&
		(e.table.node.isPod(e.client) || e.table.node.isLocal(e.client))
}

// choose reconstructs how Resolve selected its candidates.
func (e *Explanation) choose(view *service.FamilyView) *choice {
	c := &choice{all: e.table.node.withDrains(view.Endpoints), drained: e.table.node.drained, local: e.Local && !e.bypassed()}
	for i := range c.all {
		switch ep := &c.all[i]; {
		case c.local && !ep.Local:
		case ep.Ready:
			c.ready++
		case draining(ep):
			c.draining++
		}
	}
	switch n := e.table.node; {
	case c.local:
	case len(e.Verdict.Port.TopologyKeys) > 0:
		c.keys = e.Verdict.Port.TopologyKeys
		for i, key := range c.keys {
			if len(keyedEndpoints(c.all, c.keys[i:i+1], n)) > 0 {
				c.key = key
				break
			}
		}
	default:
		c.mode = topologyMode(c.all, n)
	}
	return c
}

// denied returns the reason for a refusal or a drop by a service port.
func (e *Explanation) denied(view *service.FamilyView) string {
	total := len(view.Endpoints)
	switch {
	case e.Verdict.Rule == RuleSourceRanges:
		return fmt.Sprintf("%s is in none of the loadBalancerSourceRanges", e.client)
	case e.Verdict.Rule == RuleNoLocalEndpoints:
		return fmt.Sprintf("the %s traffic policy is Local, and no endpoint on this node can serve", e.traffic())
	case total == 0:
		return "the service has no endpoints"
	case e.from.ready+e.from.draining > 0:
		return "no endpoint's node has this node's value for any of the topology keys " + strings.Join(e.from.keys, ", ")
	}
	return fmt.Sprintf("the service has %s, but none that can serve", count(total, "endpoint"))
}

// accepted sets Rules and Reason of an accepted connection.
func (e *Explanation) accepted() {
	v, c := &e.Verdict, e.from
	var b strings.Builder
	switch {
	case v.Rule != RuleShortCircuit:
		fmt.Fprintf(&b, "%s traffic policy %s", e.traffic(), TrafficPolicy(e.Local))
	case e.table.node.isPod(e.client):
		b.WriteString("a pod bypasses external traffic policy Local")
	default:
		b.WriteString("this node itself bypasses external traffic policy Local")
	}
	fmt.Fprintf(&b, ": %d of %s", len(v.Candidates), count(len(c.all), "endpoint"))
	switch {
	case c.local && c.ready == 0:
		e.because(&b, "A2.5", ", terminating on this node, as none there is ready")
	case c.local:
		e.because(&b, "A2.5", ", ready on this node")
	case c.ready == 0:
		e.because(&b, "A2.4", ", terminating, as none is ready")
	case c.mode == sameNode:
		e.because(&b, "A2.8", ", those with a hint for this node")
	case c.mode == sameZone:
		e.because(&b, "A2.9", ", those with a hint for this zone")
	}
	if c.key != "" && c.key != anyTopology {
		fmt.Fprintf(&b, ", those whose node has the same %s as this node", c.key)
	}
	if e.admittedAsNode() {
		e.because(&b, "A3.11", "; the source ranges let the node itself in")
	}
	switch {
	case v.Source == SourceNode:
		b.WriteString("; the endpoint sees the node")
	case v.Kind == service.ClusterIP && !e.podsKnown():
		e.because(&b, "A3.7", "; the endpoint sees the client, as pods cannot be told from others")
	default:
		b.WriteString("; the endpoint sees the client")
	}
	if v.Source == SourceClient && v.Port.Name.Protocol == service.SCTP {
		b.WriteString(" (of kernel flows: relayed, it sees the node)")
	}
	if v.Source == SourceClient && slices.ContainsFunc(v.Candidates, func(ep service.Endpoint) bool { return ep.Addr.Addr() == e.client }) {
		b.WriteString(", but the client itself would see the node")
	}
	e.Rules = append(e.Rules, v.SourceRule.String())
	e.Reason = b.String()
}

func (e *Explanation) because(b *strings.Builder, rule, text string) {
	e.Rules = append(e.Rules, rule)
	b.WriteString(text)
}

func (e *Explanation) podsKnown() bool {
	return e.table.node.podsKnown[service.FamilyOf(e.client)]
}

// admittedAsNode reports whether only A3.11 let the client in.
func (e *Explanation) admittedAsNode() bool {
	if e.Verdict.Kind != service.LoadBalancer {
		return false
	}
	ranges := e.Verdict.Port.Families[service.FamilyOf(e.dst.Addr())].SourceRanges
	return len(ranges) > 0 && !contains(ranges, e.client)
}

func (e *Explanation) traffic() string {
	if e.Verdict.Kind == service.ClusterIP {
		return "internal"
	}
	return "external"
}

// Client describes the client as seen from this node: a pod, the node, or neither.
func (e *Explanation) Client() string {
	n := e.table.node
	switch {
	case n.isPod(e.client): // checked first, as in Resolve
		in, _ := n.pods[service.FamilyOf(e.client)].rangeOf(e.client)
		return "a pod, in " + in.String()
	case n.isLocal(e.client):
		return "this node"
	case e.podsKnown():
		return "neither a pod nor this node"
	}
	return "not this node; pods cannot be told from others without their ranges"
}

// Endpoints explains for each endpoint of the service port and family why it is a
// candidate or not, in the order of the service's endpoints.
func (e *Explanation) Endpoints() []EndpointGrounds {
	if e.from == nil {
		return nil
	}
	out := make([]EndpointGrounds, len(e.from.all))
	for i := range out {
		ep := &e.from.all[i]
		g := &out[i]
		g.Endpoint = ep
		g.Candidate = slices.ContainsFunc(e.Verdict.Candidates, func(c service.Endpoint) bool { return c.Addr == ep.Addr })
		g.Reason, g.Rule = e.from.judge(ep, g.Candidate)
		if d := e.Verdict.Port.Drain; d > 0 && !ep.Ready && !ep.Serving {
			g.Reason += fmt.Sprintf("; its open connections are reset %s after it stopped serving", d)
		}
		if !g.Candidate && e.Verdict.Rule == RuleSourceRanges {
			g.Reason, g.Rule = "the client is not let in", RuleSourceRanges.String()
		}
	}
	return out
}

// judge explains why an endpoint is in the list or not.
func (c *choice) judge(ep *service.Endpoint, candidate bool) (reason, rule string) {
	listRule := "A2.4"
	if c.local {
		listRule = "A2.5"
	}
	switch {
	case candidate && c.drained.Has(ep):
		return "drained by an operator, but it serves and no other is ready", listRule
	case c.drained.Has(ep) && draining(ep):
		return "drained by an operator, and others are ready", listRule
	case candidate && ep.Ready && ep.Local:
		return "ready, on this node", listRule
	case candidate && ep.Ready:
		return "ready", listRule
	case candidate:
		return "terminating, but it serves and no other is ready", listRule
	case !ep.Ready && !draining(ep):
		return "not ready", "A2.7"
	case c.local && !ep.Local:
		return "not on this node", "A2.5"
	case !ep.Ready && c.ready > 0:
		return "terminating, and others are ready", listRule
	case len(c.keys) > 0 && c.key == "":
		return "its node shares no topology key's value with this node", ""
	case len(c.keys) > 0:
		return fmt.Sprintf("its node does not have the same %s as this node", c.key), ""
	case c.mode == sameNode:
		return "no hint for this node", "A2.8"
	}
	return "no hint for this zone", "A2.9"
}

// TrafficPolicy returns the name of a traffic policy in the API.
func TrafficPolicy(local bool) string {
	if local {
		return "Local"
	}
	return "Cluster"
}

// count returns a number and its noun: "1 endpoint", "2 endpoints".
func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
