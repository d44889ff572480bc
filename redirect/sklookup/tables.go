package sklookup

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// tables are maps, the program that looks into them, and who has which slot.
type tables struct {
	*maps
	program *ebpf.Program
	slots   slots
}

// newTables makes empty ones, whose program counts in r.
func newTables(destinations, sockets int, r *refusals) (*tables, error) {
	m, err := unlocked(func() (*maps, error) { return newMaps(destinations, sockets) })
	if err != nil {
		return nil, err
	}
	program, err := load(m, r)
	if err != nil {
		m.close()
		return nil, explain(fmt.Errorf("the sk_lookup program: %w", err), FeatureSkLookup)
	}
	return &tables{maps: m, program: program}, nil
}

// unlocked makes maps by open. Before Linux 5.11, they are locked memory, whose limit may be too low.
func unlocked[M any](open func() (M, error)) (M, error) {
	m, err := open()
	if errors.Is(err, syscall.EPERM) && sys.LiftLockedMemoryLimit() == nil {
		m, err = open()
	}
	return m, explain(err, FeatureBPFCall)
}

func (t *tables) close() {
	_ = t.program.Close()
	t.maps.close()
}

// fill puts a plan into empty tables.
func (t *tables) fill(p *redirect.Plan, silent silence) error {
	if err := silent.enter(t.maps); err != nil {
		return err
	}
	c := redirect.Whole(p)
	return t.add(p, &c)
}

// add puts in what is new in a plan, sockets first, and changes what is
// different; what is gone stays.
func (t *tables) add(p *redirect.Plan, c *redirect.Changes) error {
	for _, s := range c.Steer {
		if _, err := t.slots.take(t.maps, listenerOf(s.Destination, s.Target)); err != nil {
			return t.full(err, "steer "+s.Destination.String())
		}
	}
	for d := range c.Touched {
		if s, is := t.verdict(p, d); is {
			if err := t.setDestination(d, s); err != nil {
				return t.full(err, d.String())
			}
		}
	}
	for _, a := range c.ClusterIPs.Add {
		if err := t.setRange(single(a), refused); err != nil {
			return t.full(err, "cluster IP "+a.String())
		}
	}
	for _, l := range c.Local.Add {
		if isCluster(p, l) {
			continue
		}
		if err := t.setRange(l, silentRange(l.Addr())); err != nil {
			return t.full(err, "local "+l.String())
		}
	}
	return nil
}

// remove takes out what is gone from one plan to the next, which was added
// before. It deletes ranges before destinations: a cluster IP refuses ports that
// have no destination.
func (t *tables) remove(old, p *redirect.Plan, c *redirect.Changes) error {
	var errs []error
	note := func(err error) { errs = append(errs, err) }
	for _, a := range c.ClusterIPs.Drop {
		if p.Local.Has(single(a)) {
			note(t.setRange(single(a), silentRange(a)))
		} else {
			note(t.deleteRange(single(a)))
		}
	}
	for _, l := range c.Local.Drop {
		if !isCluster(p, l) {
			note(t.deleteRange(l))
		}
	}
	for d := range c.Touched {
		if _, is := t.verdict(p, d); !is {
			note(t.deleteDestination(d))
		}
	}
	for _, s := range c.Steer {
		if s.Replaces {
			note(t.slots.drop(t.maps, listenerOf(s.Destination, target(old, s.Destination))))
		}
	}
	for _, d := range c.Unsteer {
		note(t.slots.drop(t.maps, listenerOf(d, target(old, d))))
	}
	return errors.Join(errs...)
}

// match reports whether the maps of destinations and ranges hold a plan.
func (t *tables) match(p *redirect.Plan) (bool, error) {
	destinations := p.Steer.Len() + p.Refuse.Len() + p.Silent.Len()
	for d := range p.Lingering.Keys() {
		if !p.Names(d) {
			destinations++
		}
	}
	same, err := match(t.destinations, destinations, func(key []byte) (slot, bool) { return t.verdict(p, destinationOf(key)) })
	if err != nil || !same {
		return same, err
	}
	ranges := p.ClusterIPs.Len()
	for l := range p.Local.Keys() {
		if !isCluster(p, l) {
			ranges++
		}
	}
	return match(t.ranges, ranges, func(key []byte) (slot, bool) {
		r := prefixOf(key)
		if isCluster(p, r) {
			return refused, true
		}
		return silentRange(r.Addr()), p.Local.Has(r)
	})
}

// verdict returns the slot that a destination has by a plan whose listeners have theirs.
func (t *tables) verdict(p *redirect.Plan, d service.Destination) (slot, bool) {
	if target, is := p.Steer.Get(d); is {
		at := t.slots.used[listenerOf(d, target)]
		if at == nil {
			return 0, false
		}
		return at.slot, true
	}
	if p.Silent.Has(d) {
		return silentSlot(d), true
	}
	return refused, p.Refuse.Has(d) || p.Lingering.Has(d)
}

// restore puts back sockets that are missing, and reports whether there were any.
func (t *tables) restore(silent silence) (bool, error) { return t.slots.restore(t.maps, silent) }

// full says what to do about a map without room.
func (t *tables) full(err error, what string) error {
	if errors.Is(err, syscall.E2BIG) || errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("%s: the BPF maps have room for %d destinations of each family", what, t.destinations[service.IPv4].MaxEntries())
	}
	return fmt.Errorf("%s: %w", what, err)
}

// isCluster reports whether a range is a cluster IP of a plan.
func isCluster(p *redirect.Plan, r netip.Prefix) bool {
	return r.IsSingleIP() && p.ClusterIPs.Has(r.Addr())
}

// target returns where a plan steers a destination to.
func target(p *redirect.Plan, d service.Destination) redirect.Target {
	t, _ := p.Steer.Get(d)
	return t
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
