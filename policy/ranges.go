package policy

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// ranges is a set of addresses of one family. Whether it holds an address is
// found without allocation in time that grows with the logarithm of its size,
// as a node may have a route, and thus a range, for each of its pods. The zero
// value is empty.
type ranges struct {
	list  []netip.Prefix // tidy
	spans []span         // of list
}

// span is a range as its first and last address.
type span struct{ first, last point }

// point is an address as a number. Those of IPv4 are mapped into IPv6.
type point struct{ high, low uint64 }

func pointOf(a netip.Addr) point {
	b := a.As16()
	return point{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func (p point) less(q point) bool { return p.high < q.high || p.high == q.high && p.low < q.low }

// newRanges takes over a list of ranges in any order.
func newRanges(list []netip.Prefix) ranges {
	r := ranges{list: tidy(list)}
	r.spans = make([]span, len(r.list))
	for i, p := range r.list {
		first := pointOf(p.Masked().Addr())
		r.spans[i] = span{first, first.fill(p.Addr().BitLen() - p.Bits())}
	}
	return r
}

// fill sets the last bits of a point.
func (p point) fill(bits int) point {
	p.low |= 1<<min(bits, 64) - 1 // of 64 bits, all
	p.high |= 1<<max(bits-64, 0) - 1
	return p
}

// holds tells whether an address is in the set.
func (r *ranges) holds(a netip.Addr) bool { return r.find(a) >= 0 }

// find gives the place in list of the range that an address is in, or -1.
func (r *ranges) find(a netip.Addr) int {
	if len(r.spans) == 0 {
		return -1
	}
	p := pointOf(a)
	from, n := 0, len(r.spans)
	for n > 1 { // the last that does not begin behind p
		half := n / 2
		if !p.less(r.spans[from+half].first) {
			from += half
		}
		n -= half
	}
	if s := &r.spans[from]; p.less(s.first) || s.last.less(p) {
		return -1
	}
	return from
}

// rangeOf gives the range that an address is in.
func (r *ranges) rangeOf(a netip.Addr) (netip.Prefix, bool) {
	i := r.find(a)
	if i < 0 {
		return netip.Prefix{}, false
	}
	return r.list[i], true
}

// tidy sorts ranges and leaves out those that lie within others. It changes
// the list that it is given.
func tidy(list []netip.Prefix) []netip.Prefix {
	slices.SortFunc(list, netip.Prefix.Compare) // the wider of two with one address first
	out := list[:0]
	for _, p := range list {
		if len(out) == 0 || !within(p, out[len(out)-1]) {
			out = append(out, p)
		}
	}
	return out
}

// intersect gives the ranges that are in both of two tidy lists, tidy too. Of
// two ranges that overlap, one lies within the other.
func intersect(a, b []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for len(a) > 0 && len(b) > 0 {
		switch p, q := a[0], b[0]; {
		case within(p, q):
			out, a = append(out, p), a[1:]
		case within(q, p):
			out, b = append(out, q), b[1:]
		case p.Addr().Less(q.Addr()):
			a = a[1:]
		default:
			b = b[1:]
		}
	}
	return out
}

// within tells whether all of p is in q.
func within(p, q netip.Prefix) bool { return q.Contains(p.Addr()) && p.Bits() >= q.Bits() }

// whole gives the range that is one address.
func whole(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func contains(list []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}
