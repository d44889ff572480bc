package conntrack

import (
	"sync"
	"sync/atomic"
)

// batchSize is the number of records that are handed over together.
const batchSize = 128

// batch holds records that have ended.
type batch struct {
	records []Record // of capacity batchSize
}

// queue carries batches from the event loops to the sink's goroutine, and empty
// ones back.
type queue struct {
	sink Sink
	full chan *batch
	free chan *batch

	stopping chan struct{}
	stopOnce sync.Once
	done     chan struct{}

	queued   atomic.Uint64
	dropped  atomic.Uint64
	reported uint64 // of dropped; deliver's
}

func newQueue(sink Sink, depth int) *queue {
	return &queue{
		sink:     sink,
		full:     make(chan *batch, depth),
		free:     make(chan *batch, depth),
		stopping: make(chan struct{}),
		done:     make(chan struct{}),
	}
}

// get gives an empty batch.
func (q *queue) get() *batch {
	select {
	case b := <-q.free:
		return b
	default:
		return &batch{records: make([]Record, 0, batchSize)}
	}
}

// put hands a batch over. It never blocks: if there is no room the records are
// dropped and counted. The batch is not the caller's any more.
func (q *queue) put(b *batch) {
	n := uint64(len(b.records))
	select {
	case <-q.stopping:
	default:
		select {
		case q.full <- b:
			q.queued.Add(n)
			return
		default:
		}
	}
	q.dropped.Add(n)
	q.recycle(b)
}

func (q *queue) recycle(b *batch) {
	clear(b.records) // let go of what the records point to
	b.records = b.records[:0]
	select {
	case q.free <- b:
	default:
	}
}

func (q *queue) stop() { q.stopOnce.Do(func() { close(q.stopping) }) }

// deliver hands batches to the sink until the queue is stopped and empty.
func (q *queue) deliver() {
	defer close(q.done)
	for {
		select {
		case b := <-q.full:
			q.write(b)
		case <-q.stopping:
			for {
				select {
				case b := <-q.full:
					q.write(b)
				default:
					q.sink.Flush()
					return
				}
			}
		}
	}
}

func (q *queue) write(b *batch) {
	q.sink.Write(b.records)
	q.recycle(b)
	if r, ok := q.sink.(LossReporter); ok {
		if dropped := q.dropped.Load(); dropped != q.reported {
			r.RecordsLost(dropped - q.reported)
			q.reported = dropped
		}
	}
	if len(q.full) == 0 {
		q.sink.Flush()
	}
}
