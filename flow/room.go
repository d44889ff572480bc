package flow

import (
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
)

// Where UDP sessions lack room or ports, new ones replace old ones: those that were answered
// and have been quiet for a moment.
const (
	// evictable is how long a session must have been quiet. A client that asks again is
	// likely to do so sooner.
	evictable = 100 * time.Millisecond
	// evictShare is how many sessions are examined for one session without room. The table in BPF
	// then decides about as many new ones without another upcall.
	evictShare = 64
)

// isEvictable reports whether a new session may replace this one.
func (f *flow) isEvictable(now int64) bool {
	return f.isUDP() && !f.ended && f.state() == bpf.KernelStateOPEN && now-f.last() >= int64(evictable)
}

// evict ends a session to make room. The client's next datagram begins another one.
func (f *flow) evict(now int64) {
	f.end(conntrack.Evicted, now)
	f.drop()
}

// makeRoom evicts some of the oldest sessions of a service port. Those that are in use
// become its newest.
func (s *portService) makeRoom(w *worker, now int64) {
	for range min(evictShare, s.count) {
		f := w.flows[s.last]
		if f.isEvictable(now) {
			f.evict(now)
			continue
		}
		s.remove(f)
		s.add(f)
	}
	w.giveFreed() // the flows' indices can be used again
}

// clearWay evicts the sessions that have the ports which a flow is about to try, if they are quiet
// or if their client crowds this one out. It runs while packets are being sent, so it keeps
// sessions whose packets may be among these.
func (f *flow) clearWay(now int64) {
	w := f.worker
	var tuples [bpf.MostTuples]bpf.KernelTuple
	for i := range w.kernel.Index.EndpointTuples(f.index, tuples[:0]) {
		o := w.flows[w.kernel.Index.Find(&tuples[i]).Flow()]
		if o == nil || o == f || o.handshake != nil || !o.isUDP() || o.ended {
			continue
		}
		if o.isEvictable(now) || f.isCrowdedOut(o.shared().Client) {
			o.evict(now)
			return
		}
	}
}

// isCrowdedOut reports whether some client has more of the node's ports towards the flow's
// endpoint than the flow's client, by a quarter of all ports, estimated from a sample of
// portTries.
func (f *flow) isCrowdedOut(by bpf.KernelAddress) bool {
	w, k := f.worker, f.shared()
	if k.Options&bpf.KernelOptionOPTION_MASQUERADE == 0 || k.Client == by {
		return false
	}
	own, other := 0, 0
	t := w.kernel.Index.Tuple(bpf.ReferenceTo(f.index, bpf.KernelRoleUNMASQUERADE))
	for range portTries {
		t.Dport = bpf.Wire(w.ports.random())
		o := w.kernel.Index.Find(&t)
		if o == 0 {
			continue
		}
		switch w.kernel.Flows[o.Flow()].Client {
		case k.Client:
			own++
		case by:
			other++
		}
	}
	return other-own > portTries/4
}
