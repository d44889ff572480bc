package sklookup

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
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

// newTables makes empty ones.
func newTables(destinations, sockets int) (*tables, error) {
	m, err := newMaps(destinations, sockets)
	if errors.Is(err, syscall.EPERM) && sys.LiftLockedMemoryLimit() == nil {
		// Before Linux 5.11, maps are locked memory.
		m, err = newMaps(destinations, sockets)
	}
	if err != nil {
		return nil, explain(err, FeatureBPFCall)
	}
	program, err := load(m)
	if err != nil {
		m.close()
		return nil, explain(fmt.Errorf("the sk_lookup program: %w", err), FeatureSkLookup)
	}
	return &tables{maps: m, program: program}, nil
}

func (t *tables) close() {
	_ = t.program.Close()
	t.maps.close()
}

// fill puts a plan into empty tables.
func (t *tables) fill(p *redirect.Plan, silent *silence) error {
	if err := silent.enter(t.maps); err != nil {
		return err
	}
	c := redirect.Diff(&redirect.Plan{}, p)
	return t.add(p, &c)
}

// add puts in what is new in a plan, sockets first, and changes what is
// different; what is gone stays.
func (t *tables) add(p *redirect.Plan, c *redirect.Changes) error {
	for _, s := range c.Steer {
		n, err := t.slots.take(t.maps, listenerOf(s.Destination, s.Target))
		if err == nil {
			err = t.setDestination(s.Destination, n)
		}
		if err != nil {
			return t.full(err, "steer "+redirect.Format(s.Destination))
		}
	}
	for _, d := range c.Refuse {
		if err := t.setDestination(d, refused); err != nil {
			return t.full(err, "refuse "+redirect.Format(d))
		}
	}
	for _, d := range c.Silence {
		if err := t.setDestination(d, silentSlot(d)); err != nil {
			return t.full(err, "silence "+redirect.Format(d))
		}
	}
	for d := range p.Lingering {
		if isNamed(p, d) {
			continue
		}
		if err := t.setDestination(d, refused); err != nil {
			return t.full(err, "refuse "+redirect.Format(d))
		}
	}
	for _, a := range c.AddCluster {
		if err := t.setRange(single(a), refused); err != nil {
			return t.full(err, "cluster IP "+a.String())
		}
	}
	for _, l := range c.AddLocal {
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
// before.
func (t *tables) remove(old, p *redirect.Plan, c *redirect.Changes) error {
	var errs []error
	note := func(err error) { errs = append(errs, err) }
	forget := func(d service.Destination) {
		if _, lingers := p.Lingering[d]; !lingers && !isNamed(p, d) {
			note(t.deleteDestination(d))
		}
	}
	for _, d := range slices.Concat(c.Unsteer, c.Unrefuse, c.Unsilence) {
		forget(d)
	}
	for d := range old.Lingering {
		forget(d)
	}
	local := redirect.Cover(p.Local)
	for _, a := range c.DropCluster {
		if _, is := slices.BinarySearchFunc(local, single(a), comparePrefixes); is {
			note(t.setRange(single(a), silentRange(a)))
		} else {
			note(t.deleteRange(single(a)))
		}
	}
	for _, l := range c.DropLocal {
		if !isCluster(p, l) {
			note(t.deleteRange(l))
		}
	}
	for _, s := range c.Steer {
		if s.Replaces {
			note(t.slots.drop(t.maps, listenerOf(s.Destination, old.Steer[s.Destination])))
		}
	}
	for _, d := range c.Unsteer {
		note(t.slots.drop(t.maps, listenerOf(d, old.Steer[d])))
	}
	return errors.Join(errs...)
}

// match tells whether the maps of destinations and ranges hold a plan.
func (t *tables) match(p *redirect.Plan) (bool, error) {
	destinations := len(p.Steer) + len(p.Refuse) + len(p.Silent)
	for d := range p.Lingering {
		if !isNamed(p, d) {
			destinations++
		}
	}
	same, err := t.matchDestinations(destinations, func(d service.Destination) (slot, bool) { return t.verdict(p, d) })
	if err != nil || !same {
		return same, err
	}
	local := redirect.Cover(p.Local)
	ranges := len(p.ClusterIPs)
	for _, l := range local {
		if !isCluster(p, l) {
			ranges++
		}
	}
	return t.matchRanges(ranges, func(r netip.Prefix) (slot, bool) {
		if isCluster(p, r) {
			return refused, true
		}
		_, is := slices.BinarySearchFunc(local, r, comparePrefixes)
		return silentRange(r.Addr()), is
	})
}

// verdict gives the slot that a destination has by a plan that is in force.
func (t *tables) verdict(p *redirect.Plan, d service.Destination) (slot, bool) {
	if target, is := p.Steer[d]; is {
		at := t.slots.used[listenerOf(d, target)]
		if at == nil {
			return 0, false
		}
		return at.slot, true
	}
	if _, is := p.Silent[d]; is {
		return silentSlot(d), true
	}
	_, refuses := p.Refuse[d]
	_, lingers := p.Lingering[d]
	return refused, refuses || lingers
}

// restore puts back sockets that are missing, and tells whether there were any.
func (t *tables) restore(silent *silence) (bool, error) { return t.slots.restore(t.maps, silent) }

// full says what to do about a map without room.
func (t *tables) full(err error, what string) error {
	if errors.Is(err, syscall.E2BIG) || errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("%s: the BPF maps have room for %d destinations of each family", what, t.destinations4.MaxEntries())
	}
	return fmt.Errorf("%s: %w", what, err)
}

// isNamed tells whether a plan has a verdict of its own on a destination.
func isNamed(p *redirect.Plan, d service.Destination) bool {
	_, steer := p.Steer[d]
	_, refuse := p.Refuse[d]
	_, silent := p.Silent[d]
	return steer || refuse || silent
}

// isCluster tells whether a range is a cluster IP of a plan.
func isCluster(p *redirect.Plan, r netip.Prefix) bool {
	if !r.IsSingleIP() {
		return false
	}
	_, is := p.ClusterIPs[r.Addr()]
	return is
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// comparePrefixes orders prefixes as redirect.Cover does.
func comparePrefixes(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}
