package conntrack

import (
	"context"
	"fmt"
	"slices"
)

// listStep is how many connections one step copies. A step occupies the event loop
// for some ten microseconds.
const listStep = 128

// Post runs f on the event loop of a shard, in the order of the calls. It returns
// false if the loop has stopped.
type Post func(shard int, f func()) bool

// List calls visit with a copy of each open connection's record, shard by shard, in
// the order of opening. Call it from any goroutine except an event loop. It
// interrupts the loops for a few records at a time. A connection that is open
// during the whole listing is visited exactly once. One that opens or ends
// meanwhile may be visited or not. The copy is valid only during the call.
//
// List stops at an error of visit and returns it unchanged. It returns ctx.Err()
// wrapped if ctx ends, and an error if a loop has stopped.
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
		marker  = &Record{state: recordMarker} // used only on the loop
		copies  = make([]Record, 0, listStep)  // owned by the loop until it sends on stepped
		stepped = make(chan bool, 1)
	)
	for more := true; more; {
		if !post(func() { stepped <- s.listStep(marker, &copies) }) {
			return fmt.Errorf("list connections: the event loop has stopped")
		}
		select {
		case more = <-stepped:
		case <-ctx.Done():
			post(marker.detach)
			return fmt.Errorf("list connections: %w", ctx.Err())
		}
		for i := range copies {
			if err := visit(&copies[i]); err != nil {
				post(marker.detach)
				return err
			}
		}
	}
	return nil
}

// listStep copies the next records into copies. It moves marker to its position in
// the list, and returns false at the end of the list.
func (s *Shard) listStep(marker *Record, copies *[]Record) bool {
	out := (*copies)[:0]
	r := s.list.next
	if marker.next != nil {
		r = marker.next
		marker.unlink()
	}
	for ; r != &s.list && len(out) < cap(out); r = r.next {
		if r.state != recordOpen {
			continue
		}
		r.refresh()
		out = append(out, *r)
		c := &out[len(out)-1]
		c.Owner, c.prev, c.next = nil, nil, nil
		c.Failed = slices.Clone(r.Failed) // AttemptFailed may replace the last one
	}
	*copies = out
	if r == &s.list {
		return false
	}
	marker.insertBefore(r)
	return true
}

// detach removes a marker from the list, if it is in one.
func (r *Record) detach() {
	if r.next != nil {
		r.unlink()
	}
}
