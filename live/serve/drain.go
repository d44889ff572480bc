package serve

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// maxDrains bounds what is drained at a time.
const maxDrains = 1024

// Drains holds the endpoints that are drained. Create it with NewDrains. It is safe
// for concurrent use.
type Drains struct {
	apply func(context.Context, policy.Drained) error

	mu  sync.Mutex // held while a change is put in force
	all map[netip.AddrPort]drained
}

// drained says since when an endpoint is drained, and by which pod's name.
type drained struct {
	since time.Time
	pod   string
}

// NewDrains returns Drains without endpoints. apply puts a set in force: when it
// returns, new connections obey it.
func NewDrains(apply func(context.Context, policy.Drained) error) *Drains {
	return &Drains{apply: apply, all: make(map[netip.AddrPort]drained)}
}

// change adds or removes endpoints, and returns how many entries that changed.
func (d *Drains) change(ctx context.Context, endpoints []netip.AddrPort, pod string, back bool) (changed int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	next := maps.Clone(d.all)
	for _, ep := range endpoints {
		if _, is := next[ep]; is != back {
			continue
		}
		changed++
		if back {
			delete(next, ep)
		} else {
			next[ep] = drained{time.Now(), pod}
		}
	}
	switch {
	case changed == 0:
		return 0, nil
	case len(next) > maxDrains:
		return 0, wrong("more than %d endpoints would be drained: take some back", maxDrains)
	}
	if err := d.apply(ctx, setOf(next)); err != nil {
		return 0, err
	}
	d.all = next
	return changed, nil
}

// list returns a copy of what is drained.
func (d *Drains) list() map[netip.AddrPort]drained {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.all)
}

// setOf returns the set of endpoints that policy knows.
func setOf(all map[netip.AddrPort]drained) policy.Drained {
	set := make(policy.Drained, len(all))
	for ep := range all {
		set[ep] = struct{}{}
	}
	return set
}

// named returns the entries of a pod.
func (d *Drains) named(pod string) []netip.AddrPort {
	var found []netip.AddrPort
	for ep, entry := range d.list() {
		if entry.pod == pod {
			found = append(found, ep)
		}
	}
	return found
}

// endpointsOf visits the endpoints of all service ports.
func endpointsOf(snap *service.Snapshot, visit func(*service.Port, *service.Endpoint)) {
	for _, p := range snap.Ports {
		if p == nil {
			continue
		}
		for f := range p.Families {
			for i := range p.Families[f].Endpoints {
				visit(p, &p.Families[f].Endpoints[i])
			}
		}
	}
}

// target returns the endpoints that a text names: an address, an address and a port,
// or a pod.
func (h *Handler) target(text string, back bool) (endpoints []netip.AddrPort, pod string, err error) {
	if ep, ok := parseEndpoint(text); ok {
		endpoints = []netip.AddrPort{ep}
	} else if namespace, name, ok := strings.Cut(text, "/"); ok && namespace != "" && name != "" {
		pod = text
		if back {
			endpoints = h.options.Drains.named(pod)
		}
	} else {
		return nil, "", wrong("endpoint %q: not an address, an address and port, or namespace/name of a pod", text)
	}
	if back {
		return endpoints, pod, nil
	}
	found := make(map[netip.AddrPort]struct{})
	endpointsOf(h.options.Policy().Snapshot(), func(_ *service.Port, e *service.Endpoint) {
		switch {
		case pod != "" && e.Pod.String() == pod:
			found[netip.AddrPortFrom(e.Addr.Addr(), 0)] = struct{}{}
		case pod == "" && covers(endpoints[0], e.Addr):
			found[endpoints[0]] = struct{}{}
		}
	})
	if len(found) == 0 {
		return nil, "", &requestError{http.StatusNotFound, errors.New("no service has the endpoint " + text)}
	}
	return slices.Collect(maps.Keys(found)), pod, nil
}

// covers reports whether an entry, which may have port 0 for all, names an endpoint.
func covers(entry, ep netip.AddrPort) bool {
	return entry.Addr() == ep.Addr() && (entry.Port() == 0 || entry.Port() == ep.Port())
}

// drain drains endpoints or takes them back.
func (h *Handler) drain(r *http.Request, asked *api.Drain) (any, error) {
	endpoints, pod, err := h.target(asked.Endpoint, asked.Back)
	if err != nil {
		return nil, err
	}
	changed, err := h.options.Drains.change(r.Context(), endpoints, pod, asked.Back)
	if err != nil {
		return nil, err
	}
	what := "an endpoint is drained through the admin socket: new connections avoid it"
	if asked.Back {
		what = "an endpoint is taken back through the admin socket: it gets new connections again"
	}
	if changed > 0 {
		h.options.Log.Info().Str("endpoint", asked.Endpoint).Int("addresses", changed).Msg(what)
	}
	list, err := h.drainedNow(r.Context())
	return &api.Drains{Drained: list, Changed: changed}, err
}

// drained answers with what is drained.
func (h *Handler) drained(r *http.Request, _ *params) (any, error) {
	list, err := h.drainedNow(r.Context())
	return &api.Drains{Drained: list}, err
}

// drainedNow returns what is drained, and who still uses it.
func (h *Handler) drainedNow(ctx context.Context) (list []api.Drained, err error) {
	list = []api.Drained{}
	all := h.options.Drains.list()
	if len(all) == 0 {
		return list, nil
	}
	open := make(map[netip.AddrPort]int)
	err = h.options.View.List(ctx, func(c *conntrack.Record) error {
		if c.Endpoint != nil {
			for _, ep := range []netip.AddrPort{c.Endpoint.Addr, netip.AddrPortFrom(c.Endpoint.Addr.Addr(), 0)} {
				if _, is := all[ep]; is {
					open[ep]++
				}
			}
		}
		return nil
	})
	set := setOf(all)
	for ep, entry := range all {
		out := api.Drained{Endpoint: ep.String(), Pod: entry.pod, Since: entry.since.UTC(), Services: []string{}, Open: open[ep]}
		if ep.Port() == 0 {
			out.Endpoint = ep.Addr().String()
		}
		var at []*service.Port
		endpointsOf(h.options.Policy().Snapshot(), func(p *service.Port, e *service.Endpoint) {
			if covers(ep, e.Addr) && !slices.Contains(at, p) {
				at = append(at, p)
			}
		})
		for _, p := range at {
			out.Services = append(out.Services, p.Name.String())
			if isLastResort(p, ep, set) {
				out.LastResort = append(out.LastResort, p.Name.String())
			}
		}
		list = append(list, out)
	}
	slices.SortFunc(list, func(a, b api.Drained) int { return cmp.Compare(a.Endpoint, b.Endpoint) })
	return list, err
}

// isLastResort reports whether all endpoints of a port that could serve are drained,
// in the family of one of them.
func isLastResort(p *service.Port, ep netip.AddrPort, set policy.Drained) bool {
	return !slices.ContainsFunc(p.Families[service.FamilyOf(ep.Addr())].Endpoints, func(e service.Endpoint) bool {
		return e.Ready && !set.Has(e.Addr)
	})
}
