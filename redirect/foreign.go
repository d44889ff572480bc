package redirect

import (
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// OnForeign gives the destinations of a plan that are on addresses which are
// not ours to own, sorted: those to steer, to refuse, to silence, and those
// that linger. Where nobody can mark packets, each needs a policy routing rule;
// also one that refuses does, as connections to it may be established.
func OnForeign(p *Plan) []service.Destination {
	if len(p.Foreign) == 0 {
		return nil
	}
	var on []service.Destination
	add := func(d service.Destination) {
		if _, is := p.Foreign[d.Addr]; is {
			on = append(on, d)
		}
	}
	for d := range p.Steer {
		add(d)
	}
	for _, set := range []map[service.Destination]struct{}{p.Refuse, p.Silent, p.Lingering} {
		for d := range set {
			add(d)
		}
	}
	slices.SortFunc(on, CompareDestinations)
	return slices.Compact(on)
}
