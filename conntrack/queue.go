package conntrack

import (
	"sync"
	"sync/atomic"
)

const (
	// batchSize is the number of records in a full batch.
	batchSize = 512
	// maxFree is how many empty batches the queue keeps for the event loops.
	maxFree = 8
)

// batch holds records of ended connections.
type batch struct {
	records []Record // of capacity batchSize
}

// queue passes batches of records from the event loops to the sink's goroutine, and
// empty batches back. It is bounded by records, not by batches: it merges small
// batches with waiting ones.
type queue struct {
	sink  Sink
	limit int // maximum of waiting

	mu      sync.Mutex // guards the fields below; held at most for copying a batch
	full    []*batch   // oldest first; all but the last have batchSize records
	free    []*batch
	waiting int // records in full
	stopped bool

	wake chan struct{} // not empty while there is work
	done chan struct{}

	queued   atomic.Uint64
	dropped  atomic.Uint64
	reported uint64 // how many of dropped were reported; used only by deliver
}

func newQueue(sink Sink, records int) *queue {
	return &queue{sink: sink, limit: records, wake: make(chan struct{}, 1), done: make(chan struct{})}
}

// get returns an empty batch.
func (q *queue) get() *batch {
	q.mu.Lock()
	defer q.mu.Unlock()
	if last := len(q.free) - 1; last >= 0 {
		b := q.free[last]
		q.free = q.free[:last]
		return b
	}
	return &batch{records: make([]Record, 0, batchSize)}
}

// put adds a batch and takes ownership of it. It never waits for the sink: it drops
// and counts records beyond the bound.
func (q *queue) put(b *batch) {
	n := len(b.records)
	q.mu.Lock()
	room := 0
	if !q.stopped {
		room = min(n, q.limit-q.waiting)
	}
	clear(b.records[room:]) // release the objects that the records point to
	b.records = b.records[:room]
	q.waiting += room
	q.appendLocked(b)
	q.mu.Unlock()
	q.queued.Add(uint64(room))
	q.dropped.Add(uint64(n - room))
	q.awake()
}

// appendLocked appends a batch's records to the waiting ones.
func (q *queue) appendLocked(b *batch) {
	if last := len(q.full) - 1; last >= 0 {
		tail := q.full[last]
		n := min(batchSize-len(tail.records), len(b.records))
		tail.records = append(tail.records, b.records[:n]...)
		left := copy(b.records, b.records[n:])
		clear(b.records[left:])
		b.records = b.records[:left]
	}
	if len(b.records) > 0 {
		q.full = append(q.full, b)
	} else {
		q.freeLocked(b)
	}
}

func (q *queue) freeLocked(b *batch) {
	if len(q.free) < maxFree {
		q.free = append(q.free, b)
	}
}

// take returns the oldest batch, or nil. last means that no other batch waits;
// stopped, that none will follow.
func (q *queue) take() (b *batch, last, stopped bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.full) == 0 {
		return nil, true, q.stopped
	}
	b = q.full[0]
	q.full[0] = nil
	q.full = q.full[1:]
	q.waiting -= len(b.records)
	return b, len(q.full) == 0, q.stopped
}

// length returns the number of waiting records.
func (q *queue) length() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.waiting
}

func (q *queue) stop() {
	q.mu.Lock()
	q.stopped = true
	q.mu.Unlock()
	q.awake()
}

func (q *queue) awake() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// deliver passes batches to the sink until the queue is stopped and empty. It runs
// on its own goroutine.
func (q *queue) deliver() {
	defer close(q.done)
	for range q.wake {
		for {
			b, last, stopped := q.take()
			if b != nil {
				q.write(b)
			}
			if last && (b != nil || stopped) {
				q.sink.Flush()
			}
			if b == nil && stopped {
				return
			}
			if b == nil {
				break
			}
		}
	}
}

func (q *queue) write(b *batch) {
	q.sink.Write(b.records)
	clear(b.records)
	b.records = b.records[:0]
	q.mu.Lock()
	q.freeLocked(b)
	q.mu.Unlock()
	if r, ok := q.sink.(LossReporter); ok {
		if dropped := q.dropped.Load(); dropped != q.reported {
			r.RecordsLost(dropped - q.reported)
			q.reported = dropped
		}
	}
}
