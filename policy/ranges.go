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
	four []span4 // of list, which is of one family
	six  []span6
	list []netip.Prefix // tidy
}

// A span is a range as its first and last address. Eight of IPv4 are in one
// line of the processor's cache.
type (
	span4 struct{ first, last uint32 }
	span6 struct{ first, last point }
)

func number(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

// point is an IPv6 address as a number.
type point struct{ high, low uint64 }

func pointOf(a netip.Addr) point {
	b := a.As16()
	return point{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func (p point) less(q point) bool { return p.high < q.high || p.high == q.high && p.low < q.low }

// newRanges takes over a list of ranges of one family in any order.
func newRanges(list []netip.Prefix) ranges {
	r := ranges{list: tidy(list)}
	for _, p := range r.list {
		rest := p.Addr().BitLen() - p.Bits()
		if p.Addr().Is4() {
			first := number(p.Masked().Addr())
			r.four = append(r.four, span4{first, first | uint32(1<<rest-1)})
			continue
		}
		first := pointOf(p.Masked().Addr())
		last := point{first.high | (1<<max(rest-64, 0) - 1), first.low | (1<<min(rest, 64) - 1)}
		r.six = append(r.six, span6{first, last})
	}
	return r
}

// holds tells whether an address is in the set.
func (r *ranges) holds(a netip.Addr) bool { return r.find(a) >= 0 }

// find gives the place in list of the range that an address is in, or -1: the
// last that does not begin behind it, if it does not end before it.
func (r *ranges) find(a netip.Addr) int {
	if a.Is4() {
		return r.find4(number(a))
	}
	return r.find6(pointOf(a))
}

func (r *ranges) find4(n uint32) int {
	from, to := 0, len(r.four)
	for from < to {
		if half := int(uint(from+to) / 2); n < r.four[half].first {
			to = half
		} else {
			from = half + 1
		}
	}
	if from == 0 || r.four[from-1].last < n {
		return -1
	}
	return from - 1
}

func (r *ranges) find6(p point) int {
	from, to := 0, len(r.six)
	for from < to {
		if half := int(uint(from+to) / 2); p.less(r.six[half].first) {
			to = half
		} else {
			from = half + 1
		}
	}
	if from == 0 || r.six[from-1].last.less(p) {
		return -1
	}
	return from - 1
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
