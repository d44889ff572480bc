package flow

import (
	"bytes"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/poll"
)

// mostCopied bounds what all sessions keep after their first datagrams, in bytes.
const mostCopied = 8 << 20

// unanswered are the datagrams that follow the first one of a UDP session while no endpoint
// has answered. They go to the next endpoint if theirs is closed.
type unanswered struct {
	others  [][]byte
	payload int   // of the first one and the others, in bytes
	resent  int64 // when they were last sent to another endpoint
}

// keepFirst notes the first packet of a flow.
func (h *handshake) keepFirst(p *frame) {
	h.ipv6, h.data = p.ipv6, append(h.data[:0], p.data...)
	h.payload = p.payload() // of UDP
}

// keep copies a datagram within the bounds. It never replaces earlier ones. It returns the
// copy, or nil.
func (w *worker) keep(h *handshake, p *frame) []byte {
	if len(h.others) >= bpf.MostUnanswered-1 || w.copied+len(p.data) > mostCopied {
		return nil
	}
	d := bytes.Clone(p.data)
	h.others = append(h.others, d)
	h.payload += p.payload()
	w.copied += len(d)
	return d
}

// sent keeps a datagram that BPF has sent to an endpoint without an answer. If BPF sent it just
// before that endpoint was abandoned, the next endpoint gets it too.
func (f *flow) sent(e *bpf.KernelEvent, data []byte) {
	h := f.handshake
	if h == nil || f.ended || !f.isUDP() {
		return
	}
	p, ok := parseFrame(data, int(e.Header))
	if !ok || !p.complete() {
		return
	}
	if d := f.worker.keep(h, &p); d != nil && f.worker.loopTime(e.Time) < h.resent {
		f.uncount(1, p.payload())
		f.worker.injector.put(f, h.ipv6, d)
	}
}

// forgetOthers frees the copies of a session's datagrams.
func (w *worker) forgetOthers(h *handshake) {
	for _, d := range h.others {
		w.copied -= len(d)
	}
	h.unanswered = unanswered{}
}

// putAll sends a flow's first packet and the datagrams that followed it, some perhaps a second
// time. BPF counts each of them once.
func (f *flow) putAll(again bool) {
	h, i := f.handshake, f.worker.injector
	if f.isUDP() && again {
		f.uncount(1+len(h.others), h.payload)
		h.resent = poll.Nanotime()
	}
	i.put(f, h.ipv6, h.data)
	for _, d := range h.others {
		i.put(f, h.ipv6, d)
	}
}

// uncount subtracts datagrams of the client from what BPF has counted. BPF may not have counted all
// of them yet.
func (f *flow) uncount(datagrams, payload int) {
	way := &f.shared().Way[0]
	atomic.AddUint64(&way.Packets, -min(uint64(datagrams), atomic.LoadUint64(&way.Packets)))
	atomic.AddUint64(&way.Bytes, -min(uint64(payload), atomic.LoadUint64(&way.Bytes)))
}
