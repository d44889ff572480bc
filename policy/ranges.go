package policy

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// ranges is a set of addresses of one family. Lookup is a binary search without
// allocation, because a node may have a route, and so a range, for each of its pods.
// The zero value is empty.
type ranges struct {
	four []span4 // the ranges of list as spans; only one of four and six is used
	six  []span6
	list []netip.Prefix // see tidy
}

// A span is the first and last address of a range. One cache line holds eight IPv4
// spans.
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

// newRanges takes ownership of an unsorted list of ranges of one family.
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

// holds reports whether the set contains an address.
func (r *ranges) holds(a netip.Addr) bool { return r.find(a) >= 0 }

// find returns the index in list of the range that contains an address, or -1. It
// searches for the last range that begins at or before the address.
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

// rangeOf returns the range that contains an address.
func (r *ranges) rangeOf(a netip.Addr) (netip.Prefix, bool) {
	i := r.find(a)
	if i < 0 {
		return netip.Prefix{}, false
	}
	return r.list[i], true
}

// tidy sorts ranges and removes nested ones. It changes its argument.
func tidy(list []netip.Prefix) []netip.Prefix {
	slices.SortFunc(list, netip.Prefix.Compare) // by address, then the wider range first
	out := list[:0]
	for _, p := range list {
		if len(out) == 0 || !within(p, out[len(out)-1]) {
			out = append(out, p)
		}
	}
	return out
}

// intersect returns the intersection of two tidy lists, which is tidy too. Prefixes
// that overlap are always nested.
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

// within reports whether q contains all of p.
func within(p, q netip.Prefix) bool { return q.Contains(p.Addr()) && p.Bits() >= q.Bits() }

// whole returns the range of a single address.
func whole(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func contains(list []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}
