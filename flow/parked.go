package flow

import (
	"sync/atomic"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
)

// Most of an open connection's record can be read from memory that is shared with BPF. So a
// connection releases its record once it has been open for a moment. The record is built again
// when the connection ends, and while a reader looks at it.

// park releases the record of an open TCP connection. It returns false if the record must stay for
// now: it has failed attempts, or somebody lists connections.
func (f *flow) park() bool {
	r := f.record
	if r == nil {
		return true
	}
	if f.protocol != service.TCP || f.handshake != nil || !r.Connected || r.ConnectTime != f.connectTime(r.Start) ||
		!f.worker.shard.Park(r, &f.place, f) {
		return false
	}
	f.port, f.endpoint = r.Port, r.Endpoint
	f.kind, f.source, f.affinity = r.Kind, r.Source, r.Affinity
	f.record = nil
	f.worker.freeRecord(r)
	return true
}

// unpark builds the flow's record again, before the flow ends.
func (f *flow) unpark() {
	if f.record == nil {
		f.record = f.worker.newRecord()
		f.worker.shard.Unpark(&f.place, f.record)
		f.port, f.endpoint = nil, nil
	}
}

// Describe implements conntrack.Keeper.
func (f *flow) Describe(r *conntrack.Record) {
	k := f.shared()
	r.Start = f.worker.loopTime(k.Started)
	r.Client, r.VIP = bpf.PortOf(k.Client, k.ClientPort), bpf.PortOf(k.Vip, k.VipPort)
	r.Port, r.Endpoint, r.SourceAddr = f.port, f.endpoint, f.seenFrom()
	r.Counters = f.service.counters
	r.Protocol, r.Kind, r.Path = f.protocol, f.kind, conntrack.Kernel
	r.Source, r.Affinity = f.source, f.affinity
	r.Attempts = uint16(k.Attempts)
	r.Connected, r.ConnectTime = true, f.connectTime(r.Start)
}

// connectTime is how long the endpoint took to answer, as BPF says.
func (f *flow) connectTime(start int64) int64 {
	return max(f.worker.loopTime(atomic.LoadUint64(&f.shared().Answered)), start) - start
}

// newRecord returns an unused record.
func (w *worker) newRecord() *conntrack.Record {
	if n := len(w.records); n > 0 {
		r := w.records[n-1]
		w.records = w.records[:n-1]
		return r
	}
	return new(conntrack.Record)
}

// freeRecord keeps a record for another flow.
func (w *worker) freeRecord(r *conntrack.Record) {
	if len(w.records) < spareObjects {
		*r = conntrack.Record{}
		w.records = append(w.records, r)
	}
}
