package explain

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// Answer is a decision in the form that docs/explain.md describes: all fields
// are always there, and those that do not apply are empty.
type Answer struct {
	// Verdict is "accept", "refuse", "drop", "hold" or "none".
	Verdict string `json:"verdict"`
	// Service is "namespace/name:port", without the colon if the port has no
	// name. It is empty if no service has the address and port.
	Service string `json:"service"`
	// Address is "ClusterIP", "ExternalIP", "LoadBalancer" or "NodePort".
	Address string `json:"address"`
	// Policy is the service's traffic policy for that kind of address,
	// "Cluster" or "Local".
	Policy string `json:"policy"`
	// Candidates are sorted as text. There are some if and only if the verdict
	// is "accept".
	Candidates []string `json:"candidates"`
	// Source is whose address the endpoint sees, "client" or "node"; empty
	// unless the verdict is "accept".
	Source string `json:"source"`
	// Affinity is "ClientIP" or "None".
	Affinity string `json:"affinity"`
	// Since is when the service port changed last in the running proxy: its Service, its
	// endpoints, or what the node decides by. Without a proxy, or a Service, there is none.
	Since  time.Time `json:"since,omitzero"`
	Reason string    `json:"reason"`
	Rules  []string  `json:"rules"`
	// Text is the answer for people, if it was asked for.
	Text string `json:"text,omitempty"`
}

// Moment is the form of a time for people.
const Moment = "2006-01-02 15:04:05.000"

// Ask answers a question, with text for people if that is wanted. The text has what new
// connections to the service port meet now, if choosing is not nil. since returns when a
// service port changed last; nil if nobody knows.
func Ask(t *policy.Table, q Question, text bool, choosing func(*service.Port) live.Choosing, since func(*service.Port) time.Time) *Answer {
	e := t.Explain(q.Protocol, q.From, q.To)
	a := answer(&e)
	if since != nil && e.Verdict.Port != nil {
		a.Since = since(e.Verdict.Port).UTC()
	}
	if text {
		var c live.Choosing
		if choosing != nil && e.Verdict.Port != nil {
			c = choosing(e.Verdict.Port)
		}
		a.Text = describe(t, q, &e, a, &c)
	}
	return a
}

func answer(e *policy.Explanation) *Answer {
	v := &e.Verdict
	a := &Answer{
		Verdict:    v.Action.String(),
		Candidates: make([]string, len(v.Candidates)),
		Reason:     e.Reason,
		Rules:      e.Rules,
	}
	for i := range v.Candidates {
		a.Candidates[i] = v.Candidates[i].Addr.String()
	}
	if v.Kind != 0 {
		a.Address = v.Kind.String()
	}
	if v.Action == policy.Accept {
		a.Source = v.Source.String()
	}
	if v.Port == nil {
		return a
	}
	a.Service = v.Port.Name.String()
	a.Policy = "Cluster"
	if e.Local {
		a.Policy = "Local"
	}
	a.Affinity = "None"
	if v.Port.AffinityTimeout > 0 {
		a.Affinity = "ClientIP"
	}
	return a
}

// WriteJSON writes an answer as one line of JSON.
func WriteJSON(w io.Writer, a *Answer) error { return newEncoder(w).Encode(a) }

// newEncoder returns an encoder of lines that leaves "<" and "&" as they are.
func newEncoder(w io.Writer) *json.Encoder {
	e := json.NewEncoder(printable.JSONWriter{W: w})
	e.SetEscapeHTML(false)
	return e
}

// describe returns the answer for people: what matched, which rules decided, and what is
// with each endpoint.
func describe(t *policy.Table, q Question, e *policy.Explanation, a *Answer, c *live.Choosing) string {
	var b []byte
	row := func(name, format string, args ...any) {
		b = fmt.Appendf(b, "%-11s", name)
		b = append(b, printable.Text(fmt.Sprintf(format, args...))...)
		b = append(b, '\n')
	}
	node := t.Snapshot().Node
	b = fmt.Appendf(b, "%s from %s to %s: %s\n", q.Protocol, q.From, q.To, a.Verdict)
	if a.Verdict == policy.None.String() {
		b = append(b, "Sluice leaves this packet alone.\n"...)
	}
	b = append(b, '\n')
	row("because", "%s", a.Reason)
	for i, r := range a.Rules {
		name := ""
		if i == 0 {
			name = "rules"
		}
		row(name, "%-6s %s", r, ruleTexts[r])
	}
	if a.Service != "" {
		row("service", "%s, %s %s", printable.Name(a.Service), a.Address, q.To)
		row("policy", "%s", a.Policy)
	}
	if !a.Since.IsZero() {
		row("since", "%s", a.Since.Local().Format(Moment))
	}
	row("client", "%s is %s", q.From, e.Client())
	found := ""
	if !node.Found {
		found = ", which has no Node object"
	}
	row("node", "%s%s", printable.Name(node.Name), found)
	if a.Source != "" {
		where := ""
		if a.Source == policy.SourceClient.String() {
			where = ", where its answer passes this node" // nobody looks at its links here
		}
		row("source", "%s: the endpoint sees the address of the %s%s", a.Source, a.Source, where)
	}
	if a.Affinity != "" {
		row("affinity", "%s%s", a.Affinity, window(e.Verdict.Port))
	}
	if e.Verdict.Port != nil {
		if name := c.Algorithm(); name != "" {
			row("algorithm", "%s", name)
		}
		all := live.Annotations(e.Verdict.Port)
		for i, name := range slices.Sorted(maps.Keys(all)) {
			what := ""
			if i == 0 {
				what = "annotated"
			}
			row(what, "%s: %s", name, all[name])
		}
		if c.Held > 0 {
			row("waiting", "%d connections, for an endpoint", c.Held)
		}
		if c.Queued > 0 {
			row("waiting", "%d connections, at a limit", c.Queued)
		}
		b = appendEndpoints(b, e, c)
	}
	return string(b)
}

func window(p *service.Port) string {
	if p.AffinityTimeout == 0 {
		return ""
	}
	return ", for " + p.AffinityTimeout.String() + " after a client's last connection"
}

func appendEndpoints(b []byte, e *policy.Explanation, c *live.Choosing) []byte {
	list := e.Endpoints()
	b = fmt.Appendf(b, "\nendpoints: %d of %d are candidates\n", len(e.Verdict.Candidates), len(list))
	wide := 0
	for i := range list {
		wide = max(wide, len(list[i].Endpoint.Addr.String()))
	}
	for i := range list {
		g := &list[i]
		sign := '-'
		if g.Candidate {
			sign = '+'
		}
		b = fmt.Appendf(b, "  %c %-*s  %s", sign, wide, g.Endpoint.Addr, printable.Text(g.Reason))
		if g.Rule != "" {
			b = fmt.Appendf(b, " (%s)", g.Rule)
		}
		standing := c.Standing(g.Endpoint.Addr)
		if words := standing.Words(); words != "" && g.Candidate {
			b = fmt.Appendf(b, ", %s", words)
		}
		if g.Endpoint.Node() != "" {
			b = fmt.Appendf(b, "; node %s", printable.Name(g.Endpoint.Node()))
		}
		if g.Endpoint.Zone() != "" {
			b = fmt.Appendf(b, ", zone %s", printable.Name(g.Endpoint.Zone()))
		}
		if g.Endpoint.Pod.Name != "" {
			b = fmt.Appendf(b, ", pod %s", printable.Name(g.Endpoint.Pod.String()))
		}
		b = append(b, '\n')
	}
	return b
}

// ruleTexts say what the rules are that Rules of an Answer may name.
var ruleTexts = map[string]string{
	"A1.1":  "Services of another proxy are not touched",
	"A2.4":  "endpoints that are ready; if there are none, those that serve while they terminate",
	"A2.5":  "the same, among the endpoints on this node",
	"A2.8":  "all ready endpoints have node hints, and one names this node",
	"A2.9":  "all ready endpoints have zone hints, and one names this node's zone",
	"A3.2":  "the internal traffic policy decides for cluster IPs",
	"A3.3":  "the external traffic policy decides for all other addresses",
	"A3.4":  "no endpoints on any node: refuse",
	"A3.5":  "endpoints, but none on this node under policy Local: drop",
	"A3.6":  "pods and the node itself bypass external policy Local",
	"A3.7":  "without pod ranges, clients of cluster IPs keep their address",
	"A3.8":  "the endpoint sees the node",
	"A3.9":  "the endpoint sees the client",
	"A3.10": "loadBalancerSourceRanges do not allow the client: drop",
	"A3.11": "source ranges with the node's address allow the node's own connections",
	"A3.12": "a cluster IP has no such port: refuse; no service has the cluster IP: drop",
	"A3.13": "addresses and ports of no service are not touched",
}
