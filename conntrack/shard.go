package conntrack

// Shard is the part of a Table that belongs to one event loop. All methods are
// called on that loop; there are no locks.
type Shard struct {
	table  *Table
	nextID uint64
	count  int
	list   Record // a ring of open records and markers, in the order of opening
	place  Record // a marker: how far Refresh came
	batch  *batch // records that have ended, nil if there are none
	wake   func()
	_      [64]byte
}

// OnPending sets a function that is called when a record has ended and none was
// waiting to be flushed. The owner has Flush called some milliseconds later, by
// a timer of its loop: then a burst of records makes one batch, and a single one
// is not late. Without it records wait until their batch is full.
func (s *Shard) OnPending(f func()) { s.wake = f }

// Open enters a connection into the table. The record's Start, Client, VIP,
// Port, Kind, Protocol and Counters are set; Open sets ID and Wall. The record
// must stay where it is until Close.
func (s *Shard) Open(r *Record) {
	if r.state != recordNew {
		s.table.misuse.Add(1)
		return
	}
	r.ID = s.nextID
	s.nextID += uint64(len(s.table.shards))
	r.Wall = s.table.now().UnixNano()
	r.state = recordOpen
	r.insertBefore(&s.list)
	s.count++
	if r.Counters != nil {
		r.Counters.recordOpened()
	}
}

// Close takes a connection out of the table and hands a copy of its record on.
// End, Duration, FirstByte and the bytes are set. A second Close of a record, or
// one without Open, does nothing but count as a misuse. The memory of Failed is
// not the caller's any more; before it is used for another connection the record
// is set to Record{}.
func (s *Shard) Close(r *Record) {
	if r.state != recordOpen {
		s.table.misuse.Add(1)
		return
	}
	r.state = recordClosed
	r.Owner = nil
	r.unlink()
	s.count--
	if r.Counters != nil {
		r.Counters.recordClosed(r)
	}
	q := s.table.queue
	if q == nil || r.Quiet {
		return
	}
	if s.batch == nil {
		s.batch = q.get()
		if s.wake != nil {
			s.wake()
		}
	}
	s.batch.records = append(s.batch.records, *r)
	if len(s.batch.records) == batchSize {
		s.Flush()
	}
}

// Flush hands on the records that have ended. It costs nothing if there are
// none.
func (s *Shard) Flush() {
	if b := s.batch; b != nil {
		s.batch = nil
		s.table.queue.put(b)
	}
}

// Len returns the number of open connections.
func (s *Shard) Len() int { return s.count }

// Refresh brings open records up to date, so that counters show the bytes of
// connections that live long: at most n of them, from where the last call
// stopped. It tells whether there are more, so that the owner goes on soon; the
// call after the last one begins anew.
func (s *Shard) Refresh(n int) (more bool) {
	r := s.list.next
	if s.place.next != nil {
		r = s.place.next
		s.place.unlink()
	}
	for ; r != &s.list && n > 0; r = r.next {
		if r.state == recordOpen {
			r.refresh()
			n--
		}
	}
	if r == &s.list {
		return false
	}
	s.place.insertBefore(r)
	return true
}

// Each calls f for each open connection, in the order of their opening. f may
// close the connection that it is given.
func (s *Shard) Each(f func(*Record)) {
	for r := s.list.next; r != &s.list; {
		next := r.next
		if r.state == recordOpen {
			f(r)
		}
		r = next
	}
}

// insertBefore links the record into the ring before another one.
func (r *Record) insertBefore(at *Record) {
	r.prev, r.next = at.prev, at
	at.prev.next = r
	at.prev = r
}

// unlink takes the record out of its ring.
func (r *Record) unlink() {
	r.prev.next, r.next.prev = r.next, r.prev
	r.prev, r.next = nil, nil
}
