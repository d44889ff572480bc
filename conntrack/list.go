package conntrack

import (
	"context"
	"fmt"
	"slices"
)

// listStep is how many connections are copied at once: the event loop is kept
// for some ten microseconds.
const listStep = 128

// Post has f run on the event loop of a shard, after all that was posted there
// before. It gives false if the loop has stopped.
type Post func(shard int, f func()) bool

// List calls visit with a copy of each open connection's record, shard by shard
// and in the order of opening, from any goroutine but an event loop. The loops
// are interrupted for a few records at a time. Each connection that is open from
// beginning to end of the listing is visited exactly once; others may be. The copy
// is valid during the call.
//
// An error of visit ends the listing and is returned as it is.
func (t *Table) List(ctx context.Context, post Post, visit func(*Record) error) error {
	for i := range t.shards {
		if err := t.shards[i].listAll(ctx, func(f func()) bool { return post(i, f) }, visit); err != nil {
			return err
		}
	}
	return nil
}

func (s *Shard) listAll(ctx context.Context, post func(func()) bool, visit func(*Record) error) error {
	var (
		place   = &Record{state: recordMarker} // touched on the loop only
		copies  = make([]Record, 0, listStep)  // the loop's until it says so on stepped
		stepped = make(chan bool, 1)
	)
	for more := true; more; {
		if !post(func() { stepped <- s.listStep(place, &copies) }) {
			return fmt.Errorf("list connections: the event loop has stopped")
		}
		select {
		case more = <-stepped:
		case <-ctx.Done():
			post(place.leave)
			return fmt.Errorf("list connections: %w", ctx.Err())
		}
		for i := range copies {
			if err := visit(&copies[i]); err != nil {
				post(place.leave)
				return err
			}
		}
	}
	return nil
}

// listStep copies the next records into copies. place remembers in the list how
// far it came; it is false when that is the end.
func (s *Shard) listStep(place *Record, copies *[]Record) bool {
	out := (*copies)[:0]
	r := s.list.next
	if place.next != nil {
		r = place.next
		place.unlink()
	}
	for ; r != &s.list && len(out) < cap(out); r = r.next {
		if r.state != recordOpen {
			continue
		}
		r.refresh()
		out = append(out, *r)
		c := &out[len(out)-1]
		c.Owner, c.prev, c.next = nil, nil, nil
		c.Failed = slices.Clone(r.Failed) // the last one may be replaced
	}
	*copies = out
	if r == &s.list {
		return false
	}
	place.insertBefore(r)
	return true
}

// leave takes a marker out of the list it may be in.
func (r *Record) leave() {
	if r.next != nil {
		r.unlink()
	}
}
