package flow

import (
	"sync/atomic"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// The table in BPF has decided about these flows. The process learns of them some milliseconds
// later, then follows them like all others, and tries the next endpoint if theirs does not answer.
// Most are open by then, or over.

// begun records a flow that the table has decided about.
func (w *worker) begun(e *bpf.KernelEvent, data []byte) {
	k := &w.kernel.Flows[e.Flow]
	f := w.flows[e.Flow]
	if f == nil && k.Generation == e.Generation {
		f = w.discover(e.Flow)
	}
	if f == nil || f.generation != e.Generation || f.ended || f.handshake != nil && len(f.handshake.data) > 0 {
		return
	}
	if s := f.state(); s != bpf.KernelStateASKING && s != bpf.KernelStateMOVING {
		return
	}
	if len(data) == 0 {
		return // a datagram in fragments, with GSO, or a long one: it went out, and is not sent again
	}
	p, ok := parseFrame(data, int(e.Header))
	if !ok || !p.complete() {
		w.server.stats.damaged.Add(1)
		return // without a packet that could be sent again
	}
	h := f.handshake
	if h == nil {
		h = w.newHandshake()
		f.handshake = h
	}
	h.keepFirst(&p)
	if f.seen()&bpf.KernelSeenFIRST_WANTED != 0 {
		f.goOn()
	}
}

// discover begins to follow a flow that the table has decided about. It returns nil if
// there is none, or if its protocol's flows are not adopted yet.
func (w *worker) discover(index uint32) *flow {
	k := &w.kernel.Flows[index]
	state := bpf.KernelState(atomic.LoadUint32((*uint32)(&k.State)))
	path := w.server.paths[bpf.ProtocolOf(k.Protocol)]
	if state == bpf.KernelStateFREE || !path.ready || atomic.LoadUint32((*uint32)(&k.Seen))&uint32(bpf.KernelSeenRECORDED) != 0 {
		return nil
	}
	if k.Options&bpf.KernelOptionOPTION_DIRECT != 0 {
		w.followDirect(index)
		return nil
	}
	f := w.newFlow(index)
	st := path.state.Load()
	v := f.describe(path, st)
	r := f.record
	atomic.OrUint32((*uint32)(&k.Seen), uint32(bpf.KernelSeenKNOWN))
	w.flows[index] = f
	f.service.add(f)
	w.server.stats.open.Add(1)
	w.shard.Open(r)
	f.addPlace()
	endpoint := bpf.PortOf(k.Endpoint, k.EndpointPort)
	found, serves := endpointOf(v.Port, endpoint)
	if found == nil {
		found = &service.Endpoint{Addr: endpoint}
	}
	r.BeginAttempt(found, r.Start)
	if b := f.service.balancer; b != nil {
		r.Affinity = b.Kept(f.client(), endpoint, w.loop.Now())
	}
	if f.isUDP() {
		if b := f.service.balancer; b != nil && serves && r.Affinity != balancer.AffinityNone {
			b.Connected(nil, endpoint, f.client(), r.Start) // pinned when sent, as by dial
		}
		if !serves { // A8.2: it began while the configuration changed
			f.retire(conntrack.EndpointGone, poll.Nanotime())
			return f
		}
		r.Announce(r.Start)
	}
	f.catchUp(&v)
	return f
}

// catchUp handles what became due between the flow's beginning and now.
func (f *flow) catchUp(v *policy.Verdict) {
	w, r := f.worker, f.record
	switch f.state() {
	case bpf.KernelStateCLOSED, bpf.KernelStateVACATED:
		f.closed(w.loopTime(f.shared().Closed), f.seen())
	case bpf.KernelStateOPEN:
		if f.isUDP() {
			w.loop.Schedule(&f.timer, r.Start+int64(w.waits.resend), f)
			return
		}
		f.opened(w.loopTime(f.shared().Answered))
	default:
		h := w.newHandshake()
		f.handshake = h
		due := r.Start + int64(w.waits.resend)
		if b := f.service.balancer; b != nil {
			patience := b.Chosen(&h.plan, r.Endpoint.Addr, r.Affinity, len(v.Candidates), r.Start)
			if !f.isUDP() {
				due = r.Start + int64(patience)
			}
		}
		w.loop.Schedule(&f.timer, due, f)
	}
}

// describe sets what a flow's record says about it, from shared memory, and finds its
// service port.
func (f *flow) describe(path *Path, st *state) policy.Verdict {
	k, r := f.shared(), f.record
	f.protocol = path.protocol
	started := f.worker.loopTime(k.Started)
	*r = conntrack.Record{
		Start:    started,
		Wall:     f.worker.unixTime(started),
		Client:   bpf.PortOf(k.Client, k.ClientPort),
		VIP:      bpf.PortOf(k.Vip, k.VipPort),
		Protocol: path.protocol,
		Path:     conntrack.Kernel,
		Owner:    f,
	}
	v := st.table.Resolve(path.protocol, r.Client.Addr(), r.VIP)
	f.service = nil
	if v.Port != nil {
		f.service, r.Port, r.Kind = st.services[v.Port.ID], v.Port, v.Kind
	}
	if f.service == nil {
		f.service = path.orphans
	}
	r.Counters = f.service.counters
	r.Source = policy.SourceClient
	if k.Options&bpf.KernelOptionOPTION_MASQUERADE != 0 || f.isOfNode() && k.Node != k.Client {
		r.Source = policy.SourceNode
	}
	f.noteSource()
	f.unchallenge() // the challenge may have reached a process that ended
	return v
}

// discoverAll finds the flows whose notices BPF could not send.
func (w *worker) discoverAll() {
	untold := atomic.LoadUint64(&w.kernel.Control.Untold)
	if untold == w.untold {
		return
	}
	w.untold = untold
	for i := 1; i < len(w.flows); i++ {
		if w.flows[i] == nil && w.kernel.Flows[i].State != bpf.KernelStateFREE {
			w.discover(uint32(i))
		}
	}
}

// distrust makes the process decide about a service port's new flows for a while: it knows which
// endpoints have failed, and when to try them again.
func (s *portService) distrust(w *worker, now int64) {
	w.server.askUntil(s.load, w.kernelTime(now+int64(balancer.Distrust)))
}

// askUntil makes the process decide about a service port's new flows until a time of the kernel's
// clock; an earlier request for longer stays in force.
func (s *Server) askUntil(load uint32, until uint64) {
	at := &s.kernel.Loads[load].AskUntil
	for was := atomic.LoadUint64(at); was < until && !atomic.CompareAndSwapUint64(at, was, until); was = atomic.LoadUint64(at) {
	}
}

// newFlow returns an object for an index.
func (w *worker) newFlow(index uint32) *flow {
	var f *flow
	if n := len(w.idle); n > 0 {
		f = w.idle[n-1]
		w.idle = w.idle[:n-1]
		*f = flow{record: f.record}
	} else {
		f = new(flow)
	}
	if f.record == nil {
		f.record = w.newRecord()
	}
	f.worker, f.index, f.generation = w, index, w.kernel.Flows[index].Generation
	return f
}

// awaitFirst waits for the client to repeat its SYN, because the previous process took its copy
// along. BPF hands the repeated SYN up, and it goes to the next endpoint.
func (f *flow) awaitFirst(now int64) {
	atomic.OrUint32((*uint32)(&f.shared().Seen), uint32(bpf.KernelSeenFIRST_WANTED))
	f.worker.loop.Schedule(&f.timer, now+int64(confirmation), f)
}

// goOn continues the attempts with the SYN that awaitFirst waited for.
func (f *flow) goOn() {
	atomic.AndUint32((*uint32)(&f.shared().Seen), ^uint32(bpf.KernelSeenFIRST_WANTED))
	if !f.handshake.moved {
		f.retry()
		return
	}
	f.handshake.moved = false
	f.setState(bpf.KernelStateASKING)
	f.putAll(true)
}

// lost ends a flow that cannot move to another endpoint, because its first packet is not
// available: the client's next packet begins a new flow.
func (f *flow) lost(now int64) {
	if f.protocol == service.TCP && f.handshake != nil && f.seen()&bpf.KernelSeenFIRST_WANTED == 0 {
		f.awaitFirst(now)
		return
	}
	f.end(conntrack.ConnectFailed, now)
	f.drop()
}
