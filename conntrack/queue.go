package conntrack

import (
	"sync"
	"sync/atomic"
)

const (
	// batchSize is the number of records that are handed over together.
	batchSize = 128
	// maxFree is how many empty batches are kept for the event loops.
	maxFree = 32
)

// batch holds records that have ended.
type batch struct {
	records []Record // of capacity batchSize
}

// queue carries records from the event loops to the sink's goroutine in batches,
// and empty batches back. Its bound counts records: what a loop hands over is
// joined with what waits, so that loops with little to say do not fill it.
type queue struct {
	sink Sink
	most int // records that may wait

	mu      sync.Mutex // guards what follows; held for a copy of a batch at most
	full    []*batch   // the oldest first; all but the last have batchSize records
	free    []*batch
	waiting int // records in full
	stopped bool

	wake chan struct{} // has something in it while there is work
	done chan struct{}

	queued   atomic.Uint64
	dropped  atomic.Uint64
	reported uint64 // of dropped; deliver's
}

func newQueue(sink Sink, records int) *queue {
	return &queue{sink: sink, most: records, wake: make(chan struct{}, 1), done: make(chan struct{})}
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

// put hands a batch over. It never waits for the sink: records for which there is
// no room are dropped and counted. The batch is not the caller's any more.
func (q *queue) put(b *batch) {
	n := len(b.records)
	q.mu.Lock()
	room := 0
	if !q.stopped {
		room = min(n, q.most-q.waiting)
	}
	clear(b.records[room:]) // let go of what the records point to
	b.records = b.records[:room]
	q.waiting += room
	q.enterLocked(b)
	q.mu.Unlock()
	q.queued.Add(uint64(room))
	q.dropped.Add(uint64(n - room))
	q.awake()
}

// enterLocked appends a batch's records to those that wait.
func (q *queue) enterLocked(b *batch) {
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

// take returns the oldest batch, nil if there is none. last says that none waits
// behind it, stopped that none will come.
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

// left returns the number of records that wait.
func (q *queue) left() int {
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

// deliver hands batches to the sink until the queue is stopped and empty.
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
