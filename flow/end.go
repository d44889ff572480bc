package flow

import (
	"sync/atomic"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
)

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

// endOf returns how a connection ended, from what BPF saw and in which order. A reset outweighs the
// other side's earlier FIN, because bytes may be missing, unless its sender had sent a FIN and
// acknowledged the other side's: then the reset answers a repeated segment.
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

// free removes the tuples of indices, then releases these. In the other order, BPF would treat packets
// that find the free flow as those of an open one: packets of the client's own connection to the
// endpoint would get the Service's address.
func (w *worker) free(indices ...uint32) {
	w.kernel.Index.EraseAll(indices...)
	for _, index := range indices {
		k := &w.kernel.Flows[index]
		atomic.StoreUint32((*uint32)(&k.State), uint32(bpf.KernelStateFREE))
		l := &w.kernel.Loads[k.Service]
		if bpf.ProtocolOf(k.Protocol) != service.UDP && atomic.OrUint32((*uint32)(&k.Seen), uint32(bpf.KernelSeenCONFIRMED))&uint32(bpf.KernelSeenCONFIRMED) == 0 {
			atomic.AddUint64(&l.Confirmed, 1)
		}
		atomic.AddUint64(&l.Ended, 1)
	}
	w.freed = append(w.freed, indices...)
	w.server.stats.open.Add(-int64(len(indices)))
}
