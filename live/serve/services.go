package serve

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/filter"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// services answers with a page of service ports, sorted by name.
func (h *Handler) services(_ *http.Request, q *params) (any, error) {
	whole := q.filter()
	offset, limit := q.page()
	search, name := strings.ToLower(q.Get("search")), q.service()
	if q.err != nil {
		return nil, q.err
	}
	terms, all := whole.Configured()
	var found []*service.Port
	for _, p := range h.options.Policy().Snapshot().Ports {
		if p == nil || name != "" && p.Name.String() != name && p.Name.Name.String() != name {
			continue
		}
		if (search == "" || portMentions(p, search)) && isSelected(terms, p) {
			found = append(found, p)
		}
	}
	slices.SortFunc(found, func(a, b *service.Port) int { return a.Name.Compare(b.Name) })
	answer := &api.Services{Matched: len(found), Partial: !all, Services: []api.Service{}}
	found = found[min(offset, len(found)):]
	found = found[:min(limit, len(found))]
	totals := make(map[service.PortName]*conntrack.Totals)
	ports := h.options.View.Totals()
	for i := range ports {
		totals[ports[i].Name] = &ports[i].Totals
	}
	for _, p := range found {
		answer.Services = append(answer.Services, serviceOf(p, totals[p.Name], terms, h.options.Choosing(p)))
	}
	return answer, nil
}

// portMentions reports whether a service port, or an endpoint of it, contains a
// text in lower case.
func portMentions(p *service.Port, text string) bool {
	if strings.Contains(p.Name.String(), text) {
		return true
	}
	for f := range p.Families {
		if slices.ContainsFunc(vips(&p.Families[f]), func(a netip.Addr) bool { return strings.Contains(a.String(), text) }) {
			return true
		}
		if slices.ContainsFunc(p.Families[f].Endpoints, func(e service.Endpoint) bool {
			return strings.Contains(e.Addr.String(), text) || strings.Contains(e.PodName(), text) || strings.Contains(e.Node(), text)
		}) {
			return true
		}
	}
	return false
}

// isSelected reports whether a filter selects a service port: as if there were a
// connection from nobody to one of its addresses and endpoints, or without an endpoint
// if it has none.
func isSelected(f *filter.Filter, p *service.Port) bool {
	if f.IsEmpty() {
		return true
	}
	none := true
	for family := range p.Families {
		v := &p.Families[family]
		none = none && len(v.Endpoints) == 0
		for i := range v.Endpoints {
			if isSelectedAt(f, p, v, &v.Endpoints[i]) {
				return true
			}
		}
	}
	for family := range p.Families {
		if v := &p.Families[family]; none && isSelectedAt(f, p, v, nil) {
			return true
		}
	}
	return false
}

// isSelectedAt reports whether a filter selects an endpoint of a service port, by one
// of the port's addresses.
func isSelectedAt(f *filter.Filter, p *service.Port, v *service.FamilyView, e *service.Endpoint) bool {
	r := conntrack.Record{Port: p, Protocol: p.Name.Protocol, Endpoint: e}
	if f.Match(&r) {
		return true
	}
	return slices.ContainsFunc(vips(v), func(a netip.Addr) bool {
		r.VIP = netip.AddrPortFrom(a, p.Port)
		return f.Match(&r)
	})
}

func vips(v *service.FamilyView) []netip.Addr {
	var all []netip.Addr
	if v.ClusterIP.IsValid() {
		all = append(all, v.ClusterIP)
	}
	return slices.Concat(all, v.ExternalIPs, v.LoadBalancerIPs)
}

// typeNames are the API's names of types.
var typeNames = map[service.Type]string{
	service.TypeClusterIP: "ClusterIP", service.TypeNodePort: "NodePort", service.TypeLoadBalancer: "LoadBalancer",
}

// serviceOf returns a service port with the endpoints that a filter selects.
func serviceOf(p *service.Port, t *conntrack.Totals, terms *filter.Filter, c live.Choosing) api.Service {
	out := api.Service{
		Service: p.Name.String(), Protocol: p.Name.Protocol.String(), Type: typeNames[p.Type],
		Port: p.Port, NodePort: p.NodePort, Affinity: p.AffinityTimeout.Seconds(),
		Internal: policy.TrafficPolicy(p.InternalLocal), External: policy.TrafficPolicy(p.ExternalLocal),
		Algorithm: c.Algorithm(), Annotations: live.Annotations(p), Held: c.Held, Queued: c.Queued,
		Endpoints: []api.Endpoint{},
	}
	for f := range p.Families {
		v := &p.Families[f]
		for _, a := range vips(v) {
			out.VIPs = append(out.VIPs, a.String())
		}
		for i := range v.Endpoints {
			if terms.IsEmpty() || isSelectedAt(terms, p, v, &v.Endpoints[i]) {
				out.Endpoints = append(out.Endpoints, endpointOf(&v.Endpoints[i], &c))
			}
		}
	}
	if t != nil {
		out.Totals = totalsOf(t)
	}
	return out
}

func endpointOf(e *service.Endpoint, c *live.Choosing) api.Endpoint {
	return api.Endpoint{
		Endpoint: e.Addr.String(), Pod: e.PodName(), Node: e.Node(), Zone: e.Zone(), Local: e.Local,
		Ready: e.Ready, Serving: e.Serving, Terminating: e.Terminating,
		Standing: c.Standing(e.Addr),
	}
}

func totalsOf(t *conntrack.Totals) api.Totals {
	out := api.Totals{
		Opened: t.Opened, Open: t.Active, Retried: t.Retried, Attempts: t.Attempts,
		BytesFromClient: t.BytesFromClient, BytesFromEndpoint: t.BytesFromEndpoint,
	}
	for _, e := range conntrack.DialErrors() {
		count(&out.FailedAttempts, e, t.Failed[e])
	}
	for _, e := range conntrack.Ends() {
		count(&out.Ended, e, t.Ended[e])
	}
	return out
}

// count adds a number that is not 0 to a map, which is nil while it is empty.
func count(to *map[string]uint64, what fmt.Stringer, n uint64) {
	if n > 0 && *to == nil {
		*to = make(map[string]uint64)
	}
	if n > 0 {
		(*to)[what.String()] = n
	}
}
