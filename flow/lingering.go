package flow

import (
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// linger is how long the tuples of a reset connection stay: the receiver may not have believed
	// the RST, so that the connection goes on.
	linger = 2 * time.Second
	// lingerDone is the same where both sides have acknowledged the other side's end. The last ACK
	// may be lost behind this node: then the other side repeats its FIN, in Linux 0.2 seconds and
	// a round trip later.
	lingerDone = 300 * time.Millisecond
	// expireBatch is how many flows are freed together.
	expireBatch = 16
)

// lingering holds the flows that have ended and whose tuples stay for a while, for packets that
// are sent again. The process keeps nothing else of them: at 30,000 connections a second these are
// most flows.
type lingering struct {
	entries []entry // by index
	queues  [2]lingerers
	direct  lingerers // clients' own connections
}

// lingerers is a queue of ended flows with one lingering time, the oldest first.
type lingerers struct {
	wait        time.Duration
	first, last uint32 // indices; 0: none
}

// entry is a flow in its queue.
type entry struct {
	due  int64 // not before
	next uint32
}

func newLingering(flows int) lingering {
	return lingering{entries: make([]entry, flows), queues: [2]lingerers{{wait: lingerDone}, {wait: linger}}, direct: lingerers{wait: directInterval}}
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
	l.entries[index] = entry{due: at + int64(q.wait)}
	if q.last != 0 {
		l.entries[q.last].next = index
	} else {
		q.first = index
	}
	q.last = index
}

// take removes the first flow that is due from a queue and returns it, or returns 0.
func (l *lingering) take(q *lingerers, now int64) uint32 {
	index := q.first
	if index == 0 || l.entries[index].due > now {
		return 0
	}
	if q.first = l.entries[index].next; q.first == 0 {
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
		for q := &w.ended.queues[i]; w.expireSome(q, now); {
		}
	}
	w.expireDirect(now)
}

// expireSome is expire for some flows of a queue. It reports whether there may be more.
func (w *worker) expireSome(q *lingerers, now int64) bool {
	var room [expireBatch]uint32
	due := room[:0]
	for len(due) < len(room) {
		index := w.ended.take(q, now)
		if index == 0 {
			break
		}
		if last := w.loopTime(w.kernel.Flows[index].Last()); last+int64(q.wait) > now {
			w.ended.put(q, index, last)
			continue
		}
		due = append(due, index)
	}
	w.free(due...)
	return len(due) == len(room)
}

// Clients' own connections to endpoints, from ports that they also use towards Services, are flows
// that BPF begins and follows (bpf/direct.h). They have no record; the process only frees their
// indices.

const (
	// directInterval is how often the process checks which of them are over.
	directInterval = time.Second
	// directHandshake is longer than a client keeps repeating a SYN.
	directHandshake = 2 * time.Minute
)

// followDirect schedules the freeing of a client's own connection.
func (w *worker) followDirect(index uint32) {
	k := &w.kernel.Flows[index]
	if w.direct[index] || w.flows[index] != nil || k.Options&bpf.KernelOptionOPTION_DIRECT == 0 || directState(k) == bpf.KernelStateFREE {
		return
	}
	w.direct[index] = true
	w.ended.put(&w.ended.direct, index, w.loop.Now())
}

func directState(k *bpf.KernelFlow) bpf.KernelState {
	return bpf.KernelState(atomic.LoadUint32((*uint32)(&k.State)))
}

// expireDirect frees those that are over.
func (w *worker) expireDirect(now int64) {
	q := &w.ended.direct
	for index := w.ended.take(q, now); index != 0; index = w.ended.take(q, now) {
		k := &w.kernel.Flows[index]
		state := directState(k)
		// BPF may be beginning its client's next connection at this moment.
		if w.loopTime(k.Last())+int64(w.directLimit(k, state)) > now || !atomic.CompareAndSwapUint32((*uint32)(&k.State), uint32(state), uint32(bpf.KernelStateFREE)) {
			w.ended.put(q, index, w.loop.Now())
			continue
		}
		delete(w.direct, index)
		w.kernel.Index.EraseAll(index)
		w.freed = append(w.freed, index)
	}
}

// directLimit is how long a client's own connection is kept without a packet.
func (w *worker) directLimit(k *bpf.KernelFlow, state bpf.KernelState) time.Duration {
	switch {
	case bpf.ProtocolOf(k.Protocol) == service.UDP:
		return max(w.server.options.UDPTimeout, w.server.options.UDPStreamTimeout)
	case state == bpf.KernelStateOPEN && atomic.LoadUint32((*uint32)(&k.Seen))&uint32(bpf.KernelSeenCONFIRMED) == 0:
		return directHandshake // the client may never complete it
	case state == bpf.KernelStateOPEN && bpf.ProtocolOf(k.Protocol) == service.SCTP:
		return abandonedAssociation
	case state == bpf.KernelStateOPEN:
		return abandoned
	case state == bpf.KernelStateASKING:
		return directHandshake
	}
	return linger
}
