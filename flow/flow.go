package flow

import (
	"net/netip"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// flow is one connection or UDP session. Its worker's loop owns it. What BPF reads and
// writes of it is its bpf.KernelFlow.
type flow struct {
	record     *conntrack.Record // nil while it is parked
	timer      poll.Timer
	worker     *worker
	service    *portService
	handshake  *handshake // nil once it is not needed any more
	prev, next uint32     // indices in the service port's list; 0: none
	index      uint32
	generation uint32
	protocol   service.Protocol
	ended      bool // its record is written
	counted    bool // among those that limits bound

	// Fields of a parked record that BPF does not know.
	kind     service.AddressKind
	source   policy.Source
	affinity balancer.Affinity
	port     *service.Port
	endpoint *service.Endpoint
	place    conntrack.Parked
}

// handshake holds what a flow needs until an endpoint has answered, and while other endpoints may
// still answer late.
type handshake struct {
	plan  balancer.Dial
	key   bpf.KernelTuple // of the client's packets
	data  []byte          // the first packet
	ipv6  bool
	moved bool // the endpoint has not been asked from the flow's new ports yet
	unanswered
	stale []staleWay // ways back of endpoints that were given up
}

// staleWay is the way back of an abandoned endpoint. The flow moved to another one, so the tuple
// belongs to an index of its own.
type staleWay struct {
	key   bpf.KernelTuple
	index uint32
}

func (f *flow) shared() *bpf.KernelFlow { return &f.worker.kernel.Flows[f.index] }

func (f *flow) state() bpf.KernelState {
	return bpf.KernelState(atomic.LoadUint32((*uint32)(&f.shared().State)))
}

func (f *flow) setState(s bpf.KernelState) {
	atomic.StoreUint32((*uint32)(&f.shared().State), uint32(s))
}

// stopAsking sets the state to MOVING, unless BPF has changed it since the flow asked.
func (f *flow) stopAsking() bool {
	return atomic.CompareAndSwapUint32((*uint32)(&f.shared().State), uint32(bpf.KernelStateASKING), uint32(bpf.KernelStateMOVING))
}

func (f *flow) seen() bpf.KernelSeen {
	return bpf.KernelSeen(atomic.LoadUint32((*uint32)(&f.shared().Seen)))
}

func (f *flow) isUDP() bool { return f.protocol == service.UDP }

// last is when the last packet came, either way.
func (f *flow) last() int64 { return f.worker.loopTime(f.shared().Last()) }

// Refresh implements conntrack.Refresher.
func (f *flow) Refresh(r *conntrack.Record) {
	k := f.shared()
	if f.protocol != service.TCP {
		r.DatagramsFromClient = atomic.LoadUint64(&k.Way[0].Packets)
		r.DatagramsFromEndpoint = atomic.LoadUint64(&k.Way[1].Packets)
	}
	if first := atomic.LoadUint64(&k.Data); first != 0 {
		r.FirstByte = max(f.worker.loopTime(first)-r.Start, r.ConnectTime, 1)
	}
	r.Progress(atomic.LoadUint64(&k.Way[0].Bytes), atomic.LoadUint64(&k.Way[1].Bytes))
}

// Inspect implements conntrack.Inspector, by what BPF has seen.
func (f *flow) Inspect(t *conntrack.Transport) {
	k, now := f.shared(), poll.Nanotime()
	t.Idle = max(now-f.last(), 0)
	if f.protocol != service.TCP || f.state() != bpf.KernelStateOPEN {
		return
	}
	for i, side := range []*conntrack.Side{&t.Client, &t.Endpoint} {
		side.Known = conntrack.ByPackets
		side.Idle = max(now-f.worker.loopTime(max(atomic.LoadUint64(&k.Way[i].Last), k.Started)), 0)
		// The other side's bytes count as sent once a packet has shown them.
		sent, acked := atomic.LoadUint32(&k.Way[1-i].End), atomic.LoadUint32(&k.Way[i].Acked)
		side.Unacked = uint64(max(int32(sent-acked), 0))
	}
	if k.Attempts == 1 {
		t.Endpoint.RTT = f.connectTime(f.worker.loopTime(k.Started))
	}
}

// collided gives the flow other ports if BPF found that another flow has its way back. It
// reports whether to send the packet again.
func (f *flow) collided() bool {
	k := f.shared()
	if f.seen()&bpf.KernelSeenCOLLIDED == 0 {
		return false
	}
	atomic.AndUint32((*uint32)(&k.Seen), ^uint32(bpf.KernelSeenCOLLIDED))
	f.movePorts()
	if f.isUDP() {
		f.clearWay(poll.Nanotime())
	}
	atomic.AddUint32(&k.Inject, 1) // BPF has counted the packet that it dropped
	return true
}

// nodePort returns the port by which an endpoint is asked first, instead of a hidden client or of one on the
// node: hide in bpf/table.h.
func (f *flow) nodePort() uint16 {
	ports, own := &f.worker.ports, bpf.Wire(f.shared().MiddlePort)
	if f.protocol != service.TCP || own < bpf.FirstPort || ports.keep.Has(own) {
		return ports.next()
	}
	return own
}

// movePorts gives the flow another port between the hooks, or another one of the node.
func (f *flow) movePorts() {
	k := f.shared()
	k.MiddlePort = bpf.Wire(f.worker.ports.next())
	k.Options |= bpf.KernelOptionOPTION_MOVED
	if k.Options&(bpf.KernelOptionOPTION_MASQUERADE|bpf.KernelOptionOPTION_NODE) != 0 {
		k.NodePort = bpf.Wire(f.worker.ports.next())
	}
	f.noteSource()
}

// noteSource records the address that the endpoint sees.
func (f *flow) noteSource() {
	f.record.SourceAddr = f.seenFrom()
}

// seenFrom is the address that the endpoint sees.
func (f *flow) seenFrom() netip.AddrPort {
	k := f.shared()
	if k.Options&bpf.KernelOptionOPTION_MASQUERADE != 0 {
		return bpf.PortOf(k.Node, k.NodePort)
	}
	return f.middle()
}

// middle returns the client's address and port between the hooks; for a client on this node, the
// address and port that the endpoint sees.
func (f *flow) middle() netip.AddrPort {
	k := f.shared()
	if f.isOfNode() {
		return bpf.PortOf(k.Node, k.NodePort)
	}
	return bpf.PortOf(k.Client, k.MiddlePort)
}

// isOfNode reports whether the client is on this node itself.
func (f *flow) isOfNode() bool { return f.shared().Options&bpf.KernelOptionOPTION_NODE != 0 }

// wayThere is the tuple of packets from the client.
func (f *flow) wayThere() bpf.KernelTuple {
	return f.worker.kernel.Index.Tuple(bpf.ReferenceTo(f.index, bpf.KernelRoleTO_ENDPOINT))
}

// wayBack is the tuple of packets from the endpoint to the client.
func (f *flow) wayBack() bpf.KernelTuple {
	return f.worker.kernel.Index.Tuple(bpf.ReferenceTo(f.index, bpf.KernelRoleTO_CLIENT))
}

// endpointsWay is the tuple of what the endpoint sends: another one than wayBack if the client is hidden.
func (f *flow) endpointsWay() bpf.KernelTuple {
	if f.shared().Options&bpf.KernelOptionOPTION_MASQUERADE == 0 {
		return f.wayBack()
	}
	return f.worker.kernel.Index.Tuple(bpf.ReferenceTo(f.index, bpf.KernelRoleUNMASQUERADE))
}

// resetBoth sends an RST, or an ABORT, to each side: what Sluice cuts must not look complete.
func (f *flow) resetBoth() {
	k := f.shared()
	client, vip := bpf.PortOf(k.Client, k.ClientPort), bpf.PortOf(k.Vip, k.VipPort)
	middle, endpoint := f.middle(), bpf.PortOf(k.Endpoint, k.EndpointPort)
	if f.protocol == service.SCTP {
		f.worker.injector.abort(abort{from: vip, to: client, tag: k.Way[1].End})
		if k.Way[0].End != 0 {
			f.worker.injector.abort(abort{from: middle, to: endpoint, tag: k.Way[0].End})
		}
		return
	}
	for _, r := range []reset{
		{from: vip, to: client, sequence: k.Way[1].End, ack: k.Way[0].End, flags: flagRST | flagACK},
		{from: middle, to: endpoint, sequence: k.Way[0].End, ack: k.Way[1].End, flags: flagRST | flagACK},
	} {
		f.worker.injector.reset(r)
		// A receiver that misses segments expects an earlier one (RFC 5961).
		acked := k.Way[0].Acked
		if r.from == middle {
			acked = k.Way[1].Acked
		}
		if acked != r.sequence {
			r.sequence = acked
			f.worker.injector.reset(r)
		}
	}
}

// endOfAssociation is endOf for SCTP.
func endOfAssociation(first, seen bpf.KernelSeen) conntrack.End {
	switch endOf(first, seen) {
	case conntrack.ClientReset:
		return conntrack.ClientAbort
	case conntrack.EndpointReset:
		return conntrack.EndpointAbort
	case conntrack.EndpointFin:
		return conntrack.EndpointShutdown
	}
	return conntrack.ClientShutdown
}

// endOf returns how a connection ended, from what BPF saw and in which order. A reset outweighs the
// other side's earlier FIN, because bytes may be missing. It does not if its sender had sent a FIN
// and acknowledged the other side's: then it answers a repeated segment.
func endOf(first, seen bpf.KernelSeen) conntrack.End {
	const (
		clientDone   = bpf.KernelSeenCLIENT_FIN | bpf.KernelSeenENDPOINT_FIN_ACKED
		endpointDone = bpf.KernelSeenENDPOINT_FIN | bpf.KernelSeenCLIENT_FIN_ACKED
	)
	switch {
	case first == bpf.KernelSeenCLIENT_RST:
		return conntrack.ClientReset
	case first == bpf.KernelSeenENDPOINT_RST, seen&bpf.KernelSeenENDPOINT_RST != 0 && seen&endpointDone != endpointDone:
		return conntrack.EndpointReset
	case seen&bpf.KernelSeenCLIENT_RST != 0 && seen&clientDone != clientDone:
		return conntrack.ClientReset
	case first == bpf.KernelSeenENDPOINT_FIN:
		return conntrack.EndpointFin
	}
	return conntrack.ClientFin
}

// end writes the record. The tuples stay.
func (f *flow) end(end conntrack.End, at int64) {
	if f.ended {
		return
	}
	f.unpark()
	f.ended = true
	f.givePlace()
	w, r, k := f.worker, f.record, f.shared()
	if h := f.handshake; h != nil && r.Affinity == balancer.AffinityNone {
		r.Affinity = h.plan.Affinity()
	}
	f.Refresh(r)
	r.End = end
	r.Duration = max(at-r.Start, r.ConnectTime, r.FirstByte) // the clocks of BPF and of the loop differ
	r.Quiet = f.isUDP() && !w.server.options.WantsUDP(r) || !f.isUDP() && f.unconfirmed()
	w.shard.Close(r)
	atomic.OrUint32((*uint32)(&k.Seen), uint32(bpf.KernelSeenRECORDED))
}

// EndConnection implements conntrack.Ender: both sides of a TCP connection are reset, or
// the client alone while an endpoint is asked. A UDP client's next datagram begins another
// session.
func (f *flow) EndConnection(end conntrack.End) {
	f.unpark()
	now := f.worker.loop.Now()
	switch {
	case f.isUDP():
		f.retire(end, now)
		return
	case f.state() == bpf.KernelStateOPEN:
		f.resetBoth()
	default:
		f.refuse()
	}
	f.end(end, now)
	f.drop()
}

// unconfirmed reports whether the client has not completed the handshake with an endpoint
// that answered: there was no connection, only a SYN, perhaps of a flood.
func (f *flow) unconfirmed() bool {
	return f.record.Connected && f.seen()&(bpf.KernelSeenCONFIRMED|bpf.KernelSeenCLIENT_RST) == 0
}

// drop removes an ended flow: its tuples, and the object.
func (f *flow) drop() {
	f.worker.free(f.index)
	f.leave()
}

// leave recycles the flow's object. The index keeps its tuples.
func (f *flow) leave() {
	w := f.worker
	w.loop.Cancel(&f.timer)
	f.endHandshake()
	f.service.remove(f)
	w.flows[f.index] = nil
	w.gone = append(w.gone, f)
}

// free removes the tuples of an index, then releases it. In the other order, BPF would treat packets
// that find the free flow as those of an open one: packets of the client's own connection to the
// endpoint would get the Service's address.
func (w *worker) free(index uint32) {
	k := &w.kernel.Flows[index]
	state := (*uint32)(&k.State)
	if atomic.LoadUint32(state) != uint32(bpf.KernelStateVACATED) {
		w.kernel.Index.EraseAll(index)
	}
	atomic.StoreUint32(state, uint32(bpf.KernelStateFREE))
	l := &w.kernel.Loads[k.Service]
	if bpf.ProtocolOf(k.Protocol) != service.UDP && atomic.OrUint32((*uint32)(&k.Seen), uint32(bpf.KernelSeenCONFIRMED))&uint32(bpf.KernelSeenCONFIRMED) == 0 {
		atomic.AddUint64(&l.Confirmed, 1)
	}
	atomic.AddUint64(&l.Ended, 1)
	w.freed = append(w.freed, index)
	w.server.stats.open.Add(-1)
}

// client is the client's address.
func (f *flow) client() netip.Addr { return f.record.Client.Addr() }
