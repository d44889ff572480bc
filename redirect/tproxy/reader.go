package tproxy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/redirect"
)

// reader reads our table.
type reader struct{ *kernel.NFTables }

// From linux/netfilter/nf_tables.h.
const (
	attrHookNum      = 1
	attrHookPriority = 2
	attrSetTable     = 1
	attrSetName      = 2
	attrSetUserData  = 13
	attrElemListSet  = 2
	attrElemList     = 3
	attrElemKey      = 1
	attrElemData     = 2
	attrElemFlags    = 3
	attrElemExpr     = 7
	attrExprData     = 2
	attrCountPackets = 2
	attrDataValue    = 1
	attrGenID        = 1

	elemIntervalEnd = 1
)

func openReader(netns int) (*reader, error) {
	nft, err := kernel.OpenNFTables(netns)
	return &reader{nft}, explain(err, FeatureNFTables)
}

// get asks for objects of the inet family.
func (r *reader) get(kind uint16, flags netlink.HeaderFlags, attrs ...netlink.Attribute) ([]kernel.Object, error) {
	return r.Get(byte(nftables.TableFamilyINet), kind, flags, attrs...)
}

// generation returns the number of the generation of all nftables tables of the
// namespace: each transaction of anybody's makes it one more.
func (r *reader) generation() (uint32, error) {
	answers, err := r.get(kernel.GetGen, 0)
	if err != nil {
		return 0, fmt.Errorf("nftables generation: %w", err)
	}
	for _, m := range answers {
		if n, is := kernel.Number(m.Attribute(attrGenID)); is {
			return n, nil
		}
	}
	return 0, fmt.Errorf("nftables generation: no answer: %w", syscall.EOPNOTSUPP)
}

// contents names what is in a table.
type contents struct {
	exists bool
	marked bool // a set has our mark
	sets   []string
	chains []*nftables.Chain // with name, type, hook and priority
	rules  int
}

// ours reports whether the table is one of ours: by its mark or, if it was made by
// a version that made none, by the names of its sets.
func (c *contents) ours() bool {
	return c.marked || len(c.sets) > 0 && !slices.ContainsFunc(c.sets, func(name string) bool {
		_, ok := generationOf(name)
		return !ok
	})
}

// clash returns an error if somebody else has a table of this name.
func (c *contents) clash(table string) error {
	if !c.exists || c.ours() {
		return nil
	}
	return &redirect.ClashError{What: "the nftables table inet " + table, Remedy: "give the proxy's table another name (--nft-table), or remove that one"}
}

// lastGeneration returns the highest generation of the sets, 0 if there are none.
func (c *contents) lastGeneration() int {
	last := 0
	for _, name := range c.sets {
		if g, ok := generationOf(name); ok {
			last = max(last, g)
		}
	}
	return last
}

func (r *reader) contents(table string) (*contents, error) {
	c := &contents{}
	_, err := r.get(kernel.GetTable, 0, kernel.Named(kernel.AttrTableName, table))
	if errors.Is(err, syscall.ENOENT) {
		return c, nil
	}
	if err != nil {
		return nil, fmt.Errorf("table inet %s: %w", table, err)
	}
	c.exists = true
	sets, err := r.get(kernel.GetSet, netlink.Dump, kernel.Named(attrSetTable, table))
	if err != nil {
		return nil, fmt.Errorf("sets of table inet %s: %w", table, err)
	}
	for _, m := range sets {
		c.sets = append(c.sets, kernel.Text(m.Attribute(attrSetName)))
		c.marked = c.marked || bytes.Contains(m.Attribute(attrSetUserData), []byte(mark))
	}
	chains, err := r.chains(table)
	if err != nil {
		return nil, err
	}
	for _, m := range chains {
		c.chains = append(c.chains, parseChain(&m))
	}
	rules, err := r.rules(table)
	c.rules = len(rules)
	return c, err
}

// chains returns the chains of a table; the kernel cannot be asked for them
// alone.
func (r *reader) chains(table string) ([]kernel.Object, error) {
	all, err := r.get(kernel.GetChain, netlink.Dump)
	if err != nil {
		return nil, fmt.Errorf("chains: %w", err)
	}
	return slices.DeleteFunc(all, func(c kernel.Object) bool {
		return kernel.Text(c.Attribute(kernel.AttrChainTable)) != table
	}), nil
}

// rules returns the rules of a table, also of kernels that answer with those of
// others.
func (r *reader) rules(table string) ([]kernel.Object, error) {
	all, err := r.get(kernel.GetRule, netlink.Dump, kernel.Named(kernel.AttrRuleTable, table))
	if err != nil {
		return nil, fmt.Errorf("rules of table inet %s: %w", table, err)
	}
	return slices.DeleteFunc(all, func(rule kernel.Object) bool {
		return kernel.Text(rule.Attribute(kernel.AttrRuleTable)) != table
	}), nil
}

func parseChain(o *kernel.Object) *nftables.Chain {
	c := &nftables.Chain{Name: kernel.Text(o.Attribute(kernel.AttrChainName)), Type: nftables.ChainType(kernel.Text(o.Attribute(kernel.AttrChainType)))}
	hook := o.Attribute(kernel.AttrChainHook)
	number, hooked := kernel.Number(kernel.Attribute(hook, attrHookNum))
	priority, ordered := kernel.Number(kernel.Attribute(hook, attrHookPriority))
	if hooked && ordered {
		c.Hooknum = nftables.ChainHookRef(nftables.ChainHook(number))
		c.Priority = nftables.ChainPriorityRef(nftables.ChainPriority(int32(priority)))
	}
	return c
}

// frame returns a table's chains and rules as the kernel tells them, with their
// handles: whatever happens to one of them shows.
func (r *reader) frame(table string) ([]byte, error) {
	chains, err := r.chains(table)
	if err != nil {
		return nil, err
	}
	rules, err := r.rules(table)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	for _, m := range slices.Concat(chains, rules) {
		b.Write(m.Attrs) // the header has the generation
	}
	return b.Bytes(), nil
}

// element is one element of a set or map.
type element struct {
	key, value string
	end        bool   // the end of an interval
	packets    uint64 // of its counter; 0 without one
}

// elements reads a set; one that does not exist has none.
func (r *reader) elements(table, set string) ([]element, error) {
	answers, err := r.get(kernel.GetElement, netlink.Dump, kernel.Named(attrSetTable, table), kernel.Named(attrElemListSet, set))
	if errors.Is(err, syscall.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("set %s of table inet %s: %w", set, table, err)
	}
	var list []element
	for _, m := range answers {
		for _, b := range kernel.Attributes(m.Attribute(attrElemList)) {
			e := element{
				key:   string(kernel.Attribute(kernel.Attribute(b, attrElemKey), attrDataValue)),
				value: string(kernel.Attribute(kernel.Attribute(b, attrElemData), attrDataValue)),
			}
			flags, _ := kernel.Number(kernel.Attribute(b, attrElemFlags))
			e.end = flags&elemIntervalEnd != 0
			counter := kernel.Attribute(kernel.Attribute(b, attrElemExpr), attrExprData)
			if packets := kernel.Attribute(counter, attrCountPackets); len(packets) == 8 {
				e.packets = binary.BigEndian.Uint64(packets)
			}
			list = append(list, e)
		}
	}
	return list, nil
}
