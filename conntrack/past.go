package conntrack

import (
	"context"
	"slices"
	"sync"
	"time"
)

const (
	// LeastPast is the least memory of a Past, in bytes.
	LeastPast = 1 << 20
	// PastRate is how many records a second a Past keeps at most.
	PastRate = 20_000
)

// Past keeps the records of the connections that ended last, in bounded memory. The event
// loops that hand over their records encode them here, some 0.2 us each. It is safe for
// concurrent use.
type Past struct {
	table *Table
	room  int // bytes

	mu      sync.Mutex // held at most for encoding a batch
	rate    tapRate
	blocks  []*block // full ones, the oldest first; they do not change
	held    int      // their bytes
	current *block   // takes records
	since   int64    // Unix ns: all that ended later is here, but for what was lost
	trimmed int64    // Unix ns: some that ended then are forgotten
}

// NewPast begins to keep records of a Table, in so many bytes, at least LeastPast. A Table has
// one Past at most. The caller must Close it.
func NewPast(t *Table, room int) *Past {
	p := &Past{table: t, room: room, rate: tapRate{limit: PastRate}, current: newBlock(), since: t.now().UnixNano()}
	t.past.Store(p)
	return p
}

// Close ends the Past; what it keeps can still be read.
func (p *Past) Close() { p.table.past.CompareAndSwap(p, nil) }

// put keeps the records of connections that ended.
func (p *Past) put(batch []Record) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rate.turn()
	for i := range batch {
		r := &batch[i]
		switch {
		case r.Event == Opened || r.Event == Lasts:
		case p.rate.admit():
			p.addLocked(r)
		default:
			p.current.lost++
		}
	}
}

// addLocked keeps a record.
func (p *Past) addLocked(r *Record) {
	if !p.current.takes(r) {
		p.sealLocked()
	}
	p.current.add(r)
}

// sealLocked begins a new block.
func (p *Past) sealLocked() {
	full := p.current.kept()
	p.current.reset()
	p.blocks = append(p.blocks, full)
	p.held += full.size()
	p.trimLocked()
}

// trimLocked forgets the oldest blocks, so that the others leave room for a whole one.
func (p *Past) trimLocked() {
	n := 0
	for ; p.held > p.room-mostBlock; n++ {
		p.held -= p.blocks[n].size()
		p.trimmed = max(p.trimmed, p.blocks[n].newest)
	}
	p.blocks = slices.Delete(p.blocks, 0, n)
	p.since = max(p.since, p.trimmed)
}

// PastView is what a Past kept at one moment.
type PastView struct {
	// Since is the time after which all connections that ended are here, but Lost ones.
	Since time.Time
	Kept  int
	// Lost counts records that could not be kept, because there were more than PastRate a
	// second or the machine was too busy.
	Lost   uint64
	blocks []*block
}

// View returns what is kept now.
func (p *Past) View() *PastView {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := &PastView{Since: time.Unix(0, p.since), blocks: append(slices.Clone(p.blocks), p.current.kept())}
	for _, b := range v.blocks {
		v.Kept += b.count
		v.Lost += b.lost
	}
	return v
}

// Visit visits the records that match, of connections that ended after a time, in about
// the order in which they ended: only the last ones, if limit is not 0. A record is valid only
// during the call; its Port has only the name. It stops at the first error of visit or ctx.
func (v *PastView) Visit(ctx context.Context, since time.Time, limit int, match func(*Record) bool, visit func(*Record) error) error {
	after := since.UnixNano()
	wanted := func(r *Record) bool { return r.Wall+r.Duration > after && match(r) }
	from, found := 0, 0
	if limit > 0 { // how far back
		for from = len(v.blocks); from > 0 && found < limit; {
			from--
			if err := v.blocks[from].each(ctx, after, func(r *Record) error {
				if wanted(r) {
					found++
				}
				return nil
			}); err != nil {
				return err
			}
		}
	}
	skip := max(found-limit, 0)
	if limit == 0 {
		skip = 0
	}
	for i := range v.blocks[from:] {
		if err := v.blocks[from+i].each(ctx, after, func(r *Record) error {
			if !wanted(r) {
				return nil
			}
			if skip > 0 {
				skip--
				return nil
			}
			return visit(r)
		}); err != nil {
			return err
		}
	}
	return nil
}

// Find visits the record of one connection; false if it is not kept.
func (v *PastView) Find(ctx context.Context, id uint64, visit func(*Record)) (found bool, err error) {
	err = v.Visit(ctx, time.Unix(0, 0), 1, func(r *Record) bool { return r.ID == id }, func(r *Record) error {
		found = true
		visit(r)
		return nil
	})
	return found, err
}
