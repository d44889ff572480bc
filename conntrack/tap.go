package conntrack

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxTaps bounds the taps of a Table.
	maxTaps = 64
	// tapRoom is how many records wait for the reader of a tap, about 1.2 MiB.
	tapRoom = 4096
	// tapLossTime is how long a loss waits for records to be told with. It wakes no
	// reader, as it happens where there are many.
	tapLossTime = time.Second
)

// ErrTooManyTaps is returned by Table.Tap.
var ErrTooManyTaps = errors.New("too many streams of records are open")

// TapOptions say which records a Tap receives.
type TapOptions struct {
	// Match selects records; nil selects all. The taps' goroutine calls it.
	Match func(*Record) bool
	// Opens adds Opened records.
	Opens bool
	// Rate bounds the records of a second; more count as lost. 0 means no bound.
	Rate int
}

// Tap receives copies of records as connections end. One goroutine reads it. A
// reader that is too slow loses records of its own Tap, which are counted.
type Tap struct {
	table *Table
	match func(*Record) bool
	opens bool
	rate  tapRate

	mu    sync.Mutex // guards the fields below; held at most for copying records
	ring  []Record   // grows to tapRoom
	first int        // the oldest record
	count int
	lost  uint64
	ahead int // records that were there before the first of the lost ones

	wake chan struct{}
}

// tapRate bounds the records of a second.
type tapRate struct {
	limit   int // 0 for none
	second  int64
	records int
}

// turn is called before the records of a batch.
func (r *tapRate) turn() {
	if r.limit == 0 {
		return
	}
	if now := time.Now().Unix(); now != r.second {
		r.second, r.records = now, 0
	}
}

// admit reports whether one more record may be kept.
func (r *tapRate) admit() bool {
	r.records++
	return r.limit == 0 || r.records <= r.limit
}

// taps are the Taps of a Table. Their goroutine runs while there are any.
type taps struct {
	any       atomic.Bool // whether there are taps
	used      atomic.Bool // whether there ever was one
	sinkOpens bool        // the sink wants Opened records

	mu    sync.Mutex
	all   map[*Tap]struct{}
	queue *queue // nil while all is empty
	off   bool   // the Table is closed
}

// Tap begins to receive records. The caller must Close the Tap.
func (t *Table) Tap(o TapOptions) (*Tap, error) {
	tap := &Tap{table: t, match: o.Match, opens: o.Opens, rate: tapRate{limit: o.Rate}, wake: make(chan struct{}, 1)}
	if err := t.taps.add(t, tap); err != nil {
		return nil, err
	}
	return tap, nil
}

// Close ends the Tap.
func (p *Tap) Close() { p.table.taps.remove(p.table, p) }

// add begins to tell a Tap of records.
func (s *taps) add(t *Table, r *Tap) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) >= maxTaps {
		return ErrTooManyTaps
	}
	if s.off {
		return errors.New("the proxy stops")
	}
	if s.all == nil {
		s.all = make(map[*Tap]struct{})
	}
	s.all[r] = struct{}{}
	if s.queue == nil {
		s.queue = newQueue(s, DefaultQueue)
		go s.queue.deliver()
	}
	s.settle(t)
	return nil
}

// remove ends that.
func (s *taps) remove(t *Table, r *Tap) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, r)
	s.settle(t)
	if len(s.all) == 0 && s.queue != nil {
		s.queue.stop()
		s.queue = nil
	}
}

// settle sets what the loops read. s.mu is held.
func (s *taps) settle(t *Table) {
	opens := s.sinkOpens
	for p := range s.all {
		opens = opens || p.opens
	}
	if len(s.all) > 0 {
		s.used.Store(true)
	}
	s.any.Store(len(s.all) > 0)
	t.opens.Store(opens)
}

// put queues copies of a batch's records if there are taps, or were a moment ago.
func (s *taps) put(records []Record) bool {
	if !s.used.Load() {
		return false
	}
	s.mu.Lock()
	q := s.queue
	s.mu.Unlock()
	if q != nil {
		b := q.get()
		b.records = append(b.records, records...)
		q.put(b)
	}
	return true
}

// stop ends the taps' goroutine for good.
func (s *taps) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.off = true
	if s.queue != nil {
		s.queue.stop()
	}
}

// Write implements Sink.
func (s *taps) Write(batch []Record) {
	s.mu.Lock()
	all := make([]*Tap, 0, maxTaps)
	for p := range s.all {
		all = append(all, p)
	}
	s.mu.Unlock()
	for _, p := range all {
		p.put(batch)
	}
}

// Flush implements Sink.
func (s *taps) Flush() {}

var (
	_ Sink         = (*taps)(nil)
	_ LossReporter = (*taps)(nil)
)

// RecordsLost implements LossReporter: all taps have lost them.
func (s *taps) RecordsLost(n uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.all {
		p.lose(n)
	}
}

// put adds the records that the Tap wants.
func (p *Tap) put(batch []Record) {
	added := false
	p.rate.turn()
	for i := range batch {
		r := &batch[i]
		if r.Event == Lasts || r.Event == Opened && !p.opens || p.match != nil && !p.match(r) {
			continue
		}
		if !p.rate.admit() {
			p.lose(1)
			continue
		}
		added = true
		p.add(r)
	}
	if added {
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}
}

// lose counts records as lost.
func (p *Tap) lose(n uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.loseLocked(n)
}

func (p *Tap) loseLocked(n uint64) {
	if p.lost == 0 {
		p.ahead = p.count
	}
	p.lost += n
}

// add adds a record, or counts it as lost.
func (p *Tap) add(r *Record) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.count == len(p.ring) {
		if len(p.ring) >= tapRoom {
			p.loseLocked(1)
			return
		}
		larger := make([]Record, min(max(2*len(p.ring), batchSize), tapRoom))
		n := copy(larger, p.ring[p.first:])
		copy(larger[n:], p.ring[:p.first])
		p.ring, p.first = larger, 0
	}
	p.ring[(p.first+p.count)%len(p.ring)] = *r
	p.count++
}

// Next waits for records and moves them into buf. lost is the number of records
// that were dropped since it was told last, because they were not read in time or
// beyond the rate. It returns ctx.Err() when ctx ends.
func (p *Tap) Next(ctx context.Context, buf []Record) (n int, lost uint64, err error) {
	for {
		if n, lost = p.take(buf); n > 0 || lost > 0 {
			return n, lost, nil
		}
		select {
		case <-p.wake:
		case <-time.After(tapLossTime):
		case <-ctx.Done():
			return 0, 0, ctx.Err()
		}
	}
}

// take moves waiting records into buf. The loss comes after the records that were
// there before it began, not when none waits: with a reader that is always too slow, some
// always do.
func (p *Tap) take(buf []Record) (n int, lost uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for n < len(buf) && p.count > 0 {
		buf[n] = p.ring[p.first]
		p.ring[p.first] = Record{} // releases what it points to
		p.first = (p.first + 1) % len(p.ring)
		p.count--
		n++
	}
	if p.ahead -= min(n, p.ahead); p.ahead == 0 {
		lost, p.lost = p.lost, 0
	}
	return n, lost
}
