package conntrack

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// Refusal is packets of a client that were refused or dropped, as a port of no Service
// could have them.
type Refusal struct {
	Client   netip.Addr
	VIP      netip.AddrPort
	Protocol service.Protocol
	Kind     service.AddressKind
	Port     *service.Port // nil if no Service has the destination
	Reason   End
	Packets  uint64
	// Path is who refused: Kernel if it was decided about a kernel flow.
	Path Path
}

// refused has the last refusals. The zero value is ready to use.
type refused struct {
	mu   sync.Mutex
	last failures
}

func (r *refused) failures() []Failure {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.last.ring)
}

// Refuse tells taps, the Past and Failures of refusals, and the sink unless quiet. more is how
// many packets these do not say. It is safe for concurrent use.
func (t *Table) Refuse(list []Refusal, more uint64, quiet bool) {
	now := t.now()
	t.refused.mu.Lock()
	for i := range list {
		r := &list[i]
		t.refused.last.put(Failure{
			At: now, Client: netip.AddrPortFrom(r.Client, 0), VIP: r.VIP, Port: r.Port, Broke: r.Reason, Packets: r.Packets,
		})
	}
	t.refused.mu.Unlock()
	if more > 0 {
		t.taps.RecordsLost(more)
	}
	for part := range slices.Chunk(list, batchSize) {
		t.refuse(part, now, quiet)
	}
}

// refuse queues a batch of records.
func (t *Table) refuse(list []Refusal, now time.Time, quiet bool) {
	if !t.wants(&Record{Quiet: quiet}) {
		return
	}
	b := t.newBatch()
	for i := range list {
		r := &list[i]
		b.records = append(b.records, Record{
			Wall: now.UnixNano(), Client: netip.AddrPortFrom(r.Client, 0), VIP: r.VIP, Port: r.Port, Kind: r.Kind,
			Protocol: r.Protocol, Path: r.Path, End: r.Reason, Event: Refused, DatagramsFromClient: r.Packets, Quiet: quiet,
			self: t.selfAt(r.Client),
		})
	}
	t.put(b)
}
