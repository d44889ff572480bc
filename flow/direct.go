package flow

import (
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
)

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
