package serve

import (
	"net/http"

	"github.com/sluice-proxy/sluice/live/filter"
	"github.com/sluice-proxy/sluice/service"
)

// complete answers how a filter may go on.
func (h *Handler) complete(_ *http.Request, q *params) (any, error) {
	text := q.Get("filter")
	if len(text) > filter.MaxLength {
		return nil, wrong("the filter is longer than %d bytes", filter.MaxLength)
	}
	at := q.number("at", len(text), len(text))
	if q.err != nil {
		return nil, q.err
	}
	return filter.Complete(text, at, h.valuesOf), nil
}

// valuesOf returns the names and addresses of the configuration in force, and of clients'
// pods, that a field may have.
func (h *Handler) valuesOf(field string) (values []string) {
	snap := h.options.Policy().Snapshot()
	add := func(v string) {
		if v != "" {
			values = append(values, v)
		}
	}
	switch field {
	case "service", "namespace", "vip":
		for _, p := range snap.Ports {
			switch {
			case p == nil:
			case field == "service":
				add(p.Name.String())
			case field == "namespace":
				add(p.Name.Namespace)
			default:
				for f := range p.Families {
					for _, a := range vips(&p.Families[f]) {
						add(a.String())
					}
				}
			}
		}
	case "endpoint", "tried", "pod", "client_pod", "node", "zone":
		endpointsOf(snap, func(_ *service.Port, e *service.Endpoint) {
			switch field {
			case "pod", "client_pod":
				add(e.PodName())
			case "node":
				add(e.Node())
			case "zone":
				add(e.Zone())
			default:
				add(e.Addr.String())
			}
		})
	}
	if field == "client_pod" && h.options.Pods != nil {
		for _, name := range h.options.Pods() {
			add(name.String())
		}
	}
	return values
}
