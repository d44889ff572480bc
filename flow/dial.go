package flow

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// lateAnswers is how long the way back of an endpoint that was given up is kept, so
	// that its SYN-ACK can be answered with an RST.
	lateAnswers = 4 * time.Second
	// staleShare: abandoned endpoints leave 1/staleShare of all indices free.
	staleShare = 4
	// resendable is how long the first datagram is kept, for another endpoint.
	resendable = time.Second
	// ownTroublePause is how long an attempt waits if this node made the last one fail.
	ownTroublePause = 25 * time.Millisecond
	// challengeInterval is the shortest time between two challenges to a client (RFC 5961, 7). It is
	// shorter than the interval at which a client repeats its SYN.
	challengeInterval = 100 * time.Millisecond
	// occupiedTime is how long flows avoid the port of another connection at their endpoint, after one of them
	// has met it: is_occupied in bpf/inject.h. TIME-WAIT lasts as long.
	occupiedTime = time.Minute
)

// dial chooses an endpoint and sends it the first packet. If there is none, the flow ends.
func (f *flow) dial(st *state, v *policy.Verdict) {
	w, h := f.worker, f.handshake
	now := poll.Nanotime()
	i, patience, ok := f.choose(v, now)
	switch {
	case i == balancer.Full:
		if f.service.places != nil {
			f.service.places.Full(&v.Port.Limits)
		}
		f.failBy(conntrack.LimitReached)
		return
	case !ok, i == balancer.Pause && f.isUDP(): // datagrams do not wait for an endpoint to recover
		f.fail()
		return
	case i == balancer.Pause:
		f.setState(bpf.KernelStateMOVING)
		w.loop.Schedule(&f.timer, now+int64(patience), f)
		return
	}
	ep := &v.Candidates[i]
	f.shared().Attempts = uint8(min(f.record.Attempts, math.MaxUint8))
	if !f.aim(st, v, ep) {
		f.record.AttemptFailed(conntrack.DialNoAddress, now)
		h.plan.Excuse()
		if f.isUDP() {
			f.fail()
			return
		}
		f.setState(bpf.KernelStateMOVING)
		w.loop.Schedule(&f.timer, now+int64(ownTroublePause), f)
		return
	}
	f.setState(bpf.KernelStateASKING)
	f.putAll(f.record.Attempts > 1)
	if !f.isUDP() {
		w.loop.Schedule(&f.timer, now+int64(patience), f)
		return
	}
	// Pin when sending: many endpoints never reply.
	f.service.balancer.Connected(&h.plan, ep.Addr, f.client(), now)
	f.record.Affinity = h.plan.Affinity()
	f.record.Announce(now)
	w.loop.Schedule(&f.timer, now+int64(w.waits.resend), f)
}

// choose is balancer.Next for the flow, with the record's attempt begun.
func (f *flow) choose(v *policy.Verdict, now int64) (index int, patience time.Duration, ok bool) {
	b, plan := f.service.balancer, &f.handshake.plan
	for {
		i, patience, ok := b.Next(plan, v.Candidates, balancer.Conn{Client: f.record.Client, Destination: f.record.VIP}, now)
		if !ok || i < 0 || f.record.BeginAttemptBelow(b.MaxOpen(), &v.Candidates[i], now) {
			return i, patience, ok
		}
		plan.Excuse() // the relay took the place
	}
}

// aim sets the endpoint and whose address it sees. It returns false if the node has no
// address for that.
func (f *flow) aim(st *state, v *policy.Verdict, ep *service.Endpoint) bool {
	w, k := f.worker, f.shared()
	client, addr := f.client(), ep.Addr.Addr()
	k.Endpoint, k.EndpointPort = bpf.AddressOf(addr), bpf.Wire(ep.Addr.Port())
	k.MiddlePort = k.ClientPort
	k.Options &^= bpf.KernelOptionOPTION_MASQUERADE | bpf.KernelOptionOPTION_MOVED
	if w.ports.reserved(f.record.Client.Port()) {
		k.MiddlePort = bpf.Wire(w.ports.next())
		k.Options |= bpf.KernelOptionOPTION_MOVED
	}
	f.record.Source = v.SourceFor(client, addr)
	if f.isOfNode() {
		return f.aimFromNode(st, addr)
	}
	// Replies that do not pass this node's IP layer would be unknown to its
	// connection tracking.
	if f.record.Source == policy.SourceClient && w.server.options.SameLink(client, addr) {
		f.record.Source = policy.SourceNode
	}
	if st.host.Has(addr) {
		f.record.Source = policy.SourceClient // nothing egresses, so that nothing needs to be hidden
	}
	if f.record.Source == policy.SourceNode {
		node, ok := w.sources.to(addr)
		if !ok {
			return false
		}
		k.Node, k.NodePort = bpf.AddressOf(node), bpf.Wire(f.nodePort())
		k.Options |= bpf.KernelOptionOPTION_MASQUERADE
	}
	f.noteSource()
	return true
}

// aimFromNode sets the address and the port by which a client on this node itself reaches the endpoint.
func (f *flow) aimFromNode(st *state, endpoint netip.Addr) bool {
	w, k, node := f.worker, f.shared(), f.client()
	if f.record.Source != policy.SourceClient || !st.host.Has(node) || node.IsLoopback() || w.server.node.Load().masquerade.Load() {
		var ok bool
		if node, ok = w.sources.to(endpoint); !ok {
			return false
		}
		f.record.Source = policy.SourceNode
	}
	k.Node, k.NodePort = bpf.AddressOf(node), bpf.Wire(f.nodePort())
	f.noteSource()
	return true
}

// opened records that the endpoint has answered the SYN.
func (f *flow) opened(at int64) {
	w, h := f.worker, f.handshake
	if f.record == nil || f.record.Connected || f.isUDP() {
		return
	}
	if h != nil {
		f.record.Affinity = h.plan.Affinity()
	}
	if b := f.service.balancer; b != nil {
		b.Connected(nil, f.record.Endpoint.Addr, f.client(), at)
	}
	f.record.AttemptSucceeded(max(at, f.record.Start))
	if h == nil || len(h.stale) == 0 {
		f.endHandshake()
		w.loop.Schedule(&f.timer, at+int64(settling), f)
		return
	}
	w.forget(f, h)
	w.loop.Schedule(&f.timer, at+int64(lateAnswers), f)
}

// endHandshake frees what only the handshake needs.
func (f *flow) endHandshake() {
	if h := f.handshake; h != nil {
		f.handshake = nil
		f.worker.freeHandshake(h, f)
	}
}

// refused handles an RST, or an ICMP error, in answer to the first packet. An endpoint that
// refuses each of several datagrams is given up once.
func (f *flow) refused(e *bpf.KernelEvent, now int64) {
	if e.Attempt != uint32(f.shared().Attempts) {
		return
	}
	if f.handshake == nil && f.isUDP() && f.state() == bpf.KernelStateASKING && e.Reason == bpf.KernelReasonREASON_PORT {
		f.gone(now) // it received datagrams for a while
		return
	}
	if f.isUDP() {
		f.worker.injector.flush() // what is queued is among what is sent again
	}
	if f.handshake == nil || !f.stopAsking() {
		return
	}
	why := conntrack.DialRefused
	if e.Reason == bpf.KernelReasonREASON_HOST {
		why = conntrack.DialUnreachable
	}
	f.abandon(why, false, now)
}

// clockError is how much the kernel's clock and the loop's may differ, in ns.
const clockError = int64(time.Millisecond)

// silent handles an attempt that got no answer in time. The next one is a kernel flow too,
// even if no endpoint ever answers: a network policy may drop what the node forwards, and
// would not see the relay's own connections.
func (f *flow) silent(now int64) {
	if f.stopAsking() {
		why, to := conntrack.DialTimeout, f.record.Endpoint.Addr
		switch {
		case f.worker.neighbours.Unreachable(to.Addr()):
			why = conntrack.DialUnreachable
		case f.record.Protocol == service.TCP && f.worker.server.options.Drops.Dropped(to, sys.Monotonic()-f.record.Attempting(poll.Nanotime())-clockError):
			why = conntrack.DialDropped
		}
		f.abandon(why, true, now)
	}
}

// abandon gives an endpoint up and tries the next one.
func (f *flow) abandon(why conntrack.DialError, late bool, now int64) {
	w, h := f.worker, f.handshake
	f.record.AttemptFailed(why, now)
	if b := f.service.balancer; b != nil {
		b.Failed(&h.plan, f.record.Endpoint.Addr, f.client(), now)
		f.service.distrust(w, now)
	}
	if f.isUDP() && len(h.data) > 0 {
		// The client's next datagrams come up, and follow the first one to the next endpoint: no
		// tuples lead them to the abandoned one.
		h.key = f.wayThere()
		w.kernel.Index.Erase(f.index, h.key)
		w.asking[h.key] = f
	}
	if late {
		f.keepStale()
	}
	w.kernel.Index.EraseEndpoint(f.index)
	if len(h.data) == 0 {
		// BPF announced the flow before, but the notice with the packet may not have been read
		// yet.
		w.loop.Schedule(&f.timer, now+int64(2*noticeInterval), f)
		return
	}
	f.retry()
}

// keepStale keeps the way back of an abandoned endpoint, so that a late answer is reported. It
// does nothing when indices are scarce, because new flows need them.
func (f *flow) keepStale() {
	w, h, back := f.worker, f.handshake, f.wayBack()
	for i := range h.stale {
		if h.stale[i].key == back { // the flow has tried this endpoint before
			w.kernel.Index.Exchange(&back, f.index, bpf.ReferenceTo(h.stale[i].index, bpf.KernelRoleSTALE))
			return
		}
	}
	if w.spares.Len() <= len(w.flows)/staleShare {
		return
	}
	index, ok := w.spares.Take()
	if !ok {
		return
	}
	k := &w.kernel.Flows[index]
	stale := *f.shared()
	stale.State, stale.Generation = bpf.KernelStateFREE, k.Generation+1 // it is no flow, at no time
	*k = stale
	if !w.kernel.Index.Exchange(&back, f.index, bpf.ReferenceTo(index, bpf.KernelRoleSTALE)) {
		w.freed = append(w.freed, index)
		return
	}
	h.stale = append(h.stale, staleWay{back, index})
}

// isOfAnother reports whether a flow began at another service port, which its record names and
// whose balancer and limits it uses.
func (f *flow) isOfAnother(port *service.Port) bool {
	return f.record.Port != nil && f.record.Port.Name != port.Name
}

// retry makes the next attempt, by the configuration that is in force now.
func (f *flow) retry() {
	if len(f.handshake.data) == 0 {
		f.lost(poll.Nanotime())
		return
	}
	st := f.service.path.state.Load()
	v := st.table.Resolve(f.protocol, f.client(), f.record.VIP)
	if v.Action != policy.Accept || st.services[v.Port.ID] == nil || f.isOfAnother(v.Port) {
		f.fail()
		return
	}
	if s := st.services[v.Port.ID]; s != f.service { // the port was replaced
		f.moveTo(s)
	}
	f.dial(st, &v)
}

// refuse answers the client's SYN or INIT.
func (f *flow) refuse() {
	k, from, to := f.shared(), f.record.VIP, f.record.Client
	if f.protocol == service.SCTP {
		f.worker.injector.abort(abort{from: from, to: to, tag: k.FirstSequence})
		return
	}
	f.worker.injector.reset(reset{from: from, to: to, ack: k.FirstSequence + 1, flags: flagRST | flagACK})
}

// fail ends a flow that reached no endpoint. TCP clients get an RST, SCTP clients an ABORT.
func (f *flow) fail() { f.failBy(conntrack.ConnectFailed) }

func (f *flow) failBy(end conntrack.End) {
	if !f.isUDP() {
		f.refuse()
	}
	f.end(end, poll.Nanotime())
	f.drop()
}

// late answers the late SYN-ACK or INIT ACK of an abandoned endpoint.
func (w *worker) late(p *frame) {
	if p.protocol == syscall.IPPROTO_SCTP {
		w.injector.abort(abort{from: p.vip, to: p.client, tag: p.sequence})
		return
	}
	w.injector.reset(reset{from: p.vip, to: p.client, sequence: p.ack, flags: flagRST})
}

// collision handles a packet that an endpoint sent, or may have sent, in a connection of its own
// with the client: the flow must use other ports than that connection.
func (f *flow) collision() {
	h := f.handshake
	if f.state() != bpf.KernelStateASKING {
		return
	}
	if f.isUDP() && f.shared().Options&bpf.KernelOptionOPTION_MOVED != 0 {
		return // a repeated event: the session has another port already
	}
	if h == nil {
		f.lost(poll.Nanotime())
		return
	}
	if h.moved = len(h.data) == 0; h.moved && !f.stopAsking() {
		return
	}
	if back := f.endpointsWay(); f.protocol == service.TCP {
		until := uint64(sys.Monotonic() + int64(occupiedTime))
		_ = f.worker.kernel.Maps.Occupied.Put(&back, &until)
	}
	f.worker.kernel.Index.EraseEndpoint(f.index)
	f.movePorts()
	if h.moved {
		f.lost(poll.Nanotime())
		return
	}
	f.putAll(true)
}

// challenge handles a SYN with the tuple of an open connection: it is forged, or the client has lost
// the connection and begins another one from the same port. The client gets an ACK (RFC 5961, 4)
// whose number we choose. A client without the connection answers with an RST that has this number
// (RFC 9293, 3.10.7.3): BPF recognizes it, and the client's next SYN begins another connection. A
// client with the connection ignores the ACK as an old one. SCTP has nothing like it: the INIT goes
// to the endpoint, which knows whether the association exists; if the Service no longer has the
// endpoint, the INIT begins another flow. BPF reports a flow's next SYN or INIT once
// challengeInterval has passed.
//
// It also handles an RST that BPF does not believe although its receiver may: segments that BPF has
// not seen may have reached the receiver. The sender of the RST gets an ACK. If its connection is
// gone, it answers with an RST that has the number which the receiver expects.
func (f *flow) challenge() {
	w, k := f.worker, f.shared()
	switch {
	case f.state() != bpf.KernelStateOPEN:
	case f.protocol == service.SCTP:
		if f.isAlone() {
			f.resetBoth()
			f.end(conntrack.ClientAbort, poll.Nanotime())
			f.drop()
			return
		}
	case atomic.AndUint32((*uint32)(&k.Seen), ^uint32(bpf.KernelSeenENDPOINT_RST_DOUBTED))&uint32(bpf.KernelSeenENDPOINT_RST_DOUBTED) != 0:
		w.injector.reset(reset{from: bpf.PortOf(k.Client, k.MiddlePort), to: bpf.PortOf(k.Endpoint, k.EndpointPort), sequence: k.Way[1].Acked - 1, ack: k.Way[0].Acked, flags: flagACK})
	default:
		atomic.AndUint32((*uint32)(&k.Seen), ^uint32(bpf.KernelSeenCLIENT_RST_DOUBTED))
		for k.Challenge == 0 {
			atomic.StoreUint32(&k.Challenge, k.Way[1].Acked-1-rand.Uint32N(1<<30))
		}
		w.injector.reset(reset{from: bpf.PortOf(k.Vip, k.VipPort), to: bpf.PortOf(k.Client, k.ClientPort), sequence: k.Way[0].Acked - 1, ack: k.Challenge, flags: flagACK})
	}
	atomic.OrUint32((*uint32)(&k.Seen), uint32(bpf.KernelSeenCHALLENGED)) // describe may have taken it out
	w.challenged = append(w.challenged, challenged{f.index, f.generation, w.loop.Now() + int64(challengeInterval)})
}

// isAlone reports whether the Service no longer has the flow's endpoint.
func (f *flow) isAlone() bool {
	v := f.service.path.state.Load().table.Resolve(f.protocol, f.client(), f.record.VIP)
	e, _ := endpointOf(v.Port, f.record.Endpoint.Addr)
	return e == nil
}

// challenged is a flow whose client got a challenge.
type challenged struct {
	index, generation uint32
	due               int64 // when BPF may report the next SYN
}

// unchallenge makes BPF report SYNs again for the flows whose interval has passed.
func (w *worker) unchallenge(now int64) {
	n := 0
	for ; n < len(w.challenged) && w.challenged[n].due <= now; n++ {
		c := w.challenged[n]
		if f := w.flows[c.index]; f != nil && f.generation == c.generation {
			f.unchallenge()
		}
	}
	w.challenged = slices.Delete(w.challenged, 0, n)
}

// unchallenge makes BPF report the flow's next SYN.
func (f *flow) unchallenge() {
	atomic.AndUint32((*uint32)(&f.shared().Seen), ^uint32(bpf.KernelSeenCHALLENGED))
}

// gone handles a UDP endpoint that has served for a while and has closed its port.
func (f *flow) gone(now int64) {
	f.unpark()
	if b := f.service.balancer; b != nil {
		b.Failed(&balancer.Dial{}, f.record.Endpoint.Addr, f.client(), now)
		f.service.distrust(f.worker, now)
	}
	f.end(conntrack.EndpointGone, now)
	f.drop()
}

// retire ends a UDP session whose endpoint may still answer. What it sends is dropped: the
// client's next datagram goes to another one.
func (f *flow) retire(end conntrack.End, now int64) {
	if f.ended {
		return
	}
	f.end(end, now)
	f.endHandshake()
	// The tuples that hide the client stay, for packets that are on their way.
	x, back := &f.worker.kernel.Index, f.wayBack()
	x.Erase(f.index, f.wayThere())
	x.Exchange(&back, f.index, bpf.ReferenceTo(f.index, bpf.KernelRoleSTALE))
	f.setState(bpf.KernelStateCLOSED)
	f.worker.loop.Schedule(&f.timer, now+int64(lateAnswers), f)
}

// closed handles the end of a connection. Its tuples stay a while, for packets that are
// sent again.
func (f *flow) closed(at int64, seen bpf.KernelSeen) {
	if f.ended {
		return
	}
	f.endClosed(at, seen)
	if h := f.handshake; h != nil && len(h.stale) > 0 {
		f.worker.loop.Schedule(&f.timer, at+int64(lateAnswers), f) // other endpoints may answer
		return
	}
	f.linger(at)
}

// endClosed writes the record of a connection that its sides have ended.
func (f *flow) endClosed(at int64, seen bpf.KernelSeen) {
	if answered := atomic.LoadUint64(&f.shared().Answered); answered != 0 && !f.ended {
		f.opened(f.worker.loopTime(answered))
	}
	how := endOf
	if f.protocol == service.SCTP {
		how = endOfAssociation
	}
	f.end(how(f.shared().FirstEnd, seen), at)
}
