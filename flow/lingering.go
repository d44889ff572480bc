package flow

import (
	"time"

	"github.com/sluice-proxy/sluice/flow/bpf"
)

// lingering holds the flows that have ended and whose tuples stay for a while, for packets that
// are sent again. The process keeps nothing else of them: at 30,000 connections a second these are
// most flows.
type lingering struct {
	places []place // by index
	queues [2]lingerers
	direct lingerers // clients' own connections (direct.go)
}

// lingerers are flows that linger equally long, in the order in which they ended.
type lingerers struct {
	wait        time.Duration
	first, last uint32 // indices; 0: none
}

// place is a flow's place in its queue.
type place struct {
	due  int64 // not before
	next uint32
}

func newLingering(flows int) lingering {
	return lingering{places: make([]place, flows), queues: [2]lingerers{{wait: lingerDone}, {wait: linger}}, direct: lingerers{wait: directInterval}}
}

// queue returns the queue for flows with such an end.
func (l *lingering) queue(seen bpf.KernelSeen) *lingerers {
	if seen&(bpf.KernelSeenCLIENT_RST|bpf.KernelSeenENDPOINT_RST) != 0 {
		return &l.queues[1]
	}
	return &l.queues[0]
}

// put adds a flow that ended at the given time.
func (l *lingering) put(q *lingerers, index uint32, at int64) {
	l.places[index] = place{due: at + int64(q.wait)}
	if q.last != 0 {
		l.places[q.last].next = index
	} else {
		q.first = index
	}
	q.last = index
}

// take removes the first flow that is due from a queue and returns it, or returns 0.
func (l *lingering) take(q *lingerers, now int64) uint32 {
	index := q.first
	if index == 0 || l.places[index].due > now {
		return 0
	}
	if q.first = l.places[index].next; q.first == 0 {
		q.last = 0
	}
	return index
}

// linger keeps the tuples of an ended flow, and releases everything else of it.
func (f *flow) linger(at int64) {
	l := &f.worker.ended
	l.put(l.queue(f.seen()), f.index, at)
	f.leave()
}

// expire frees the flows that have lingered long enough, counted from their last packet too.
func (w *worker) expire(now int64) {
	for i := range w.ended.queues {
		q := &w.ended.queues[i]
		for index := w.ended.take(q, now); index != 0; index = w.ended.take(q, now) {
			if last := w.loopTime(w.kernel.Flows[index].Last()); last+int64(q.wait) > now {
				w.ended.put(q, index, last)
				continue
			}
			w.free(index)
		}
	}
	w.expireDirect(now)
}
