package tproxy

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/google/nftables"
	mdnetlink "github.com/mdlayher/netlink"
)

const (
	// sendBuffer is asked for; what cannot be had shows in EMSGSIZE.
	sendBuffer = 4 << 20
	// receiveBuffer holds the answers: each message of a transaction has one,
	// and none can be read before all are there.
	receiveBuffer = 1 << 20
	// elementsPerMessage keeps a message's list of elements below the 64 KiB
	// that a netlink attribute can hold.
	elementsPerMessage = 1000
)

// connect returns the connection for transactions.
func (f *filter) connect() (*nftables.Conn, error) {
	if f.conn != nil {
		return f.conn, nil
	}
	conn, err := nftables.New(nftables.AsLasting(), nftables.WithNetNSFd(f.netns),
		nftables.WithSockOptions(func(c *mdnetlink.Conn) error {
			return errors.Join(c.SetWriteBuffer(f.sendBuffer), c.SetReadBuffer(receiveBuffer))
		}))
	if err != nil {
		return nil, explain(err, FeatureNFTables)
	}
	f.conn = conn
	return conn, nil
}

// reset closes the connection: after an error it may hold unread answers.
func (f *filter) reset() {
	if f.conn != nil {
		_ = f.conn.CloseLasting()
		f.conn = nil
	}
	f.open = false
}

// batch is a transaction in the making.
type batch struct {
	*nftables.Conn
	size int // estimate of its bytes
}

const (
	sizeOfMessage = 400 // more than any rule, chain or set of ours takes
	sizeOfElement = 52  // an IPv6 destination with its target takes 48
	// sizeOfFrame is more than all rules and chains take, and all sets of an
	// old generation that go.
	sizeOfFrame = 100 * sizeOfMessage
)

// begin returns an empty transaction. What was added to one that was never
// committed is forgotten.
func (f *filter) begin() (*batch, error) {
	if f.open {
		f.reset()
	}
	conn, err := f.connect()
	if err != nil {
		return nil, err
	}
	f.open = true
	return &batch{Conn: conn}, nil
}

func (b *batch) table(t *nftables.Table)     { b.size += sizeOfMessage; b.AddTable(t) }
func (b *batch) chain(c *nftables.Chain)     { b.size += sizeOfMessage; b.AddChain(c) }
func (b *batch) dropSet(s *nftables.Set)     { b.size += sizeOfMessage; b.DelSet(s) }
func (b *batch) dropChain(c *nftables.Chain) { b.size += sizeOfMessage; b.DelChain(c) }

func (b *batch) set(s *nftables.Set) error {
	b.size += sizeOfMessage
	setNumbers.Lock()
	defer setNumbers.Unlock()
	return b.AddSet(s, nil)
}

// setNumbers is held while a set is added: the library numbers the sets of all
// connections by one variable without a lock, and a process may hold several
// Redirectors.
var setNumbers sync.Mutex

func (b *batch) rule(t *nftables.Table, r rule) {
	b.size += sizeOfMessage * 2
	b.AddRule(&nftables.Rule{Table: t, Chain: &nftables.Chain{Name: r.chain}, Exprs: r.exprs})
}

func (b *batch) elements(change func(*nftables.Set, []nftables.SetElement) error, s *nftables.Set, list []nftables.SetElement) error {
	for part := range slices.Chunk(list, elementsPerMessage) {
		if err := change(s, part); err != nil {
			return err
		}
		b.size += sizeOfMessage + len(part)*sizeOfElement
	}
	return nil
}

// commit carries the transaction out, completely or not at all. It follows the
// generation number of all tables, so that verify can report whether another program
// changed anything.
func (f *filter) commit(b *batch) error {
	before, err := f.reader.generation()
	if err != nil {
		return err
	}
	f.open = false
	if err := b.Flush(); err != nil {
		f.reset()
		f.seen = 0
		return fmt.Errorf("table inet %s: %w", f.table.Name, err)
	}
	after, err := f.reader.generation()
	if err != nil {
		return err
	}
	if after != before+1 || f.seen != before {
		after = 0 // somebody else's change came in between
	}
	f.seen = after
	return nil
}
