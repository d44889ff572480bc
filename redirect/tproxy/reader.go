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

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/kernel"
)

// reader reads nftables as the kernel tells them. The library that writes them
// reads every rule into expressions, which fails for tproxy, and has no
// generation number.
type reader struct {
	netns int
	conn  *netlink.Conn // nil after an error, until the next request
}

// From linux/netfilter/nfnetlink.h and nf_tables.h.
const (
	subsysNFTables = 10

	msgGetTable   = 1
	msgGetChain   = 4
	msgGetRule    = 7
	msgGetSet     = 10
	msgGetElement = 13
	msgGetGen     = 16

	attrTableName    = 1
	attrChainTable   = 1
	attrChainName    = 3
	attrChainHook    = 4
	attrChainType    = 7
	attrHookNum      = 1
	attrHookPriority = 2
	attrRuleTable    = 1
	attrSetTable     = 1
	attrSetName      = 2
	attrSetUserData  = 13
	attrElemListSet  = 2
	attrElemList     = 3
	attrElemKey      = 1
	attrElemData     = 2
	attrElemFlags    = 3
	attrDataValue    = 1
	attrGenID        = 1

	elemIntervalEnd = 1

	flagDumpInterrupted = 0x10
)

func openReader(netns int) (*reader, error) {
	r := &reader{netns: netns}
	return r, r.connect()
}

func (r *reader) connect() error {
	// In another namespace, the library forgets the error of making a socket. A
	// kernel that has no netfilter has none in any.
	conn, err := netlink.Dial(syscall.NETLINK_NETFILTER, nil)
	if err == nil && r.netns != 0 {
		_ = conn.Close()
		conn, err = netlink.Dial(syscall.NETLINK_NETFILTER, &netlink.Config{NetNS: r.netns})
	}
	if err != nil {
		return explain(fmt.Errorf("netfilter netlink: %w", err), FeatureNFTables)
	}
	r.conn = conn
	return nil
}

func (r *reader) close() {
	if r.conn != nil {
		_ = r.conn.Close()
		r.conn = nil
	}
}

// get sends a request for the inet family and gives the answers. A dump that a
// change interrupted is read again.
func (r *reader) get(kind uint16, flags netlink.HeaderFlags, attrs ...netlink.Attribute) ([]netlink.Message, error) {
	data, err := netlink.MarshalAttributes(attrs)
	if err != nil {
		return nil, err
	}
	request := netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(subsysNFTables<<8 | kind), Flags: netlink.Request | flags},
		Data:   slices.Concat([]byte{byte(nftables.TableFamilyINet), 0, 0, 0}, data),
	}
	for range 10 {
		answers, err := r.ask(request)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || !slices.ContainsFunc(answers, interrupted) {
			return answers, err
		}
	}
	return nil, fmt.Errorf("nftables change too fast to be read: %w", syscall.EINTR)
}

func interrupted(m netlink.Message) bool { return m.Header.Flags&flagDumpInterrupted != 0 }

func (r *reader) ask(request netlink.Message) ([]netlink.Message, error) {
	if r.conn == nil {
		if err := r.connect(); err != nil {
			return nil, err
		}
	}
	answers, err := r.conn.Execute(request)
	if err != nil && !errors.Is(err, syscall.ENOENT) {
		r.close() // it may hold answers that nobody read
	}
	return answers, err
}

// generation gives the number of the generation of all nftables tables of the
// namespace: each transaction of anybody's makes it one more.
func (r *reader) generation() (uint32, error) {
	answers, err := r.get(msgGetGen, 0)
	if err != nil {
		return 0, fmt.Errorf("nftables generation: %w", err)
	}
	for _, m := range answers {
		if b := kernel.Attribute(body(m), attrGenID); len(b) == 4 {
			return binary.BigEndian.Uint32(b), nil
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

// ours tells whether the table is one of ours: by its mark or, if it was made by
// a version that made none, by the names of its sets.
func (c *contents) ours() bool {
	return c.marked || len(c.sets) > 0 && !slices.ContainsFunc(c.sets, func(name string) bool {
		_, ok := generationOf(name)
		return !ok
	})
}

// clash gives an error if somebody else has a table of this name.
func (c *contents) clash(table string) error {
	if !c.exists || c.ours() {
		return nil
	}
	return &redirect.ClashError{What: "the nftables table inet " + table, Remedy: "give the proxy's table another name (--nft-table), or remove that one"}
}

// lastGeneration gives the highest generation of the sets, 0 if there are none.
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
	_, err := r.get(msgGetTable, 0, text(attrTableName, table))
	if errors.Is(err, syscall.ENOENT) {
		return c, nil
	}
	if err != nil {
		return nil, fmt.Errorf("table inet %s: %w", table, err)
	}
	c.exists = true
	sets, err := r.get(msgGetSet, netlink.Dump, text(attrSetTable, table))
	if err != nil {
		return nil, fmt.Errorf("sets of table inet %s: %w", table, err)
	}
	for _, m := range sets {
		c.sets = append(c.sets, cString(kernel.Attribute(body(m), attrSetName)))
		c.marked = c.marked || bytes.Contains(kernel.Attribute(body(m), attrSetUserData), []byte(mark))
	}
	chains, err := r.chains(table)
	if err != nil {
		return nil, err
	}
	for _, m := range chains {
		c.chains = append(c.chains, parseChain(body(m)))
	}
	rules, err := r.rules(table)
	c.rules = len(rules)
	return c, err
}

// chains gives the chains of a table; the kernel cannot be asked for them
// alone.
func (r *reader) chains(table string) ([]netlink.Message, error) {
	all, err := r.get(msgGetChain, netlink.Dump)
	if err != nil {
		return nil, fmt.Errorf("chains: %w", err)
	}
	return slices.DeleteFunc(all, func(m netlink.Message) bool {
		return cString(kernel.Attribute(body(m), attrChainTable)) != table
	}), nil
}

// rules gives the rules of a table, also of kernels that answer with those of
// others.
func (r *reader) rules(table string) ([]netlink.Message, error) {
	all, err := r.get(msgGetRule, netlink.Dump, text(attrRuleTable, table))
	if err != nil {
		return nil, fmt.Errorf("rules of table inet %s: %w", table, err)
	}
	return slices.DeleteFunc(all, func(m netlink.Message) bool {
		return cString(kernel.Attribute(body(m), attrRuleTable)) != table
	}), nil
}

func parseChain(b []byte) *nftables.Chain {
	c := &nftables.Chain{Name: cString(kernel.Attribute(b, attrChainName)), Type: nftables.ChainType(cString(kernel.Attribute(b, attrChainType)))}
	hook := kernel.Attribute(b, attrChainHook)
	number, priority := kernel.Attribute(hook, attrHookNum), kernel.Attribute(hook, attrHookPriority)
	if len(number) == 4 && len(priority) == 4 {
		n := nftables.ChainHook(binary.BigEndian.Uint32(number))
		p := nftables.ChainPriority(int32(binary.BigEndian.Uint32(priority)))
		c.Hooknum, c.Priority = &n, &p
	}
	return c
}

// frame gives a table's chains and rules as the kernel tells them, with their
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
		b.Write(body(m)) // the header has the generation
	}
	return b.Bytes(), nil
}

// element is one element of a set or map.
type element struct {
	key, value string
	end        bool // the end of an interval
}

// elements reads a set; one that does not exist has none.
func (r *reader) elements(table, set string) ([]element, error) {
	answers, err := r.get(msgGetElement, netlink.Dump, text(attrSetTable, table), text(attrElemListSet, set))
	if errors.Is(err, syscall.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("set %s of table inet %s: %w", set, table, err)
	}
	var list []element
	for _, m := range answers {
		for _, b := range kernel.Attributes(kernel.Attribute(body(m), attrElemList)) {
			e := element{
				key:   string(kernel.Attribute(kernel.Attribute(b, attrElemKey), attrDataValue)),
				value: string(kernel.Attribute(kernel.Attribute(b, attrElemData), attrDataValue)),
			}
			if flags := kernel.Attribute(b, attrElemFlags); len(flags) == 4 {
				e.end = binary.BigEndian.Uint32(flags)&elemIntervalEnd != 0
			}
			list = append(list, e)
		}
	}
	return list, nil
}

// body gives what comes after a message's netfilter header.
func body(m netlink.Message) []byte {
	if len(m.Data) < 4 {
		return nil
	}
	return m.Data[4:]
}

func text(kind uint16, s string) netlink.Attribute {
	return netlink.Attribute{Type: kind, Data: append([]byte(s), 0)}
}

func cString(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }
