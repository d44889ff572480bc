package redirect

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Changes is what leads from one Plan to another, by the names of its sets. The
// lists are sorted, so that the same two plans always give the same Changes.
type Changes struct {
	Steer   []Steering            // destinations that are new, or have another target
	Unsteer []service.Destination // destinations that no listener accepts for any more

	Refuse, Silent, Lingering, Own Delta[service.Destination]
	ClusterIPs, NonLocal, Node     Delta[netip.Addr]
	Local                          Delta[netip.Prefix]
}

// Steering is one destination with its target.
type Steering struct {
	Destination service.Destination
	Target      Target
	Replaces    bool // the destination was steered before, to another target
}

// Delta is what comes into a Set and what goes.
type Delta[K Key] struct{ Add, Drop []K }

// Size is the number of elements that change.
func (d *Delta[K]) Size() int { return len(d.Add) + len(d.Drop) }

// Empty reports whether nothing has to be done.
func (c *Changes) Empty() bool { return c.Size() == 0 }

// Size is the number of elements that change.
func (c *Changes) Size() int {
	return len(c.Steer) + len(c.Unsteer) + c.Refuse.Size() + c.Silent.Size() + c.Lingering.Size() + c.Own.Size() +
		c.ClusterIPs.Size() + c.NonLocal.Size() + c.Node.Size() + c.Local.Size()
}

// Touched gives the destinations that any of the changes but Own is about; one
// that moves from one set to another comes twice.
func (c *Changes) Touched(yield func(service.Destination) bool) {
	for i := range c.Steer {
		if !yield(c.Steer[i].Destination) {
			return
		}
	}
	for _, list := range [...][]service.Destination{c.Unsteer, c.Refuse.Add, c.Refuse.Drop, c.Silent.Add, c.Silent.Drop, c.Lingering.Add, c.Lingering.Drop} {
		for _, d := range list {
			if !yield(d) {
				return
			}
		}
	}
}

// Rehomes reports whether an address moves between Local and NonLocal, in which case
// it may have destinations that stay.
func (c *Changes) Rehomes(from, to *Plan) bool {
	return slices.ContainsFunc(c.NonLocal.Add, func(a netip.Addr) bool { return IsLocal(from.Local, a) }) ||
		slices.ContainsFunc(c.NonLocal.Drop, func(a netip.Addr) bool { return IsLocal(to.Local, a) })
}

// Diff returns the changes that lead from one plan to another. It reads what the
// two do not share (see [Map]), so that a small change is found as fast in a big
// plan as in a small one.
func Diff(from, to *Plan) Changes {
	c := unsorted(from, to)
	slices.SortFunc(c.Steer, func(a, b Steering) int { return CompareDestinations(a.Destination, b.Destination) })
	slices.SortFunc(c.Unsteer, CompareDestinations)
	for _, d := range []*Delta[service.Destination]{&c.Refuse, &c.Silent, &c.Lingering, &c.Own} {
		d.sort(CompareDestinations)
	}
	for _, d := range []*Delta[netip.Addr]{&c.ClusterIPs, &c.NonLocal, &c.Node} {
		d.sort(netip.Addr.Compare)
	}
	c.Local.sort(netip.Prefix.Compare)
	return c
}

// Whole returns the changes that lead from nothing to a plan, in no order.
func Whole(p *Plan) Changes { return unsorted(&Plan{}, p) }

func unsorted(from, to *Plan) Changes {
	c := Changes{
		Refuse: deltaOf(from.Refuse, to.Refuse), Silent: deltaOf(from.Silent, to.Silent),
		Lingering: deltaOf(from.Lingering, to.Lingering), Own: deltaOf(from.Own, to.Own),
		ClusterIPs: deltaOf(from.ClusterIPs, to.ClusterIPs), NonLocal: deltaOf(from.NonLocal, to.NonLocal),
		Node: deltaOf(from.Node, to.Node), Local: deltaOf(from.Local, to.Local),
	}
	for d, ch := range changes(from.Steer, to.Steer) {
		if ch.is {
			c.Steer = append(c.Steer, Steering{Destination: d, Target: ch.new, Replaces: ch.was})
		} else {
			c.Unsteer = append(c.Unsteer, d)
		}
	}
	return c
}

func deltaOf[K Key](from, to Set[K]) (d Delta[K]) {
	for k, ch := range changes(from, to) {
		if ch.is {
			d.Add = append(d.Add, k)
		} else {
			d.Drop = append(d.Drop, k)
		}
	}
	return d
}

func (d *Delta[K]) sort(compare func(K, K) int) {
	slices.SortFunc(d.Add, compare)
	slices.SortFunc(d.Drop, compare)
}

// LocalOf returns prefixes as Plan.Local holds them.
func LocalOf(prefixes ...netip.Prefix) Set[netip.Prefix] { return SetOf(Cover(prefixes)...) }

// Ranges returns the ranges of Plan.Local, sorted.
func Ranges(local Set[netip.Prefix]) []netip.Prefix {
	return slices.SortedFunc(local.Keys(), netip.Prefix.Compare)
}

// Joined returns what two of Plan.Local cover together.
func Joined(a, b Set[netip.Prefix]) Set[netip.Prefix] {
	both := b
	for p, ch := range changes(b, a) {
		if !ch.is {
			continue
		}
		if !p.IsSingleIP() {
			return LocalOf(slices.Concat(Ranges(a), Ranges(b))...)
		}
		if _, is := within(b, p.Addr(), p.Bits()); !is {
			both = both.With(p, struct{}{})
		}
	}
	return both
}

// IsLocal reports whether an address lies in one of the ranges of Plan.Local.
func IsLocal(local Set[netip.Prefix], a netip.Addr) bool {
	_, is := within(local, a, a.BitLen())
	return is
}

// within returns the range of a Plan.Local that an address lies in, if it has so
// many bits at most.
func within(local Set[netip.Prefix], a netip.Addr, bits int) (netip.Prefix, bool) {
	if local.Len() == 0 {
		return netip.Prefix{}, false
	}
	for ; bits >= 0; bits-- {
		if p, err := a.Prefix(bits); err == nil && local.Has(p) {
			return p, true
		}
	}
	return netip.Prefix{}, false
}

// Cover returns the fewest of the prefixes that cover the same addresses: masked,
// sorted, without those that lie within others. The argument stays as it is.
func Cover(prefixes []netip.Prefix) []netip.Prefix {
	sorted := make([]netip.Prefix, len(prefixes))
	for i, p := range prefixes {
		sorted[i] = p.Masked()
	}
	slices.SortFunc(sorted, netip.Prefix.Compare)
	cover := sorted[:0]
	for _, p := range sorted {
		// A prefix sorts after every prefix that it lies within.
		if n := len(cover); n > 0 && cover[n-1].Overlaps(p) {
			continue
		}
		cover = append(cover, p)
	}
	return cover
}

// Except returns the fewest ranges that cover a range without some addresses,
// sorted. Of the addresses, those outside of the range do not count.
func Except(p netip.Prefix, without []netip.Addr) []netip.Prefix {
	p = p.Masked()
	sorted := slices.DeleteFunc(slices.Clone(without), func(a netip.Addr) bool { return !p.Contains(a) })
	slices.SortFunc(sorted, netip.Addr.Compare)
	return except(nil, p, sorted)
}

func except(out []netip.Prefix, p netip.Prefix, sorted []netip.Addr) []netip.Prefix {
	switch {
	case len(sorted) == 0:
		return append(out, p)
	case p.IsSingleIP():
		return out
	}
	lower := netip.PrefixFrom(p.Addr(), p.Bits()+1)
	b := p.Addr().AsSlice()
	b[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	a, _ := netip.AddrFromSlice(b)
	i, _ := slices.BinarySearchFunc(sorted, a, netip.Addr.Compare)
	return except(except(out, lower, sorted[:i]), netip.PrefixFrom(a, p.Bits()+1), sorted[i:])
}

// CompareDestinations orders destinations by address, port and protocol.
func CompareDestinations(a, b service.Destination) int {
	return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
}
