package tproxy

import (
	"bytes"
	"errors"
	"slices"
	"syscall"
	"time"

	"github.com/google/nftables"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// filter keeps the nftables table.
type filter struct {
	table   *nftables.Table
	netns   int
	numbers numbers

	conn   *nftables.Conn // transactions; nil after an error, until the next one
	open   bool           // conn holds a transaction that was not committed
	reader *reader

	// sendBuffer is what to ask for, in bytes. The kernel takes a whole
	// transaction as one message, which must fit into it, and gives no more
	// than net.core.wmem_max allows to a process that has no privileges in the
	// first user namespace.
	sendBuffer int
	// limit is the most that one transaction may hold, in bytes. It shrinks
	// when that turns out to be more than the buffer holds.
	limit int

	tracked    bool // connections are, in this namespace
	kept       bool // those to endpoints are kept in connection tracking
	outlived   bool // by the program that finds listeners
	synced     bool // the table is what the last plan says, as far as is known
	generation int  // of the sets in use
	ownPorts   portCounts
	flows      map[flow]struct{} // in the sets

	// seen is the generation number of all nftables tables after the last look
	// or transaction that left the table as it should be; 0 if there was none.
	seen uint32
	// frame is the table without elements, as the kernel told it after the
	// last fill; nil before.
	frame []byte
}

func openFilter(opts Options) (*filter, error) {
	f := &filter{
		table: &nftables.Table{Name: opts.Table, Family: nftables.TableFamilyINet},
		netns: opts.Routes.NetNS,
		numbers: numbers{
			steerMark: opts.Routes.SteerMark, replyMark: opts.Routes.ReplyMark, socketMark: opts.Routes.SocketMark,
			firstReply: opts.ReplyPorts[0], lastReply: opts.ReplyPorts[1],
			nodePorts: redirect.NodePorts(opts.Routes.NetNS),
			device:    kernel.OwnDevice(opts.Table),
			lookup:    opts.Lookup,
		},

		sendBuffer: sendBuffer,
		limit:      sendBuffer,
	}
	var err error
	if f.reader, err = openReader(opts.Routes.NetNS); err != nil {
		return nil, err
	}
	if _, err := f.reader.generation(); err != nil {
		f.reader.Close()
		return nil, explain(err, FeatureNFTables)
	}
	return f, nil
}

func (f *filter) close() {
	f.reset()
	f.reader.Close()
}

// checkName returns an error if another program has a table of that name.
func (f *filter) checkName() error {
	c, err := f.reader.contents(f.table.Name)
	if err != nil {
		return err
	}
	return c.clash(f.table.Name)
}

// apply puts a plan in force in place of another one.
func (f *filter) apply(from, p *redirect.Plan) error {
	if !f.synced || f.outdated(p) {
		return f.fill(p)
	}
	c := redirect.Diff(from, p)
	if c.Empty() {
		return nil
	}
	if c.Size()*2*sizeOfElement < f.limit/2 && !c.Rehomes(from, p) {
		err := f.update(&c, from, p)
		if err == nil {
			return nil
		}
		f.synced = false
		if !retriable(err) {
			return explain(err, FeatureNFTables)
		}
	}
	return f.fill(p)
}

// outdated reports whether a plan needs other rules than those that are there.
func (f *filter) outdated(p *redirect.Plan) bool {
	return f.numbers.omitted != f.omittedFor(p) || f.numbers.kept != f.kept
}

// retriable reports whether filling the table anew can help after an error: another
// program changed it, the message was too large, or the answers got lost.
func retriable(err error) bool {
	return slices.ContainsFunc([]error{syscall.ENOENT, syscall.EEXIST, syscall.EBUSY, syscall.EMSGSIZE, syscall.ENOBUFS, syscall.EINTR}, func(e error) bool {
		return errors.Is(err, e)
	})
}

// update changes elements in one transaction.
func (f *filter) update(c *redirect.Changes, from, p *redirect.Plan) error {
	add, drop := elementsOf(c, from, p)
	f.ownPorts.change(&c.Own, &add, &drop)
	if err := f.changeFlows(&c.Lingering, &add, &drop); err != nil {
		return err
	}
	b, err := f.begin()
	if err != nil {
		return err
	}
	if len(c.Local.Add) > 0 && len(c.Local.Drop) > 0 {
		// New ranges may overlap old ones: start from nothing.
		for v := range versions {
			b.FlushSet(makeSet(f.table, local, v, f.generation))
			b.size += sizeOfMessage
			add[local][v], drop[local][v] = nil, nil
		}
		for l := range p.Local.Keys() {
			add.local(l)
		}
	}
	for k := range kinds {
		for v := range versions {
			s := makeSet(f.table, k, v, f.generation)
			if err := b.elements(b.SetDeleteElements, s, drop[k][v]); err != nil {
				return err
			}
			if err := b.elements(b.SetAddElements, s, add[k][v]); err != nil {
				return err
			}
		}
	}
	return f.commit(b)
}

// changeFlows follows what lingers.
func (f *filter) changeFlows(c *redirect.Delta[service.Destination], add, drop *elements) error {
	if c.Size() == 0 {
		return nil
	}
	for k := range f.flows {
		if _, gone := slices.BinarySearchFunc(c.Drop, tcpDestination(k.here), redirect.CompareDestinations); gone {
			drop.flow(k)
			delete(f.flows, k)
		}
	}
	found, err := findFlows(f.netns, redirect.SetOf(c.Add...))
	if err != nil {
		return err
	}
	for k := range found {
		add.flow(k)
		f.flows[k] = struct{}{}
	}
	return nil
}

// planElements returns everything that a plan and the flows that it leaves alone put
// into the sets.
func (f *filter) planElements(p *redirect.Plan) *elements {
	c := redirect.Whole(p)
	e, none := elementsOf(&c, &redirect.Plan{}, p)
	f.ownPorts = portCounts{{}, {}}
	f.ownPorts.change(&c.Own, &e, &none)
	for k := range f.flows {
		e.flow(k)
	}
	return &e
}

// fill makes the table anew, whatever it holds. It fills sets of a new generation
// beside the old ones, in as many transactions as it takes; the last one switches the
// rules over to them. The old sets are removed afterwards, so that packets that are
// still in the old rules find their elements.
func (f *filter) fill(p *redirect.Plan) error {
	flows, err := findFlows(f.netns, p.Lingering)
	if err != nil {
		return err
	}
	f.flows = flows
	f.numbers.omitted, f.numbers.kept = f.omittedFor(p), f.kept
	e := f.planElements(p)
	for {
		err = f.fillWithin(e)
		switch {
		case err == nil:
			f.synced = true
			return nil
		case errors.Is(err, syscall.EMSGSIZE) && f.limit > 64<<10:
			f.limit /= 2 // the send buffer is smaller than was asked for
		default:
			f.synced = false
			return explain(err, FeatureNFTables)
		}
	}
}

func (f *filter) fillWithin(e *elements) (err error) {
	if f.seen, err = f.reader.generation(); err != nil {
		return err
	}
	f.frame = nil
	old, err := f.reader.contents(f.table.Name)
	if err != nil {
		return err
	}
	if f.generation == 0 { // later, a table of this name stands in the place of ours
		if err := old.clash(f.table.Name); err != nil {
			return err
		}
	}
	generation := old.lastGeneration() + 1
	b, err := f.begin()
	if err != nil {
		return err
	}
	staged := false
	defer func() {
		if err != nil && staged {
			f.unstage(generation, old.exists)
		}
	}()
	flushAt := f.limit - sizeOfFrame - elementsPerMessage*sizeOfElement

	b.table(f.table)
	for k := range kinds {
		for v := range versions {
			s := makeSet(f.table, k, v, generation)
			if err := b.set(s); err != nil {
				return err
			}
			for part := range slices.Chunk(e[k][v], elementsPerMessage) {
				if err := b.elements(b.SetAddElements, s, part); err != nil {
					return err
				}
				if b.size > flushAt {
					if err := f.commit(b); err != nil {
						return err
					}
					staged = true
					if b, err = f.begin(); err != nil {
						return err
					}
				}
			}
		}
	}
	f.switchTo(b, generation, old)
	if err := f.commit(b); err != nil {
		return err
	}
	f.generation, staged = generation, false
	if len(old.sets) > 0 {
		if b, err = f.begin(); err != nil {
			return err
		}
		for _, name := range old.sets {
			b.dropSet(&nftables.Set{Table: f.table, Name: name})
		}
		if err := f.commit(b); err != nil {
			return err
		}
	}
	return f.remember()
}

// remember reads the frame of the table that was just filled. If another program has
// changed the table meanwhile, there is no frame, and verify fills the table again. What is
// read while others change their tables may be of two moments, and is read again.
func (f *filter) remember() error {
	for range readsOfTable {
		before, err := f.reader.generation()
		if err != nil {
			return err
		}
		now, err := f.reader.contents(f.table.Name)
		if err != nil {
			return err
		}
		frame, err := f.reader.frame(f.table.Name)
		if err != nil {
			return err
		}
		again, err := f.reader.frame(f.table.Name)
		if err != nil {
			return err
		}
		f.frame = nil
		if len(now.chains) == len(makeChains(f.table, f.numbers)) && now.rules == len(makeRules(f.generation, f.numbers)) {
			f.frame = frame
		}
		if after, err := f.reader.generation(); err != nil || after == before && bytes.Equal(frame, again) {
			return err
		}
	}
	return nil
}

// switchTo adds to the transaction what makes the rules look into the sets of
// a generation and removes all other rules and chains from the table. Chains
// that are hooked as they should be stay hooked, so that no packet passes
// unseen.
func (f *filter) switchTo(b *batch, generation int, old *contents) {
	if old.exists {
		b.FlushTable(f.table) // its rules
	}
	chains := makeChains(f.table, f.numbers)
	for _, c := range old.chains {
		if !sameHook(c, chains) {
			b.dropChain(&nftables.Chain{Table: f.table, Name: c.Name})
		}
	}
	for _, c := range chains {
		b.chain(c)
	}
	for _, r := range makeRules(generation, f.numbers) {
		b.rule(f.table, r)
	}
}

func sameHook(c *nftables.Chain, ours []*nftables.Chain) bool {
	for _, o := range ours {
		if o.Name == c.Name {
			return describe(o) == describe(c)
		}
	}
	return false
}

// unstage removes the sets of a generation that did not come into use.
func (f *filter) unstage(generation int, tableWasThere bool) {
	b, err := f.begin()
	if err != nil {
		return
	}
	if !tableWasThere {
		b.DelTable(f.table)
		_ = f.commit(b)
		return
	}
	now, err := f.reader.contents(f.table.Name)
	if err != nil {
		return
	}
	for _, name := range now.sets {
		if g, ok := generationOf(name); ok && g == generation {
			b.dropSet(&nftables.Set{Table: f.table, Name: name})
		}
	}
	_ = f.commit(b)
}

// verify compares the table with the plan and fills it anew when they differ, and
// when connections are tracked all of a sudden.
func (f *filter) verify(p *redirect.Plan) (repaired bool, err error) {
	if f.synced && f.outdated(p) {
		return false, f.fill(p) // nobody took anything away
	}
	differs := 0
	for range readsOfTable {
		now, err := f.reader.generation()
		if err != nil {
			return false, err
		}
		if f.synced && f.seen == now {
			return false, nil
		}
		if !f.synced || f.frame == nil {
			return true, f.fill(p)
		}
		same, err := f.matches(p)
		if err != nil {
			return false, err
		}
		if same {
			f.seen = now
			return false, nil
		}
		switch after, err := f.reader.generation(); {
		case err == nil && after != now:
			differs = 0
			continue
		case differs == len(looksAgain):
			return true, f.fill(p)
		}
		time.Sleep(looksAgain[differs])
		differs++
	}
	return false, nil // the next look finds out
}

// looksAgain are the pauses between looks that all have to find the same difference: the kernel
// counts a transaction before it has carried it out, and may be kept from going on for a moment.
var looksAgain = [...]time.Duration{time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond}

// readsOfTable bounds how often the table is read while others change theirs.
const readsOfTable = 10

// matches reads the whole table.
func (f *filter) matches(p *redirect.Plan) (bool, error) {
	frame, err := f.reader.frame(f.table.Name)
	if err != nil || !bytes.Equal(frame, f.frame) {
		return false, err
	}
	want := f.planElements(p)
	for k := range counted { // the kernel fills that one
		for v := range versions {
			if same, err := f.setMatches(setName(k, v, f.generation), want[k][v]); !same {
				return false, err
			}
		}
	}
	return true, nil
}

// setMatches compares a set. A set that differs is read again: a dump during a
// gradual rehash may repeat elements and miss others.
func (f *filter) setMatches(set string, want []nftables.SetElement) (bool, error) {
	for range readsOfSet {
		have, err := f.reader.elements(f.table.Name, set)
		if err != nil {
			return false, err
		}
		if sameElements(have, want) {
			return true, nil
		}
	}
	return false, nil
}

// readsOfSet is how often a set is read before it is taken to be different.
const readsOfSet = 4

// sameElements compares regardless of order.
func sameElements(have []element, want []nftables.SetElement) bool {
	if len(have) != len(want) {
		return false
	}
	keys := make(map[element]struct{}, len(have))
	for _, e := range have {
		keys[e] = struct{}{}
	}
	for _, w := range want {
		if _, ok := keys[element{key: string(w.Key), value: string(w.Val), end: w.IntervalEnd}]; !ok {
			return false
		}
	}
	return true
}

// remove takes the table away if it is ours. It reports whether there was one.
func (f *filter) remove() (bool, error) {
	c, err := f.reader.contents(f.table.Name)
	if err != nil || !c.exists || !c.ours() {
		return false, err
	}
	b, err := f.begin()
	if err != nil {
		return false, err
	}
	b.DelTable(f.table)
	if err := f.commit(b); err != nil && !errors.Is(err, syscall.ENOENT) {
		return false, explain(err, FeatureNFTables)
	}
	return true, nil
}
