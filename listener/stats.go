package listener

import (
	"sync/atomic"

	"github.com/sluice-proxy/sluice/balancer"
)

// stats counts what concerns no single connection.
type stats struct {
	strays         atomic.Uint64
	atLimit        atomic.Uint64
	exhausted      atomic.Uint64
	notAdmitted    atomic.Uint64
	listeners      atomic.Int64
	claims         atomic.Int64
	conflicts      atomic.Int64
	conflictsTotal atomic.Uint64
	unclaimed      atomic.Int64
	unguarded      atomic.Int64
}

// Stats is what a Manager has counted.
type Stats struct {
	Open      int64             // connections now
	Dialing   int64             // those of them that wait for an endpoint to answer
	Listeners int64             // listening sockets
	Pins      balancer.PinStats // of all service ports
	Strays    uint64            // accepted connections that were sent to no service
	AtLimit   uint64            // pauses of accepting at the limit of all connections
	Exhausted uint64            // pauses of accepting because the kernel had no descriptor or memory

	Claims         int64  // addresses and ports that are held by sockets bound to them
	Conflicts      int64  // those that other programs hold
	ConflictsTotal uint64 // times that one was found to be held by another program
	Unclaimed      int64  // those that could not be held for another reason
	Unguarded      int64  // destinations whose source ranges the kernel does not take
	NotAdmitted    uint64 // accepted connections that were reset because their source may not come in
}

// Stats gives what was counted.
func (m *Manager) Stats() Stats {
	s := Stats{
		Open:           m.open.Load(),
		Listeners:      m.stats.listeners.Load(),
		Strays:         m.stats.strays.Load(),
		AtLimit:        m.stats.atLimit.Load(),
		Exhausted:      m.stats.exhausted.Load(),
		Claims:         m.stats.claims.Load(),
		Conflicts:      m.stats.conflicts.Load(),
		ConflictsTotal: m.stats.conflictsTotal.Load(),
		Unclaimed:      m.stats.unclaimed.Load(),
		Unguarded:      m.stats.unguarded.Load(),
		NotAdmitted:    m.stats.notAdmitted.Load(),
	}
	for _, p := range m.state.Load().pools {
		if p == nil {
			continue
		}
		s.Dialing += p.dialing.Load()
		pins := p.balancer.Pins()
		s.Pins.Pins += pins.Pins
		s.Pins.Evicted += pins.Evicted
		s.Pins.Expired += pins.Expired
	}
	return s
}
