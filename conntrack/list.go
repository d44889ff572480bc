package conntrack

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
)

const (
	// listStep is how many connections one step copies. A step occupies the event
	// loop for at most some hundred microseconds.
	listStep = 256
	// stepsTime is how long the steps of walks over a shard may take together before
	// they pause, restShare how many times as long the pause is: however many walks
	// there are, they take at most a fifth of the loop's time, and one step at a time.
	stepsTime = 500 * time.Microsecond
	restShare = 4
	// inspectStep is listStep where each connection costs system calls.
	inspectStep = 64
	// longestRest bounds a pause: a step seems long if the loop's thread had to wait.
	longestRest = 20 * time.Millisecond
	// endStep is how many connections one step ends: each costs some system calls.
	endStep = 16
)

var errLoopStopped = errors.New("the event loop has stopped")

// Post runs f on the event loop of a shard, in the order of the calls. It returns
// false if the loop has stopped.
type Post func(shard int, f func()) bool

// OnLoops returns the Post of the shards' loops. A shard without a loop has no records.
func OnLoops(loops []*poll.Loop) Post {
	return func(shard int, f func()) bool {
		if shard >= len(loops) {
			f()
			return true
		}
		return loops[shard].Post(f)
	}
}

// List calls visit with a copy of each open connection's record, shard by shard, in
// the order of opening; parked ones come after the others of their shard, in the order of
// parking. Call it from any goroutine except an event loop. It
// interrupts the loops for a few records at a time. A connection that is open
// during the whole listing is visited exactly once. One that opens or ends
// meanwhile may be visited or not. The copy is valid only during the call.
//
// List stops at an error of visit and returns it unchanged. It returns ctx.Err()
// wrapped if ctx ends, and an error if a loop has stopped.
func (t *Table) List(ctx context.Context, post Post, visit func(*Record) error) error {
	return t.walk(ctx, post, walking{step: (*lister).copyNext, parkedStep: (*lister).copyParked}, visit)
}

// Inspect is List with what the transports say (Record.Transport): it costs some system
// calls for each relayed TCP connection. The copy and its Transport are valid only during
// the call.
func (t *Table) Inspect(ctx context.Context, post Post, visit func(*Record) error) error {
	return t.walk(ctx, post, walking{step: (*lister).copyNext, parkedStep: (*lister).copyParked, asks: inspectStep}, visit)
}

// Look is List for measuring rates: the copy's Looked tells the bytes at the Look
// before this one. now is a monotonic time in ns. There must be one Look at a time.
func (t *Table) Look(ctx context.Context, post Post, now int64, visit func(*Record) error) error {
	return t.walk(ctx, post, walking{
		step:       func(l *lister) bool { l.now = now; return l.copyNext() },
		parkedStep: func(l *lister) bool { l.now = now; return l.copyParked() },
	}, visit)
}

// Find calls visit with a copy of the record of an open connection, with what its
// transport says. It returns false
// if there is none.
func (t *Table) Find(ctx context.Context, post Post, id uint64, visit func(*Record)) (found bool, err error) {
	if id == 0 {
		return false, nil
	}
	shard := int((id - 1) % uint64(len(t.shards)))
	err = t.shards[shard].walk(ctx, func(f func()) bool { return post(shard, f) }, walking{
		step:       func(l *lister) bool { return l.copyOne(id) },
		parkedStep: func(l *lister) bool { return l.copyParkedOne(id) },
		asks:       1,
	},
		func(r *Record) error {
			found = true
			visit(r)
			return nil
		})
	return found, err
}

// EndWhere ends the connections that match, at most a number of them, in a way that their
// records have, and returns how many. match is called on the event loops and must be quick. Connections whose
// transport cannot end them are passed over.
func (t *Table) EndWhere(ctx context.Context, post Post, most int, end End, match func(*Record) bool) (ended int, err error) {
	return t.endWhere(ctx, post, most, end, match, 0)
}

// EndInspected is EndWhere for a match that looks at Record.Transport.
func (t *Table) EndInspected(ctx context.Context, post Post, most int, end End, match func(*Record) bool) (ended int, err error) {
	return t.endWhere(ctx, post, most, end, match, 1)
}

func (t *Table) endWhere(ctx context.Context, post Post, most int, end End, match func(*Record) bool, asks int) (ended int, err error) {
	if most <= 0 {
		return 0, nil
	}
	err = t.walk(ctx, post, walking{
		step:       func(l *lister) bool { return l.endNext(end, match, most-ended) },
		parkedStep: func(l *lister) bool { return l.endParked(end, match, most-ended) },
		asks:       asks,
	}, func(*Record) error {
		ended++
		return nil
	})
	return ended, err
}

// walking is the steps of a walk, first over a shard's records, then over what is parked.
// Each returns false after the last one.
type walking struct {
	step, parkedStep func(*lister) bool
	// asks is how many transports one step asks; 0: none.
	asks int
}

func (t *Table) walk(ctx context.Context, post Post, w walking, visit func(*Record) error) error {
	for i := range t.shards {
		if err := t.shards[i].walk(ctx, func(f func()) bool { return post(i, f) }, w, visit); err != nil {
			return err
		}
	}
	return nil
}

// lister is the state of one walk over a shard. The loop owns it until a step is
// over.
type lister struct {
	shard  *Shard
	marker Record // the position in the list
	parked Parked // the position among parked connections
	phase  phase
	copies []Record // of the last step
	failed []Attempt
	// transports have room for as many as one step asks.
	transports []Transport
	now        int64 // of a Look; 0 for others
	took       time.Duration
}

// turn lets the walks over a shard take their steps one after the other.
type turn struct {
	held chan struct{} // has room for one
	used time.Duration // by steps since the last pause; guarded by held
}

// take waits for the turn.
func (t *turn) take(ctx context.Context) error {
	select {
	case t.held <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// giveBack pauses if the steps have used up their time, and gives the turn to the next
// walk.
func (t *turn) giveBack(ctx context.Context, took time.Duration) {
	defer func() { <-t.held }()
	if t.used += took; t.used < stepsTime {
		return
	}
	rest := time.NewTimer(min(restShare*t.used, longestRest))
	defer rest.Stop()
	t.used = 0
	select {
	case <-rest.C:
	case <-ctx.Done():
	}
}

func (s *Shard) walk(ctx context.Context, post func(func()) bool, w walking, visit func(*Record) error) error {
	var (
		l       = &lister{shard: s, marker: Record{state: recordMarker}, copies: make([]Record, 0, listStep), transports: make([]Transport, 0, w.asks)}
		stepped = make(chan bool, 1)
	)
	next := func() {
		began := poll.Nanotime()
		more := l.step(w)
		l.took = time.Duration(poll.Nanotime() - began)
		stepped <- more
	}
	for more := true; more; {
		if err := s.turn.take(ctx); err != nil {
			post(l.leave)
			return fmt.Errorf("list connections: %w", err)
		}
		if !post(next) {
			<-s.turn.held
			return fmt.Errorf("list connections: %w", errLoopStopped)
		}
		select {
		case more = <-stepped:
			s.turn.giveBack(ctx, l.took)
		case <-ctx.Done():
			<-s.turn.held
			post(l.leave)
			return fmt.Errorf("list connections: %w", ctx.Err())
		}
		for i := range l.copies {
			if err := visit(&l.copies[i]); err != nil {
				post(l.leave)
				return err
			}
		}
	}
	return nil
}

// clear makes room for the copies of another step.
func (l *lister) clear() {
	l.copies, l.failed, l.transports = l.copies[:0], l.failed[:0], l.transports[:0]
}

// room is how many copies a step makes at most.
func (l *lister) room() int {
	if n := cap(l.transports); n > 0 {
		return n
	}
	return listStep
}

// begin returns the record to continue with.
func (l *lister) begin() *Record {
	l.clear()
	r := l.shard.list.next
	if l.marker.next != nil {
		r = l.marker.next
		l.marker.unlink()
	}
	return r
}

// end remembers the record to continue with: parked connections at the end of the list.
func (l *lister) end(r *Record) (more bool) {
	if r == &l.shard.list {
		l.phase = amongParked
		return true
	}
	l.marker.insertBefore(r)
	return true
}

// phase is how far a walk over a shard is.
type phase uint8

const (
	notBegun phase = iota
	amongRecords
	amongParked
	over
)

// step makes a step.
func (l *lister) step(w walking) (more bool) {
	if l.phase == notBegun {
		l.phase = amongRecords
		l.shard.walks++
	}
	if l.phase == amongRecords {
		more = w.step(l)
	} else {
		more = w.parkedStep(l)
	}
	if !more {
		l.leave()
	}
	return more
}

// leave ends the walk.
func (l *lister) leave() {
	if l.phase != notBegun && l.phase != over {
		l.shard.walks--
	}
	l.phase = over
	l.marker.detach()
	if l.parked.next != nil {
		l.parked.unlink()
	}
}

// copyNext copies the next records.
func (l *lister) copyNext() (more bool) {
	r := l.begin()
	for ; r != &l.shard.list && len(l.copies) < l.room(); r = r.next {
		if r.state == recordOpen {
			l.copy(r)
		}
	}
	return l.end(r)
}

// copyParked copies the next parked connections' records.
func (l *lister) copyParked() (more bool) {
	return l.eachParked(listStep, l.room(), func(p *Parked) bool {
		p.with(l.shard, l.copy)
		return true
	})
}

// copyParkedOne looks for one parked connection.
func (l *lister) copyParkedOne(id uint64) (more bool) {
	return l.eachParked(findStep, 1, func(p *Parked) bool {
		if p.id == id {
			p.with(l.shard, l.copy)
		}
		return p.id != id
	})
}

// findStep is how many records copyOne looks at in one step.
const findStep = 1024

// copyOne looks for one record.
func (l *lister) copyOne(id uint64) (more bool) {
	r := l.begin()
	for n := 0; r != &l.shard.list && n < findStep; r, n = r.next, n+1 {
		if r.state == recordOpen && r.ID == id {
			l.copy(r)
			return false
		}
	}
	return l.end(r)
}

// copy appends a copy of a record and of its failed attempts.
func (l *lister) copy(r *Record) {
	r.refresh()
	l.copies = append(l.copies, Record{})
	c := &l.copies[len(l.copies)-1]
	r.copyTo(c, Listed, poll.Nanotime())
	if n := len(l.transports); n < cap(l.transports) {
		l.transports = l.transports[:n+1]
		c.inspect(r.Owner, &l.transports[n])
	}
	if n := len(r.Failed); n > 0 {
		from := len(l.failed)
		l.failed = append(l.failed, r.Failed...) // AttemptFailed may replace the last one
		l.copies[len(l.copies)-1].Failed = l.failed[from : from+n : from+n]
	}
	if l.now != 0 {
		r.looked = &looked{r.BytesFromClient, r.BytesFromEndpoint, l.now} // the copy keeps the last one
	}
}

// endNext ends the next matching connections, at most a number of them. Each leaves
// an empty copy.
func (l *lister) endNext(end End, match func(*Record) bool, most int) (more bool) {
	r := l.begin()
	for n := 0; r != &l.shard.list && n < listStep && len(l.copies) < min(endStep, most); n++ {
		r.insertMarker(&l.marker)
		if owner, ok := r.Owner.(Ender); ok && r.state == recordOpen && l.matches(r, match) {
			owner.EndConnection(end)
			l.copies = append(l.copies, Record{})
		}
		r = l.marker.next
		l.marker.unlink()
	}
	if len(l.copies) >= most {
		return false
	}
	return l.end(r)
}

// endParked is endNext for parked connections.
func (l *lister) endParked(end End, match func(*Record) bool, most int) (more bool) {
	more = l.eachParked(listStep, min(endStep, most), func(p *Parked) bool {
		owner, is := p.keeper.(Ender)
		if !is {
			return true
		}
		p.with(l.shard, func(r *Record) { is = l.matches(r, match) })
		if is {
			owner.EndConnection(end)
			l.copies = append(l.copies, Record{})
		}
		return true
	})
	return more && len(l.copies) < most
}

// matches brings the record up to date before it calls match, and if that looks at
// transports, asks the record's.
func (l *lister) matches(r *Record, match func(*Record) bool) bool {
	r.refresh()
	if cap(l.transports) == 0 {
		r.Duration = max(poll.Nanotime()-r.Start, 0)
		return match(r)
	}
	var c Record
	r.copyTo(&c, Listed, poll.Nanotime())
	c.inspect(r.Owner, &l.transports[:1][0])
	return match(&c)
}

// insertMarker puts a marker behind the record.
func (r *Record) insertMarker(marker *Record) { marker.insertBefore(r.next) }

// detach removes a marker from the list, if it is in one.
func (r *Record) detach() {
	if r.next != nil {
		r.unlink()
	}
}
