package route

import (
	"cmp"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// Remove takes everything of ours away, the rules first, and gives a line for
// each thing.
func (r *Router) Remove() (removed []string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known = false
	r.clients.stop()
	routes, rules, err := r.things()
	if err != nil {
		return nil, err
	}
	for _, t := range slices.Concat(rules, routes) {
		if err := t.remove(); err != nil {
			return removed, err
		}
		removed = append(removed, t.text)
	}
	return removed, nil
}

// Dump returns a line for each route and rule of ours that is in the kernel, always
// in the same order.
func (r *Router) Dump() (lines []string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	routes, rules, err := r.things()
	for _, t := range slices.Concat(routes, rules) {
		lines = append(lines, t.text)
	}
	return lines, err
}

// thing is a route or a rule of ours.
type thing struct {
	text   string
	remove func() error
}

// things returns the routes and rules of ours that are in the kernel.
func (r *Router) things() (routes, rules []thing, err error) {
	for _, table := range r.tables() {
		for f := range redirect.Families {
			list, err := r.ourRoutes(f, table)
			if err != nil {
				return nil, nil, err
			}
			routes = append(routes, thingsOf(list, routeText, r.removeRoute)...)
		}
	}
	for f := range redirect.Families {
		list, err := r.ourRules(f)
		if err != nil {
			return nil, nil, err
		}
		rules = append(rules, thingsOf(list, ruleText, r.removeRule)...)
	}
	return routes, rules, nil
}

func thingsOf[T any](list []T, text func(*T) string, remove func(*T) error) (things []thing) {
	for i := range list {
		things = append(things, thing{text(&list[i]), func() error { return remove(&list[i]) }})
	}
	slices.SortFunc(things, func(a, b thing) int { return cmp.Compare(a.text, b.text) })
	return things
}

// ourRoutes returns the routes of ours in a table.
func (r *Router) ourRoutes(f service.Family, table int) ([]netlink.Route, error) {
	routes, err := r.routes(f, table)
	return slices.DeleteFunc(routes, func(k netlink.Route) bool { return !r.isOurRoute(&k) }), err
}

// ourRules returns the rules of ours.
func (r *Router) ourRules(f service.Family) ([]netlink.Rule, error) {
	rules, err := r.rules(f)
	return slices.DeleteFunc(rules, func(k netlink.Rule) bool { return !r.isOurRule(&k) }), err
}
