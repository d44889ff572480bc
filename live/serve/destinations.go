package serve

import (
	"cmp"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/service"
)

// destinations answers with a page of what the steering plan names.
func (h *Handler) destinations(r *http.Request, q *params) (any, error) {
	offset, limit := q.page()
	search, steering := strings.ToLower(q.Get("search")), q.Get("steering")
	if steering != "" && !slices.Contains(api.Steerings, steering) {
		q.note(wrong("parameter steering: %q is not one of %s", steering, strings.Join(api.Steerings, ", ")))
	}
	if q.err != nil {
		return nil, q.err
	}
	type entry struct {
		service.Destination
		steering, service string
	}
	var found []entry
	table := h.options.Policy()
	err := h.options.Destinations(r.Context(), func(d service.Destination, what string) {
		at := netip.AddrPortFrom(d.Addr, d.Port)
		name := ""
		if v := table.Resolve(d.Protocol, d.Addr, at); v.Port != nil {
			name = v.Port.Name.String()
		}
		if (steering == "" || steering == what) && (search == "" || strings.Contains(at.String(), search) || strings.Contains(name, search)) {
			found = append(found, entry{d, what, name})
		}
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(found, func(a, b entry) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.steering, b.steering))
	})
	answer := &api.Destinations{Matched: len(found), Destinations: []api.Destination{}}
	found = found[min(offset, len(found)):]
	for _, e := range found[:min(limit, len(found))] {
		answer.Destinations = append(answer.Destinations, api.Destination{
			Destination: netip.AddrPortFrom(e.Addr, e.Port).String(), Protocol: e.Protocol.String(), Steering: e.steering, Service: e.service,
		})
	}
	return answer, nil
}
