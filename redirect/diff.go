package redirect

import (
	"cmp"
	"net/netip"
	"reflect"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Changes is what has to be done to get from one Plan to another. Each list is
// sorted, so that the same two plans always give the same Changes.
type Changes struct {
	Steer       []Steering            // destinations that are new, or have another target
	Unsteer     []service.Destination // destinations that no listener accepts for any more
	Refuse      []service.Destination
	Unrefuse    []service.Destination
	Silence     []service.Destination
	Unsilence   []service.Destination
	AddCluster  []netip.Addr
	DropCluster []netip.Addr
	AddLocal    []netip.Prefix // differences of the two covers (see Cover)
	DropLocal   []netip.Prefix
	AddForeign  []netip.Addr
	DropForeign []netip.Addr
	Linger      []service.Destination
	Unlinger    []service.Destination
	AddOwn      []service.Destination
	DropOwn     []service.Destination
}

// Steering is one destination with its target.
type Steering struct {
	Destination service.Destination
	Target      Target
	Replaces    bool // the destination was steered before, to another target
}

// Empty tells whether nothing has to be done.
func (c *Changes) Empty() bool { return c.Size() == 0 }

// Size is the number of elements that change.
func (c *Changes) Size() int {
	return len(c.Steer) + len(c.Unsteer) + len(c.Refuse) + len(c.Unrefuse) +
		len(c.Silence) + len(c.Unsilence) +
		len(c.AddCluster) + len(c.DropCluster) + len(c.AddLocal) + len(c.DropLocal) +
		len(c.AddForeign) + len(c.DropForeign) + len(c.Linger) + len(c.Unlinger) +
		len(c.AddOwn) + len(c.DropOwn)
}

// Diff gives the changes that lead from one plan to another.
func Diff(from, to *Plan) Changes {
	var c Changes
	c.Steer, c.Unsteer = diffSteer(from.Steer, to.Steer)
	c.Refuse, c.Unrefuse = diffKeys(from.Refuse, to.Refuse)
	c.Silence, c.Unsilence = diffKeys(from.Silent, to.Silent)
	c.AddCluster, c.DropCluster = diffKeys(from.ClusterIPs, to.ClusterIPs)
	c.AddLocal, c.DropLocal = DiffLocal(Cover(from.Local), Cover(to.Local))
	c.AddForeign, c.DropForeign = diffKeys(from.Foreign, to.Foreign)
	c.Linger, c.Unlinger = diffKeys(from.Lingering, to.Lingering)
	c.AddOwn, c.DropOwn = diffKeys(from.Own, to.Own)

	slices.SortFunc(c.Steer, func(a, b Steering) int { return CompareDestinations(a.Destination, b.Destination) })
	for _, list := range [][]service.Destination{
		c.Unsteer, c.Refuse, c.Unrefuse, c.Silence, c.Unsilence, c.Linger, c.Unlinger, c.AddOwn, c.DropOwn,
	} {
		slices.SortFunc(list, CompareDestinations)
	}
	for _, list := range [][]netip.Addr{c.AddCluster, c.DropCluster, c.AddForeign, c.DropForeign} {
		slices.SortFunc(list, netip.Addr.Compare)
	}
	return c
}

func diffSteer(from, to map[service.Destination]Target) (add []Steering, drop []service.Destination) {
	if SameMap(from, to) {
		return nil, nil
	}
	kept := 0
	for d, t := range to {
		old, was := from[d]
		if was {
			kept++
		}
		if !was || old != t {
			add = append(add, Steering{Destination: d, Target: t, Replaces: was})
		}
	}
	return add, missing(from, to, kept)
}

func diffKeys[K comparable](from, to map[K]struct{}) (add, drop []K) {
	if SameMap(from, to) {
		return nil, nil
	}
	kept := 0
	for k := range to {
		if _, was := from[k]; was {
			kept++
		} else {
			add = append(add, k)
		}
	}
	return add, missing(from, to, kept)
}

// missing gives the keys of from that to does not have; kept is how many it
// has.
func missing[K comparable, V any](from, to map[K]V, kept int) (keys []K) {
	if kept == len(from) {
		return nil
	}
	for k := range from {
		if _, still := to[k]; !still {
			keys = append(keys, k)
		}
	}
	return keys
}

// SameMap tells whether two variables are one map.
func SameMap[K comparable, V any](a, b map[K]V) bool {
	return reflect.ValueOf(a).Pointer() == reflect.ValueOf(b).Pointer()
}

// DiffLocal gives what one cover has that another has not.
func DiffLocal(from, to []netip.Prefix) (add, drop []netip.Prefix) {
	for len(from) > 0 || len(to) > 0 {
		switch {
		case len(from) == 0:
			return append(add, to...), drop
		case len(to) == 0:
			return add, append(drop, from...)
		case from[0] == to[0]:
			from, to = from[1:], to[1:]
		case comparePrefixes(from[0], to[0]) < 0:
			drop, from = append(drop, from[0]), from[1:]
		default:
			add, to = append(add, to[0]), to[1:]
		}
	}
	return add, drop
}

// Cover gives the fewest of the prefixes that cover the same addresses: masked,
// sorted, without those that lie within others. The argument stays as it is.
func Cover(prefixes []netip.Prefix) []netip.Prefix {
	sorted := make([]netip.Prefix, len(prefixes))
	for i, p := range prefixes {
		sorted[i] = p.Masked()
	}
	slices.SortFunc(sorted, comparePrefixes)
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

// Covers tells whether an address lies within one of the prefixes of a cover.
func Covers(cover []netip.Prefix, a netip.Addr) bool {
	after, _ := slices.BinarySearchFunc(cover, a, func(p netip.Prefix, a netip.Addr) int {
		if p.Addr().Compare(a) <= 0 {
			return -1
		}
		return 1
	})
	return after > 0 && cover[after-1].Contains(a)
}

func comparePrefixes(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return cmp.Compare(a.Bits(), b.Bits())
}

// CompareDestinations orders destinations by address, port and protocol.
func CompareDestinations(a, b service.Destination) int {
	if c := a.Addr.Compare(b.Addr); c != 0 {
		return c
	}
	if c := cmp.Compare(a.Port, b.Port); c != 0 {
		return c
	}
	return cmp.Compare(a.Protocol, b.Protocol)
}
