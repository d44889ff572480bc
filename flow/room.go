package flow

import (
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
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

// crowd holds the service ports that have flows. At a limit of UDP sessions, the one with most of
// them ends one for a new session, as in the relay.
type crowd []*portService

func (c *crowd) add(s *portService) {
	s.at = len(*c)
	*c = append(*c, s)
}

func (c *crowd) remove(s *portService) {
	last := len(*c) - 1
	moved := (*c)[last]
	(*c)[s.at], moved.at = moved, s.at
	(*c)[last] = nil
	*c = (*c)[:last]
}

// largest returns the service port with most UDP sessions: of the Service whose limit end names,
// or else of the namespace with most, and there of the Service with most. It is nil if none has
// any.
func (c crowd) largest(name service.PortName, end conntrack.End) *portService {
	namespaces, services := make(map[string]int), make(map[service.Name]int)
	for _, s := range c {
		if s.path.protocol == service.UDP && (end == conntrack.EndNone || s.name.Name == name.Name) {
			namespaces[s.name.Name.Namespace] += s.count
			services[s.name.Name] += s.count
		}
	}
	var most *portService
	for _, s := range c {
		if services[s.name.Name] == 0 || s.path.protocol != service.UDP {
			continue
		}
		if most == nil || slices.Compare(
			[]int{namespaces[s.name.Name.Namespace], services[s.name.Name], s.count},
			[]int{namespaces[most.name.Name.Namespace], services[most.name.Name], most.count}) > 0 {
			most = s
		}
	}
	return most
}

// makePlace ends a UDP session to make room for one of a service port, at the limit of its Service
// (conntrack.LimitReached) or of all. Among the oldest sessions it prefers one that was answered
// and is quiet, then one that was answered. It returns false if there is none.
func (w *worker) makePlace(name service.PortName, end conntrack.End, now int64) bool {
	s := w.crowd.largest(name, end)
	if s == nil {
		return false
	}
	var found *flow
	best := 0
	for index, tries := s.last, 0; index != 0 && tries < evictShare && best < 3; tries++ {
		f := w.flows[index]
		if rank := f.evictRank(now); rank > best {
			found, best = f, rank
		}
		index = f.prev
	}
	if found == nil {
		return false // the tuples of those that have ended stay for a moment
	}
	found.evict(now)
	w.giveFreed()
	return true
}

// evictRank orders sessions: the highest loses least when it ends. It is 0 for sessions that have
// ended.
func (f *flow) evictRank(now int64) int {
	switch {
	case f.ended:
		return 0
	case f.isEvictable(now):
		return 3
	case f.state() == bpf.KernelStateOPEN:
		return 2
	}
	return 1
}

// MakeRoom ends a UDP session for one of the relay, as makePlace does. It does not wait, and is
// safe for concurrent use.
func (s *Server) MakeRoom(name service.PortName, end conntrack.End) {
	if s.Started() {
		s.options.Loop.Post(func() { s.worker.makePlace(name, end, s.worker.loop.Now()) })
	}
}
