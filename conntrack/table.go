// Package conntrack keeps the table of live connections, makes one record of
// each, counts them, and writes the access log.
//
// A [Table] has one [Shard] for each event loop. The state of a connection
// embeds a [Record]; its loop calls Shard.Open when it has accepted the
// connection and Shard.Close when it has ended, and fills in the record between
// the two. Close copies the record into a batch; full batches go through a
// bounded queue to one goroutine that hands them to the [Sink], normally a
// [Log]. A sink that is too slow costs records, which are counted, and never
// delays a connection.
//
//	log, err := conntrack.OpenLog(conntrack.LogOptions{Path: "-"})
//	table := conntrack.NewTable(conntrack.Options{Shards: 2, Sink: log})
//	...
//	shard := table.Shard(0)                  // on loop 0, and only there
//	shard.Open(&conn.record)                 // Client, VIP, Port, Counters, Start are set
//	conn.record.BeginAttempt(&endpoint, now) // and AttemptFailed, AttemptSucceeded
//	conn.record.End, conn.record.Duration = conntrack.ClientFin, now-conn.record.Start
//	shard.Close(&conn.record)
//	...
//	shard.Flush()                            // on each loop, at the end
//	table.Close(ctx); log.Close()
//
// The counters of a service port ([Counters]) belong to the table and live as
// long as the service port, whatever happens to its configuration.
package conntrack

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// DefaultQueue is how many records wait for the sink at most, about 8 MiB.
const DefaultQueue = 32768

// Options configure a Table.
type Options struct {
	// Shards is the number of event loops.
	Shards int
	// Sink takes the records; nil if nobody wants them.
	Sink Sink
	// Queue is how many records may wait for the sink; 0 means DefaultQueue.
	Queue int
	// Now gives the wall clock; nil means time.Now.
	Now func() time.Time
}

// Sink takes the records of connections that have ended. Its methods are called
// from one goroutine of the Table's, never from an event loop.
type Sink interface {
	// Write takes records in the order in which their shards closed them. The
	// slice and the records are valid during the call only; what they point to
	// is immutable and may be kept.
	Write(batch []Record)
	// Flush is called when no more records are waiting.
	Flush()
}

// LossReporter is a Sink that wants to know of records that were dropped because
// it was too slow.
type LossReporter interface {
	// RecordsLost is called between two Writes, on the same goroutine.
	RecordsLost(n uint64)
}

// Table is the table of live connections, in shards.
type Table struct {
	shards   []Shard
	registry registry
	now      func() time.Time

	misuse atomic.Uint64
	queue  *queue // nil without a sink
}

// NewTable returns a table. If there is a sink its goroutine runs until Close.
func NewTable(opts Options) *Table {
	t := &Table{shards: make([]Shard, max(opts.Shards, 1)), now: opts.Now}
	if t.now == nil {
		t.now = time.Now
	}
	if opts.Sink != nil {
		records := opts.Queue
		if records <= 0 {
			records = DefaultQueue
		}
		t.queue = newQueue(opts.Sink, records)
		go t.queue.deliver()
	}
	for i := range t.shards {
		s := &t.shards[i]
		s.table = t
		s.nextID = uint64(i) + 1
		s.list.prev, s.list.next = &s.list, &s.list
		s.list.state, s.place.state = recordMarker, recordMarker
	}
	return t
}

// Shard returns the shard of event loop i, from 0.
func (t *Table) Shard(i int) *Shard { return &t.shards[i] }

// Stats tells what became of the records.
type Stats struct {
	Queued  uint64 // records that were handed to the sink's queue
	Dropped uint64 // records that were lost because the queue was full
	// Misuse counts records that were opened or closed twice. It is not 0 only
	// if there is a bug.
	Misuse uint64
}

// Stats tells what became of the records of all shards.
func (t *Table) Stats() Stats {
	s := Stats{Misuse: t.misuse.Load()}
	if t.queue != nil {
		s.Queued, s.Dropped = t.queue.queued.Load(), t.queue.dropped.Load()
	}
	return s
}

// Close waits until the sink has taken all that was flushed, or until ctx ends;
// then the sink may still be in use. Records that are flushed afterwards are
// dropped.
func (t *Table) Close(ctx context.Context) error {
	if t.queue == nil {
		return nil
	}
	t.queue.stop()
	select {
	case <-t.queue.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("connection records: %d not written: %w", t.queue.left(), ctx.Err())
	}
}
