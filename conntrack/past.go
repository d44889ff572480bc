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

// Past keeps the records of the connections that ended last, in bounded memory. It is
// told of them on the taps' goroutine, off the connections' path. It is safe for concurrent use.
type Past struct {
	table *Table
	room  int     // bytes
	rate  tapRate // of the taps' goroutine

	mu     sync.Mutex
	blocks []*block // the oldest first; only the last one changes
	held   int      // bytes, of all blocks but the last
	since  int64    // Unix ns: all that ended later is here, but for what was lost
}

// NewPast begins to keep records of a Table, in so many bytes, at least LeastPast. The
// caller must Close the Past.
func NewPast(t *Table, room int) (*Past, error) {
	p := &Past{table: t, room: room, rate: tapRate{limit: PastRate}, blocks: []*block{newBlock()}, since: t.now().UnixNano()}
	return p, t.taps.add(t, p)
}

// Close ends the Past; what it keeps can still be read.
func (p *Past) Close() { p.table.taps.remove(p.table, p) }

func (*Past) wantsOpens() bool { return false }

// put keeps the records of connections that ended.
func (p *Past) put(batch []Record) {
	p.rate.turn()
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range batch {
		r := &batch[i]
		switch {
		case r.Event == Opened || r.Event == Lasts:
		case p.rate.admit():
			p.addLocked(r)
		default:
			p.blocks[len(p.blocks)-1].lost++
		}
	}
}

// addLocked keeps a record.
func (p *Past) addLocked(r *Record) {
	last := p.blocks[len(p.blocks)-1]
	if !last.takes(r) {
		last.close()
		p.held += last.size()
		last = newBlock()
		p.blocks = append(p.blocks, last)
		p.trimLocked()
	}
	last.add(r)
}

// lose counts records that were not kept.
func (p *Past) lose(n uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.blocks[len(p.blocks)-1].lost += n
}

// trimLocked forgets the oldest blocks, so that the others leave room for a whole one.
func (p *Past) trimLocked() {
	n := 0
	for ; p.held > p.room-mostBlock; n++ {
		p.held -= p.blocks[n].size()
		p.since = max(p.since, p.blocks[n].newest)
	}
	p.blocks = slices.Delete(p.blocks, 0, n)
}

// PastView is what a Past kept at one moment.
type PastView struct {
	// Since is the time after which all connections that ended are here, but Lost ones.
	Since time.Time
	Kept  int
	// Lost counts records that could not be kept, because there were more than PastRate a
	// second or the machine was too busy.
	Lost   uint64
	blocks []block
}

// View returns what is kept now.
func (p *Past) View() *PastView {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := &PastView{Since: time.Unix(0, p.since), blocks: make([]block, 0, len(p.blocks))}
	for _, b := range p.blocks {
		v.blocks = append(v.blocks, *b) // what is in the copy does not change
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
