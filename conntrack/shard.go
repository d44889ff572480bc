package conntrack

import (
	"slices"
	"sync/atomic"
)

// Shard is the part of a Table that belongs to one event loop. Its methods must be
// called on that loop. It has no locks.
type Shard struct {
	table          *Table
	nextID         atomic.Uint64 // written by the loop
	count          int
	list           Record      // head of a ring of open records and markers, in the order of opening
	position       Record      // marks the position of Refresh
	parked         Parked      // head of a ring of parked connections and markers, in the order of parking
	parkedPosition Parked      // position among them
	walks          int         // over the shard, at present
	scratch        Record      // of a parked connection, while somebody looks at it
	batch          *batch      // records of ended connections, or nil
	spare          *batch      // an empty one, or nil
	transports     []Transport // unused, for records
	wake           func()
	failures       failures
	turn           turn // of walks, which are on other goroutines
	_              [64]byte
}

// OnPending sets a function that is called when the first record waits for Flush.
// The owner calls Flush some milliseconds later, by a timer of its loop. So a burst
// of records makes one batch, and a single record is not delayed much. Without
// OnPending, records wait until their batch is full.
func (s *Shard) OnPending(f func()) { s.wake = f }

// Open adds a connection to the table. The caller has set the record's Start,
// Client, VIP, Port, Kind, Protocol and Counters; Open sets ID, and Wall if it is 0. The
// record must not move in memory until Close.
func (s *Shard) Open(r *Record) {
	if s.Adopt(r) && r.Counters != nil {
		r.Counters.opened.Add(1)
	}
}

// newID returns the number of a new connection.
func (s *Shard) newID() uint64 {
	id := s.nextID.Load()
	s.nextID.Store(id + uint64(len(s.table.shards)))
	return id
}

// Adopt is Open of a connection that is among the totals of the process before, see Table.Carry. It
// returns false after a misuse.
func (s *Shard) Adopt(r *Record) bool {
	if r.state != recordNew {
		s.table.misuse.Add(1)
		return false
	}
	r.ID = s.newID()
	if r.Wall == 0 {
		r.Wall = s.table.now().UnixNano()
	}
	r.self = s.table.selfAt(r.Client.Addr())
	r.state = recordOpen
	r.shard = s
	r.insertBefore(&s.list)
	s.count++
	if r.Counters != nil {
		r.Counters.active.Add(1)
	}
	return true
}

// Close removes a connection from the table and queues a copy of its record. The
// caller has set End, Duration, FirstByte and the bytes. A second Close, or a Close
// without Open, only counts as a misuse. Close takes ownership of Failed; set the
// record to Record{} before the next use.
func (s *Shard) Close(r *Record) {
	if r.state != recordOpen {
		s.table.misuse.Add(1)
		return
	}
	r.state = recordClosed
	transport := s.ask(r)
	r.Owner = nil
	if r.load != nil && r.Connected {
		r.Counters.loads.Ended(r.load, r.outcome(), r.Start+r.Duration)
	}
	r.release()
	r.unlink()
	s.count--
	if r.Counters != nil {
		r.Counters.recordClosed(r)
	}
	if r.End.ByEndpoint() {
		s.failures.addBroken(r)
	}
	if s.table.wants(r) {
		s.push(r, Ended, 0, transport)
	}
}

// tell queues a copy of the record of an open connection.
func (s *Shard) tell(r *Record, e Event, now int64) {
	if s.table.wants(r) {
		r.refresh()
		s.push(r, e, now, s.ask(r))
	}
}

// push adds a copy of a record to the batch, with what the transport said, if that is known.
func (s *Shard) push(r *Record, e Event, now int64, t *Transport) {
	if s.batch == nil {
		if s.batch, s.spare = s.spare, nil; s.batch == nil {
			s.batch = s.table.newBatch()
		}
		if s.wake != nil {
			s.wake()
		}
	}
	n := len(s.batch.records)
	s.batch.records = s.batch.records[:n+1]
	c := &s.batch.records[n]
	r.copyTo(c, e, now)
	if e != Ended {
		c.Failed = slices.Clone(r.Failed) // AttemptFailed may replace the last one
	}
	if t != nil {
		c.SetTransport(t)
	}
	if n+1 == batchSize {
		s.Flush()
	}
}

// Flush queues the records of ended connections. It is cheap if there are none.
func (s *Shard) Flush() {
	if b := s.batch; b != nil {
		s.batch = nil
		s.spare = s.table.put(b)
	}
}

// Refresh updates at most n open records, starting where the last call stopped, so
// that counters include long-lived connections. It reports whether there are more,
// so that the owner continues soon. The call after the last record starts again.
func (s *Shard) Refresh(n int) (more bool) {
	if s.parkedPosition.next != nil {
		return s.refreshParked(n)
	}
	r := s.list.next
	if s.position.next != nil {
		r = s.position.next
		s.position.unlink()
	}
	for ; r != &s.list && n > 0; r = r.next {
		if r.state == recordOpen {
			r.refresh()
			n--
		}
	}
	if r == &s.list {
		return s.refreshParked(n)
	}
	s.position.insertBefore(r)
	return true
}

// Each calls f for each open connection that has a record, in the order of opening. f may
// close that connection.
func (s *Shard) Each(f func(*Record)) {
	for r := s.list.next; r != &s.list; {
		next := r.next
		if r.state == recordOpen {
			f(r)
		}
		r = next
	}
}

// insertBefore inserts the record into the ring before another one.
func (r *Record) insertBefore(at *Record) {
	r.prev, r.next = at.prev, at
	at.prev.next = r
	at.prev = r
}

// unlink removes the record from its ring.
func (r *Record) unlink() {
	r.prev.next, r.next.prev = r.next, r.prev
	r.prev, r.next = nil, nil
}
