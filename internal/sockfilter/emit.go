package sockfilter

import (
	"cmp"
	"slices"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// blockEntries bounds the entries of a block. A conditional jump spans at most 255
// instructions. A block has two for each entry, one for each step that they lead
// to, and three more.
const blockEntries = 80

// assembler emits the instructions of steps. The kernel allows only forward jumps.
type assembler struct {
	ops []sys.FilterOp
	far []far
}

// far is a jump to a step whose address may not be known yet.
type far struct {
	at int
	to *step
}

// program emits the steps. Each step follows all steps that lead to it.
func (b *builder) program() ([]sys.FilterOp, error) {
	slices.SortStableFunc(b.steps, func(x, y *step) int { return cmp.Compare(x.stage, y.stage) })
	var a assembler
	for _, s := range b.steps {
		s.at = len(a.ops)
		a.ops = append(a.ops, s.load)
		a.search(s.entries, s.otherwise, false)
		if len(a.ops) > sys.MaxFilterOps {
			return nil, ErrTooLong
		}
	}
	for _, f := range a.far {
		a.ops[f.at].K = uint32(f.to.at - f.at - 1)
	}
	return a.ops, nil
}

// search emits a search for the loaded value among entries. bounded means that the
// value is not below the first one.
func (a *assembler) search(entries []entry, otherwise *step, bounded bool) {
	if len(entries) <= blockEntries {
		a.block(entries, otherwise, bounded)
		return
	}
	middle := len(entries) / 2
	a.ops = append(a.ops,
		sys.FilterOp{Code: sys.FilterIfLeast, Jt: 0, Jf: 1, K: entries[middle].first},
		sys.FilterOp{Code: sys.FilterJump})
	jump := len(a.ops) - 1
	a.search(entries[:middle], otherwise, bounded)
	a.ops[jump].K = uint32(len(a.ops) - jump - 1)
	a.search(entries[middle:], otherwise, true)
}

// block emits a search in which all jumps are short: a tree, then one exit for each
// step that it leads to.
func (a *assembler) block(entries []entry, otherwise *step, bounded bool) {
	exits := []*step{otherwise}
	begin := len(a.ops)
	end := begin + treeSize(entries, bounded)
	// to returns the jump distance from the next instruction to the exit of a step.
	to := func(s *step) uint8 {
		i := slices.Index(exits, s)
		if i < 0 {
			i = len(exits)
			exits = append(exits, s)
		}
		return uint8(end + i - len(a.ops) - 1)
	}
	var tree func(entries []entry, bounded bool)
	tree = func(entries []entry, bounded bool) {
		switch e := entries; {
		case len(e) == 0:
		case len(e) == 1 && !bounded && e[0].first == e[0].last:
			a.ops = append(a.ops, sys.FilterOp{Code: sys.FilterIfEqual, Jt: to(e[0].next), Jf: to(otherwise), K: e[0].first})
		case len(e) == 1:
			if !bounded {
				a.ops = append(a.ops, sys.FilterOp{Code: sys.FilterIfLeast, Jt: 0, Jf: to(otherwise), K: e[0].first})
			}
			a.ops = append(a.ops, sys.FilterOp{Code: sys.FilterIfAbove, Jt: to(otherwise), Jf: to(e[0].next), K: e[0].last})
		default:
			middle := len(e) / 2
			a.ops = append(a.ops, sys.FilterOp{Code: sys.FilterIfLeast, Jt: uint8(treeSize(e[:middle], bounded)), Jf: 0, K: e[middle].first})
			tree(e[:middle], bounded)
			tree(e[middle:], true)
		}
	}
	tree(entries, bounded)
	for _, s := range exits {
		switch s {
		case keep:
			a.ops = append(a.ops, sys.FilterOp{Code: sys.FilterReturn, K: keepAll})
		case drop:
			a.ops = append(a.ops, sys.FilterOp{Code: sys.FilterReturn, K: 0})
		default:
			a.far = append(a.far, far{at: len(a.ops), to: s})
			a.ops = append(a.ops, sys.FilterOp{Code: sys.FilterJump})
		}
	}
}

// treeSize returns the number of instructions of the tree over entries: one for
// each entry and each fork, and one more for each lower bound check.
func treeSize(entries []entry, bounded bool) int {
	if len(entries) == 0 {
		return 0
	}
	n := 2*len(entries) - 1
	if !bounded && entries[0].first != entries[0].last {
		n++
	}
	return n
}
