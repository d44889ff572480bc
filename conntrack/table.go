// Package conntrack keeps the table of live connections, creates one record for
// each connection, counts connections, and writes the access log.
//
// A [Table] has one [Shard] for each event loop. The state of a connection embeds a
// [Record]. The loop calls Shard.Open after it has accepted the connection, updates
// the record, and calls Shard.Close at the end. Close copies the record into a
// batch. Batches go through a bounded queue to one goroutine, which passes them to
// the [Sink], normally a [Log]. If the sink is too slow, the queue drops and counts
// records; it never delays a connection.
//
//	log, err := conntrack.OpenLog(conntrack.LogOptions{Path: "-"})
//	table := conntrack.NewTable(conntrack.Options{Shards: 2, Sink: log})
//	...
//	shard := table.Shard(0)                  // on loop 0, and only there
//	shard.Open(&conn.record)                 // after setting Client, VIP, Port, Counters, Start
//	conn.record.BeginAttempt(&endpoint, now) // and AttemptFailed, AttemptSucceeded
//	conn.record.End, conn.record.Duration = conntrack.ClientFin, now-conn.record.Start
//	shard.Close(&conn.record)
//	...
//	shard.Flush()                            // on each loop, at the end
//	table.Close(ctx); log.Close()
//
// The table owns the counters of each service port ([Counters]). They live as long
// as the service port, across all changes of its configuration. Methods of Table,
// Counters and Log are safe for concurrent use; Shard and Record belong to their
// loop.
package conntrack

import (
	"context"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// DefaultQueue is the default bound on records that wait for the sink, about 8 MiB.
const DefaultQueue = 32768

// Options configure a Table.
type Options struct {
	// Shards is the number of event loops.
	Shards int
	// Sink receives the records; nil discards them.
	Sink Sink
	// Opens adds a record when a connection has its endpoint.
	Opens bool
	// TCP adds to the records of TCP connections what the transport says (Record.Transport).
	TCP bool
	// Queue bounds the records that wait for the sink; 0 means DefaultQueue.
	Queue int
	// Now returns the wall clock time; nil means time.Now.
	Now func() time.Time
}

// Sink receives the records of ended connections. The Table calls it from one
// goroutine, never from an event loop.
type Sink interface {
	// Write receives records in the order in which their shards closed them. The
	// slice and the records are valid only during the call. The objects that they
	// point to are immutable and may be kept.
	Write(batch []Record)
	// Flush is called when no more records wait.
	Flush()
}

// LossReporter is a Sink that also receives the number of dropped records.
type LossReporter interface {
	// RecordsLost is called between two Writes on the same goroutine.
	RecordsLost(n uint64)
}

// Table is the table of live connections, in shards.
type Table struct {
	shards   []Shard
	registry registry
	told     map[service.PortName]Totals // by MovedTotals
	now      func() time.Time

	tcp     bool // Options.TCP
	misuse  atomic.Uint64
	queue   *queue // nil without a sink
	taps    taps
	past    atomic.Pointer[Past]
	refused refused
	opens   atomic.Bool // whether the sink or a tap wants Opened records
	self    atomic.Pointer[self]
}

// self is the node, as a client. A client that a load balancer names has one of its own, as
// has a connection that waited.
type self struct {
	name      string // "" if the client is another one
	addresses map[netip.Addr]struct{}
	via       netip.AddrPort // the load balancer, or invalid
	waited    int64          // what WaitTime returns; during a wait, less the age at its beginning
}

// SetNode says which addresses are the node's own: connections that are opened from them
// are the node's, whichever of them the kernel chose as the source. It is safe for
// concurrent use.
func (t *Table) SetNode(name string, addresses []netip.Addr) {
	s := &self{name: name, addresses: make(map[netip.Addr]struct{}, len(addresses))}
	for _, a := range addresses {
		s.addresses[a] = struct{}{}
	}
	t.self.Store(s)
}

// selfAt returns the node if an address is one of the node's own, else nil.
func (t *Table) selfAt(a netip.Addr) *self {
	if s := t.self.Load(); s != nil {
		if _, own := s.addresses[a]; own || a.IsLoopback() {
			return s
		}
	}
	return nil
}

// NewTable creates a table. If there is a sink, its goroutine runs until Close.
func NewTable(opts Options) *Table {
	t := &Table{shards: make([]Shard, max(opts.Shards, 1)), now: opts.Now, tcp: opts.TCP}
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
		t.opens.Store(opts.Opens)
	}
	t.taps.sinkOpens = opts.Sink != nil && opts.Opens
	for i := range t.shards {
		s := &t.shards[i]
		s.table = t
		s.turn.held = make(chan struct{}, 1)
		s.list.prev, s.list.next = &s.list, &s.list
		s.list.state, s.position.state = recordMarker, recordMarker
		s.parked.prev, s.parked.next = &s.parked, &s.parked
	}
	t.BeginIDs(1)
	return t
}

// NextID returns a number that no connection has had yet. It is safe for concurrent use.
func (t *Table) NextID() (next uint64) {
	for i := range t.shards {
		next = max(next, t.shards[i].nextID.Load())
	}
	return next
}

// BeginIDs numbers new connections from first on. Call it before any is opened.
func (t *Table) BeginIDs(first uint64) {
	for i := range t.shards {
		t.shards[i].nextID.Store(first + uint64(i))
	}
}

// Shard returns the shard of event loop i, from 0.
func (t *Table) Shard(i int) *Shard { return &t.shards[i] }

// Stats counts records.
type Stats struct {
	Queued  uint64 // records added to the sink's queue
	Dropped uint64 // records lost because the queue was full
	// Misuse counts records that were opened or closed twice. It is not 0 only in
	// case of a bug.
	Misuse uint64
}

// Stats returns the counts of all shards.
func (t *Table) Stats() Stats {
	s := Stats{Misuse: t.misuse.Load()}
	if t.queue != nil {
		s.Queued, s.Dropped = t.queue.queued.Load(), t.queue.dropped.Load()
	}
	return s
}

// Room returns how many records the sink's queue takes now without loss. It is safe for
// concurrent use.
func (t *Table) Room() int {
	if t.queue == nil {
		return math.MaxInt
	}
	return t.queue.limit - t.queue.length()
}

// wants reports whether the sink, a tap or the Past gets a copy of the record.
func (t *Table) wants(r *Record) bool {
	return t.taps.any.Load() || t.past.Load() != nil || t.queue != nil && !r.Quiet
}

// newBatch returns an empty batch.
func (t *Table) newBatch() *batch {
	if t.queue != nil {
		return t.queue.get()
	}
	return &batch{records: make([]Record, 0, batchSize)}
}

// put hands a batch to the Past, to the taps and to the sink. Without a sink it returns the
// batch, empty.
func (t *Table) put(b *batch) *batch {
	past := t.past.Load()
	if past != nil {
		past.put(b.records)
	}
	if t.taps.put(b.records) || past != nil {
		// Some records are not for the sink.
		b.records = slices.DeleteFunc(b.records, func(r Record) bool { return r.Quiet || r.Event == Opened && !t.taps.sinkOpens })
	}
	if t.queue != nil {
		t.queue.put(b)
		return nil
	}
	clear(b.records)
	b.records = b.records[:0]
	return b
}

// Close waits until the sink has received all flushed records, or until ctx ends;
// then it returns an error and the sink may still be in use. Records flushed
// afterwards are dropped.
func (t *Table) Close(ctx context.Context) error {
	t.taps.stop()
	if t.queue == nil {
		return nil
	}
	t.queue.stop()
	select {
	case <-t.queue.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("connection records: %d not written: %w", t.queue.length(), ctx.Err())
	}
}
