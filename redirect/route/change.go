package route

import (
	"errors"
	"net/netip"
	"syscall"

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

// Is reports whether the tables are known to be those of a state.
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
		&redirect.Plan{Local: from.Local, NonLocal: from.NonLocal, Own: from.PortRules},
		&redirect.Plan{Local: to.Local, NonLocal: to.NonLocal, Own: to.PortRules})
	if c.Size() > mostChanges {
		return false, nil
	}
	var sources [redirect.Families]*netip.Addr
	for _, e := range r.entries(c.Local.Add, c.NonLocal.Add) {
		f := service.FamilyOf(e.Addr())
		if sources[f] == nil {
			source, err := r.source(f, to)
			if err != nil {
				return false, err
			}
			sources[f] = &source
			if !r.sources[f].IsValid() {
				r.sources[f] = source
			}
		}
		if err := r.nl.RouteAdd(r.route(e.table, e.Prefix, *sources[f])); err != nil { // also if it is there
			return false, err
		}
	}
	for _, d := range c.Own.Add {
		k := r.portRule(d)
		if err := r.addRule(&k); err != nil {
			return false, err
		}
	}
	for _, d := range c.Own.Drop {
		if err := r.removeRule(r.portRule(d).netlink()); err != nil {
			return false, err
		}
	}
	for _, e := range r.entries(c.Local.Drop, c.NonLocal.Drop) {
		if err := r.removeRoute(r.route(e.table, e.Prefix, netip.Addr{})); err != nil {
			return false, err
		}
	}
	return true, nil
}

// entry is what a routing table has for a range.
type entry struct {
	netip.Prefix
	table int
}

func (r *Router) entries(local []netip.Prefix, foreign []netip.Addr) (all []entry) {
	for _, p := range local {
		all = append(all, entry{p, syscall.RT_TABLE_LOCAL})
	}
	for _, a := range foreign {
		all = append(all, entry{netip.PrefixFrom(a, a.BitLen()), r.opts.SteerTable})
	}
	return all
}
