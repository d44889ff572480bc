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

// MaxDrains bounds what is drained at a time.
const MaxDrains = 1024

// Keeper keeps what is drained over a restart of the proxy.
type Keeper interface {
	Load() (map[policy.Drain]time.Time, error)
	Save(map[policy.Drain]time.Time) error
}

// Drains holds the endpoints that are drained. Create it with NewDrains. It is safe
// for concurrent use.
type Drains struct {
	apply  func(context.Context, policy.Drained) error
	keeper Keeper // or nil

	mu  sync.Mutex                 // held while a change is put in force
	all map[policy.Drain]time.Time // since when
}

// NewDrains returns Drains without endpoints. apply puts a set in force: when it
// returns, new connections obey it. keeper may be nil.
func NewDrains(apply func(context.Context, policy.Drained) error, keeper Keeper) *Drains {
	return &Drains{apply: apply, keeper: keeper, all: make(map[policy.Drain]time.Time)}
}

// Load replaces what is drained by what an earlier process kept, and returns it. An error changes
// nothing. Call it before the Drains are served.
func (d *Drains) Load() (policy.Drained, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.keeper == nil {
		return setOf(d.all), nil
	}
	all, err := d.keeper.Load()
	if err == nil {
		clear(d.all)
	}
	maps.Copy(d.all, all)
	return setOf(d.all), err
}

// change adds or removes entries, and returns how many that changed. forgotten is why a restart
// will not know of it.
func (d *Drains) change(ctx context.Context, entries []policy.Drain, back bool) (changed int, forgotten, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	next := maps.Clone(d.all)
	for _, e := range entries {
		if _, is := next[e]; is != back {
			continue
		}
		changed++
		if back {
			delete(next, e)
		} else {
			next[e] = time.Now()
		}
	}
	switch {
	case changed == 0:
		return 0, nil, nil
	case len(next) > MaxDrains:
		return 0, nil, wrong("more than %d endpoints would be drained: take some back", MaxDrains)
	}
	if err := d.apply(ctx, setOf(next)); err != nil {
		return 0, nil, err
	}
	d.all = next
	if d.keeper != nil {
		forgotten = d.keeper.Save(next)
	}
	return changed, forgotten, nil
}

// list returns a copy of what is drained.
func (d *Drains) list() map[policy.Drain]time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.all)
}

// setOf returns the set of endpoints that policy knows.
func setOf(all map[policy.Drain]time.Time) policy.Drained {
	set := make(policy.Drained, len(all))
	for d := range all {
		set[d] = struct{}{}
	}
	return set
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

// target returns the entries that a text names: an address, an address and a port, or a
// pod. With back, it looks among drained entries, else among endpoints.
func (h *Handler) target(text string, back bool) ([]policy.Drain, error) {
	addr, isAddr := parseEndpoint(text)
	var pod service.Name
	if !isAddr {
		pod.Namespace, pod.Name, _ = strings.Cut(text, "/")
		if pod.Namespace == "" || pod.Name == "" {
			return nil, wrong("endpoint %q: not an address, an address and port, or namespace/name of a pod", text)
		}
	}
	found := make(map[policy.Drain]struct{})
	if back {
		for d := range h.options.Drains.list() {
			if isAddr && d.Addr == addr || !isAddr && d.Pod == pod {
				found[d] = struct{}{}
			}
		}
		return slices.Collect(maps.Keys(found)), nil
	}
	endpointsOf(h.options.Policy().Snapshot(), func(_ *service.Port, e *service.Endpoint) {
		switch {
		case isAddr && covers(addr, e.Addr):
			found[policy.Drain{Addr: addr}] = struct{}{}
		case !isAddr && e.Pod == pod:
			found[policy.Drain{Addr: netip.AddrPortFrom(e.Addr.Addr(), 0), Pod: pod}] = struct{}{}
		}
	})
	if len(found) == 0 {
		return nil, &requestError{http.StatusNotFound, errors.New("no service has the endpoint " + text)}
	}
	return slices.Collect(maps.Keys(found)), nil
}

// covers reports whether an entry, which may have port 0 for all, names an endpoint.
func covers(entry, ep netip.AddrPort) bool {
	return entry.Addr() == ep.Addr() && (entry.Port() == 0 || entry.Port() == ep.Port())
}

// drain drains endpoints or takes them back.
func (h *Handler) drain(r *http.Request, asked *api.Drain) (any, error) {
	entries, err := h.target(asked.Endpoint, asked.Back)
	if err != nil {
		return nil, err
	}
	changed, forgotten, err := h.options.Drains.change(r.Context(), entries, asked.Back)
	if err != nil {
		return nil, err
	}
	if forgotten != nil {
		h.options.Log.Warn().Err(forgotten).Msg("a restart of the proxy will not know of this change of what is drained")
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
	set, open := setOf(all), make(map[policy.Drain]int)
	err = h.options.View.List(ctx, func(c *conntrack.Record) error {
		if c.Endpoint != nil {
			for _, d := range set.By(c.Endpoint) {
				open[d]++
			}
		}
		return nil
	})
	for d, since := range all {
		out := api.Drained{Endpoint: d.Addr.String(), Since: since.UTC(), Services: []string{}, Open: open[d]}
		if d.Addr.Port() == 0 {
			out.Endpoint = d.Addr.Addr().String()
		}
		if d.Pod.Name != "" {
			out.Pod = d.Pod.String()
		}
		endpointsOf(h.options.Policy().Snapshot(), func(p *service.Port, e *service.Endpoint) {
			if !d.Names(e) {
				return
			}
			name := p.Name.String()
			if !slices.Contains(out.Services, name) {
				out.Services = append(out.Services, name)
			}
			if !slices.Contains(out.LastResort, name) && isLastResort(p, e, set) {
				out.LastResort = append(out.LastResort, name)
			}
		})
		list = append(list, out)
	}
	slices.SortFunc(list, func(a, b api.Drained) int {
		return cmp.Or(cmp.Compare(a.Endpoint, b.Endpoint), cmp.Compare(a.Pod, b.Pod))
	})
	return list, err
}

// isLastResort reports whether new connections to a port still go to a drained endpoint:
// all others of its family that are ready are drained too, or with the traffic policy
// Local, those on this node.
func isLastResort(p *service.Port, drained *service.Endpoint, set policy.Drained) bool {
	isReady := func(e service.Endpoint) bool { return e.Ready && !set.Has(&e) }
	isReadyHere := func(e service.Endpoint) bool { return e.Local && isReady(e) }
	all := p.Families[service.FamilyOf(drained.Addr.Addr())].Endpoints
	return !slices.ContainsFunc(all, isReady) ||
		drained.Local && (p.InternalLocal || p.ExternalLocal) && !slices.ContainsFunc(all, isReadyHere)
}
