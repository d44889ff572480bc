package stream

import (
	"sync/atomic"

	"github.com/sluice-proxy/sluice/balancer"
)

// stats counts what concerns no single connection; see Stats.
type stats struct {
	strays, atLimit, exhausted atomic.Uint64
	listeners, unguarded       atomic.Int64
}

// Stats is what a Server has counted.
type Stats struct {
	Open      int64             // connections now
	Dialing   int64             `metric:"sluice_connections_dialing" help:"Connections that wait for an endpoint, also queued and held ones."`
	Held      int64             `metric:"sluice_connections_held" help:"Connections that wait for their Service to have an endpoint (sluice.dev/hold)."`
	Queued    int64             `metric:"sluice_connections_queued" help:"Connections that wait at a limit of their Service (sluice.dev/queue-timeout)."`
	Listeners int64             `metric:"sluice_listeners" help:"Listening sockets of services."`
	Pins      balancer.PinStats // of all service ports
	Ejected   int               `metric:"sluice_endpoints_ejected" help:"Endpoints that new connections pass over because they kept failing (sluice.dev/eject-after)."`
	Strays    uint64            `metric:"sluice_connections_unserved_total" help:"Accepted connections to a destination that no service has; they are reset."`
	AtLimit   uint64            // pauses of accepting at the limit of all connections
	Exhausted uint64            // pauses of accepting because the kernel had no descriptor or memory
	Unguarded int64             `metric:"sluice_unguarded_destinations" help:"Addresses and ports with more source ranges than a socket filter holds: other clients are reset, not dropped."`
	Pauses    uint64            `metric:"sluice_accept_pauses_total" help:"Pauses in accepting, for a limit of the process or a lack of descriptors or memory."`
	DialCalls uint64            // system calls that connecting to endpoints took
}

// Stats returns what was counted. It may be called from any goroutine.
func (s *Server) Stats() Stats {
	out := Stats{
		Open:      s.open.Load() - s.forwarded.Load(),
		Held:      s.held.Load(),
		Queued:    s.queued.Load(),
		Listeners: s.stats.listeners.Load(),
		Strays:    s.stats.strays.Load(),
		AtLimit:   s.stats.atLimit.Load(),
		Exhausted: s.stats.exhausted.Load(),
		Pauses:    s.stats.atLimit.Load() + s.stats.exhausted.Load(),
		Unguarded: s.stats.unguarded.Load(),
	}
	for _, w := range s.workers {
		out.DialCalls += w.dialer.Calls()
	}
	for _, p := range s.state.Load().pools {
		if p == nil {
			continue
		}
		out.Dialing += p.dialing.Load()
		out.Ejected += p.balancer.Ejected()
		pins := p.balancer.Pins()
		out.Pins.Pins += pins.Pins
		out.Pins.Evicted += pins.Evicted
		out.Pins.Expired += pins.Expired
	}
	return out
}
