// Package sockfilter compiles programs with which a listening socket answers some
// clients and drops all others.
//
// A program is classic BPF, which every kernel accepts without privileges. It runs
// for the first packet of a connection, before the handshake, so a dropped client
// gets no answer (F5). [Compile] is pure and safe for concurrent use.
// sys.AttachFilter attaches the program.
package sockfilter

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Rule selects the clients of one address and port. The program keeps packets to
// other destinations.
type Rule struct {
	Addr netip.Addr
	Port uint16
	// Allowed are the clients whose packets are kept, in any order. Ranges of the
	// other family have no effect. An empty list allows no client.
	Allowed []netip.Prefix
}

// ErrTooLong means that the program would exceed the kernel's limit.
var ErrTooLong = errors.New("too many source ranges for a socket filter")

// Nothing drops every packet.
var Nothing = []sys.FilterOp{{Code: sys.FilterReturn, K: 0}}

// NoOpenings drops the packets that open a connection and keeps those of handshakes
// in progress.
var NoOpenings = []sys.FilterOp{
	{Code: sys.FilterLoadWord, K: 12},    // of the TCP header, with the flags
	{Code: sys.FilterAnd, K: 0x00020000}, // SYN
	{Code: sys.FilterIfEqual, K: 0, Jt: 0, Jf: 1},
	{Code: sys.FilterReturn, K: keepAll},
	{Code: sys.FilterReturn, K: 0},
}

// NoAssociations drops the packets that open an SCTP association. For SCTP, the program
// sees a packet from its first chunk on, which an INIT is alone in.
var NoAssociations = []sys.FilterOp{
	{Code: sys.FilterLoadByte, K: 0},
	{Code: sys.FilterIfEqual, K: chunkINIT, Jt: 1, Jf: 0},
	{Code: sys.FilterReturn, K: keepAll},
	{Code: sys.FilterReturn, K: 0},
}

// chunkINIT is the type of an INIT chunk (RFC 9260).
const chunkINIT = 1

// CompileClients returns the program for a socket that is bound to an address and serves
// clients in some ranges only. Unlike Compile's, it does not look at the port, which is
// not in sight for SCTP. The error wraps ErrTooLong if the program does not fit.
func CompileClients(at netip.Addr, allowed []netip.Prefix) ([]sys.FilterOp, error) {
	b := builder{v6: !at.Is4(), sources: make(map[string]*step)}
	if b.from(allowed) == drop {
		return Nothing, nil
	}
	return b.program()
}

// Compile returns the program for a socket of the family of the rules. An IPv4
// range takes a little more than two instructions, so 1,900 ranges fit. An IPv6
// range takes up to six times as many, less if ranges share their first bits. A
// lookup among n ranges takes log n steps. The error wraps ErrTooLong if the
// program does not fit.
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

// step loads a value of the packet and leads to the step of the entry that holds it.
type step struct {
	load      sys.FilterOp
	stage     int // steps lead only to higher stages
	entries   []entry
	otherwise *step
	at        int // index of its first instruction
}

// entry is a range of values, first to last. Those of a step are sorted and
// disjoint.
type entry struct {
	first, last uint32
	next        *step
}

// The final steps of all programs.
var (
	keep = new(step)
	drop = new(step)
)

// keepAll is the return value that keeps the whole packet.
const keepAll = 0xffffffff

// Offsets in the two IP headers, and of the destination port in the TCP and UDP
// header.
const (
	source4, dest4 = 12, 16
	source6, dest6 = 8, 24
	destPort       = 2
)

// builder builds the graph of a program.
type builder struct {
	v6      bool
	steps   []*step
	sources map[string]*step // by the ranges that they allow
}

// words returns the number of 32-bit words of an address.
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

// destinations builds the step for the i-th word of the destination address, and
// all later ones. The rules are sorted and share the previous words.
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

// ports builds the step for the destination port. The rules have the same address.
func (b *builder) ports(rules []Rule) *step {
	s := b.newStep(b.words(), sys.FilterOp{Code: sys.FilterLoadHalf, K: destPort}, keep)
	for _, r := range rules {
		p := uint32(r.Port)
		s.entries = append(s.entries, entry{first: p, last: p, next: b.from(r.Allowed)})
	}
	return s
}

// from returns the step that allows ranges. Rules with the same ranges share it.
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
		// A range sorts after all ranges that contain it.
		if n := len(tidy); n > 0 && tidy[n-1].Overlaps(p) {
			continue
		}
		tidy = append(tidy, p)
		key, _ = p.AppendBinary(key) // never fails
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

// clients builds the step for the i-th word of the client's address, and all later
// ones. The ranges are sorted, disjoint, and share the previous words.
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
