package route

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// mostChanges is how many routes and rules are changed one by one without
// reading the tables.
const mostChanges = 256

// Put makes the kernel's tables what the state says. Where they are known to be
// those of the last state, it does what makes the difference, without reading the
// tables, so that it costs the same however many there are. Where it meets
// something that it does not expect, it is Apply.
func (r *Router) Put(s State) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known {
		if r.want.Equal(&s) {
			return nil
		}
		if done, err := r.changeLocked(r.want, &s); done || errors.As(err, new(*redirect.MissingError)) {
			r.want, r.known = &s, done
			return err
		}
	}
	_, err := r.applyLocked(&s)
	return err
}

// Is tells whether the tables are known to be those of a state.
func (r *Router) Is(s *State) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.known && r.want.Equal(s)
}

func (r *Router) changeLocked(from, to *State) (done bool, err error) {
	if from.MarkSteers != to.MarkSteers || from.Sources != to.Sources || from.MarkReplies != to.MarkReplies || from.ReplyPorts != to.ReplyPorts {
		return false, nil
	}
	c := redirect.Diff(
		&redirect.Plan{Local: from.Local, Foreign: from.Foreign, Own: from.PortRules},
		&redirect.Plan{Local: to.Local, Foreign: to.Foreign, Own: to.PortRules})
	if c.Size() > mostChanges {
		return false, nil
	}
	if err := r.addPart(&c, to); err != nil {
		return false, err
	}
	for _, d := range c.Own.Drop {
		if err := r.removeRule(r.portRule(d).netlink()); err != nil {
			return false, err
		}
	}
	for _, a := range c.Foreign.Drop {
		if err := r.removeRoute(r.route(r.opts.SteerTable, netip.PrefixFrom(a, a.BitLen()), netip.Addr{})); err != nil {
			return false, err
		}
	}
	for _, p := range c.Local.Drop {
		if err := r.removeRoute(r.route(syscall.RT_TABLE_LOCAL, p, netip.Addr{})); err != nil {
			return false, err
		}
	}
	return true, nil
}

// addPart adds what is new, routes first. What is there already is an error.
func (r *Router) addPart(c *redirect.Changes, to *State) error {
	var routes []*netlink.Route
	sources := map[service.Family]netip.Addr{}
	add := func(table int, p netip.Prefix) error {
		f := service.FamilyOf(p.Addr())
		source, known := sources[f]
		if !known {
			var err error
			if source, err = r.source(f, to); err != nil {
				return err
			}
			sources[f] = source
		}
		routes = append(routes, r.route(table, p, source))
		return nil
	}
	var errs []error
	for _, p := range c.Local.Add {
		errs = append(errs, add(syscall.RT_TABLE_LOCAL, p))
	}
	for _, a := range c.Foreign.Add {
		errs = append(errs, add(r.opts.SteerTable, netip.PrefixFrom(a, a.BitLen())))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, k := range routes {
		if err := r.nl.RouteAdd(k); err != nil {
			return fmt.Errorf("add %s: %w", routeText(k), err)
		}
	}
	for _, d := range c.Own.Add {
		if err := r.nl.RuleAdd(r.portRule(d).netlink()); err != nil {
			return fmt.Errorf("add %s: %w", ruleText(r.portRule(d).netlink()), err)
		}
	}
	return nil
}
