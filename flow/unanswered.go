package flow

import (
	"bytes"
	"sync/atomic"
)

const (
	// mostUnanswered is how many datagrams of a session are kept (MOST_UNANSWERED).
	mostUnanswered = 8
	// mostCopied bounds what all sessions keep after their first datagrams, in bytes.
	mostCopied = 8 << 20
)

// unanswered are the datagrams that follow the first one of a UDP session while no endpoint
// has answered. They go to the next endpoint if theirs is closed.
type unanswered struct {
	others  [][]byte
	payload int // of the first one and the others, in bytes
}

// keepFirst notes the first packet of a flow.
func (h *handshake) keepFirst(p *frame) {
	h.ipv6, h.data = p.ipv6, append(h.data[:0], p.data...)
	h.payload = p.payload() // of UDP
}

// keep copies a datagram within the bounds. It never replaces earlier ones.
func (w *worker) keep(h *handshake, p *frame) {
	if len(h.others) < mostUnanswered-1 && w.copied+len(p.data) <= mostCopied {
		h.others = append(h.others, bytes.Clone(p.data))
		h.payload += p.payload()
		w.copied += len(p.data)
	}
}

// sent keeps a datagram that BPF has sent to an endpoint without an answer.
func (f *flow) sent(e *kernelEvent, data []byte) {
	h := f.handshake
	if h == nil || f.ended || !f.isUDP() {
		return
	}
	if p, ok := parseFrame(data, int(e.Header)); ok && p.complete() {
		f.worker.keep(h, &p)
	}
}

// forgetOthers frees the copies of a session's datagrams.
func (w *worker) forgetOthers(h *handshake) {
	for _, d := range h.others {
		w.copied -= len(d)
	}
	h.unanswered = unanswered{}
}

// putAll sends a flow's first packet, and the datagrams that followed it. They are counted
// when BPF sees them, once.
func (f *flow) putAll() {
	h, i := f.handshake, f.worker.injector
	if f.isUDP() && f.record.Attempts > 1 {
		way := &f.shared().Way[0]
		uncount(&way.Packets, 1+len(h.others))
		uncount(&way.Bytes, h.payload)
	}
	i.put(f, h.ipv6, h.data)
	for _, d := range h.others {
		i.put(f, h.ipv6, d)
	}
}

// uncount takes back what BPF has counted. It may not have got to all of it.
func uncount(counter *uint64, n int) {
	had := atomic.LoadUint64(counter)
	atomic.AddUint64(counter, -min(uint64(n), had))
}
