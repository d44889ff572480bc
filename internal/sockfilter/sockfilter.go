// Package sockfilter compiles programs that let a listening socket answer some
// clients and be silent to all others.
//
// A program is classic BPF, which every kernel takes without any right, and
// runs for the first packet of a connection, before a handshake begins: who is
// dropped sees no answer at all (F5). [Compile] is pure; sys.AttachFilter puts
// what it gives in force.
package sockfilter

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Rule says who may come to one address and port. What is sent to others is
// kept.
type Rule struct {
	Addr netip.Addr
	Port uint16
	// Allowed are the clients whose packets are kept, in any order; ranges of
	// the other family have no effect. None means that nobody's are.
	Allowed []netip.Prefix
}

// ErrTooLong means that the kernel takes no program that is long enough.
var ErrTooLong = errors.New("too many source ranges for a socket filter")

// Nothing drops every packet.
var Nothing = []sys.FilterOp{{Code: sys.FilterReturn, K: 0}}

// NoOpenings drops the packets that open a connection, and keeps what belongs to
// a handshake that has begun.
var NoOpenings = []sys.FilterOp{
	{Code: sys.FilterLoadWord, K: 12},    // of the TCP header, with the flags
	{Code: sys.FilterAnd, K: 0x00020000}, // SYN
	{Code: sys.FilterIfEqual, K: 0, Jt: 0, Jf: 1},
	{Code: sys.FilterReturn, K: keepAll},
	{Code: sys.FilterReturn, K: 0},
}

// Compile returns the program for a socket of one family, that of the rules. An
// IPv4 range takes a little more than two instructions, so that 1,900 of them
// fit; IPv6 takes up to six times as many, less where ranges share their first
// bits. Finding a client among n ranges takes log n steps.
func Compile(rules []Rule) ([]sys.FilterOp, error) {
	if len(rules) == 0 {
		return []sys.FilterOp{{Code: sys.FilterReturn, K: keepAll}}, nil
	}
	sorted := slices.SortedFunc(slices.Values(rules), func(a, b Rule) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port))
	})
	b := builder{v6: !sorted[0].Addr.Is4(), sources: make(map[string]*step)}
	for i, r := range sorted {
		switch {
		case !r.Addr.IsValid() || r.Addr.Is4In6() || r.Addr.Zone() != "":
			return nil, fmt.Errorf("socket filter for %q: not a plain IPv4 or IPv6 address", r.Addr)
		case r.Addr.Is4() == b.v6:
			return nil, fmt.Errorf("socket filter for %s and %s: two families", sorted[0].Addr, r.Addr)
		case i > 0 && r.Addr == sorted[i-1].Addr && r.Port == sorted[i-1].Port:
			return nil, fmt.Errorf("socket filter for %s: two rules", netip.AddrPortFrom(r.Addr, r.Port))
		}
	}
	b.destinations(sorted, 0)
	return b.program()
}

// A program is a graph of steps: each loads a part of the packet, finds it among
// its entries, and goes on to the step that the entry names.
type step struct {
	load      sys.FilterOp
	stage     int // steps go on to higher stages only
	entries   []entry
	otherwise *step
	at        int // where its instructions begin
}

// entry is a range of values, first to last. Those of a step are sorted and do
// not overlap.
type entry struct {
	first, last uint32
	next        *step
}

// The ends of all programs.
var (
	keep = new(step)
	drop = new(step)
)

// keepAll is how much is kept of a packet that is not dropped.
const keepAll = 0xffffffff

// Offsets in the two IP headers, and of the destination port in those of TCP
// and UDP.
const (
	source4, dest4 = 12, 16
	source6, dest6 = 8, 24
	destPort       = 2
)

// builder makes the graph of a program.
type builder struct {
	v6      bool
	steps   []*step
	sources map[string]*step // by the ranges that they let in
}

// words is how many 32-bit words an address has.
func (b *builder) words() int {
	if b.v6 {
		return 4
	}
	return 1
}

func word(a netip.Addr, i int) uint32 {
	if a.Is4() {
		w := a.As4()
		return uint32(w[0])<<24 | uint32(w[1])<<16 | uint32(w[2])<<8 | uint32(w[3])
	}
	w := a.As16()
	return uint32(w[4*i])<<24 | uint32(w[4*i+1])<<16 | uint32(w[4*i+2])<<8 | uint32(w[4*i+3])
}

func (b *builder) newStep(stage int, load sys.FilterOp, otherwise *step) *step {
	s := &step{stage: stage, load: load, otherwise: otherwise}
	b.steps = append(b.steps, s)
	return s
}

// destinations makes the step for the i-th word of the address, and all that
// come after. The rules are sorted and share the words before.
func (b *builder) destinations(rules []Rule, i int) *step {
	if i == b.words() {
		return b.ports(rules)
	}
	at := uint32(dest4)
	if b.v6 {
		at = dest6
	}
	s := b.newStep(i, sys.FilterOp{Code: sys.FilterLoadWord, K: sys.FilterNetwork + at + 4*uint32(i)}, keep)
	for len(rules) > 0 {
		w := word(rules[0].Addr, i)
		n := 1
		for n < len(rules) && word(rules[n].Addr, i) == w {
			n++
		}
		s.entries = append(s.entries, entry{first: w, last: w, next: b.destinations(rules[:n], i+1)})
		rules = rules[n:]
	}
	return s
}

// ports makes the step for the destination port. The rules have one address.
func (b *builder) ports(rules []Rule) *step {
	s := b.newStep(b.words(), sys.FilterOp{Code: sys.FilterLoadHalf, K: destPort}, keep)
	for _, r := range rules {
		p := uint32(r.Port)
		s.entries = append(s.entries, entry{first: p, last: p, next: b.from(r.Allowed)})
	}
	return s
}

// from returns the step that lets ranges in. Rules with the same ranges share it.
func (b *builder) from(allowed []netip.Prefix) *step {
	ranges := make([]netip.Prefix, 0, len(allowed))
	for _, p := range allowed {
		if p.IsValid() && p.Addr().Is4() != b.v6 && !p.Addr().Is4In6() {
			ranges = append(ranges, p.Masked())
		}
	}
	slices.SortFunc(ranges, netip.Prefix.Compare)
	var key []byte
	tidy := ranges[:0]
	for _, p := range ranges {
		// A range sorts after every range that it lies within.
		if n := len(tidy); n > 0 && tidy[n-1].Overlaps(p) {
			continue
		}
		tidy = append(tidy, p)
		key, _ = p.AppendBinary(key) // it always succeeds
	}
	if len(tidy) == 0 {
		return drop
	}
	s := b.sources[string(key)]
	if s == nil {
		s = b.clients(tidy, 0)
		b.sources[string(key)] = s
	}
	return s
}

// clients makes the step for the i-th word of the client's address, and all
// that come after. The ranges are sorted, do not overlap, and share the words
// before.
func (b *builder) clients(ranges []netip.Prefix, i int) *step {
	at := uint32(source4)
	if b.v6 {
		at = source6
	}
	s := b.newStep(b.words()+1+i, sys.FilterOp{Code: sys.FilterLoadWord, K: sys.FilterNetwork + at + 4*uint32(i)}, drop)
	for len(ranges) > 0 {
		w := word(ranges[0].Addr(), i)
		if bits := ranges[0].Bits() - 32*i; bits <= 32 {
			last := w | uint32(uint64(1)<<(32-bits)-1)
			if n := len(s.entries); n > 0 && s.entries[n-1].next == keep && s.entries[n-1].last+1 == w {
				s.entries[n-1].last = last
			} else {
				s.entries = append(s.entries, entry{first: w, last: last, next: keep})
			}
			ranges = ranges[1:]
			continue
		}
		n := 1
		for n < len(ranges) && word(ranges[n].Addr(), i) == w {
			n++
		}
		s.entries = append(s.entries, entry{first: w, last: w, next: b.clients(ranges[:n], i+1)})
		ranges = ranges[n:]
	}
	return s
}
