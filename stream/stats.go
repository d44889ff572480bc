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
	Dialing   int64             // those of them that wait for an endpoint to answer
	Listeners int64             // listening sockets
	Pins      balancer.PinStats // of all service ports
	Ejected   int               // endpoints that new connections pass over, as they kept failing
	Strays    uint64            // accepted connections whose destination is no service's
	AtLimit   uint64            // pauses of accepting at the limit of all connections
	Exhausted uint64            // pauses of accepting because the kernel had no descriptor or memory
	Unguarded int64             // destinations whose source ranges the kernel does not take
	DialCalls uint64            // system calls that connecting to endpoints took
}

// Stats returns what was counted. It may be called from any goroutine.
func (s *Server) Stats() Stats {
	out := Stats{
		Open:      s.open.Load(),
		Listeners: s.stats.listeners.Load(),
		Strays:    s.stats.strays.Load(),
		AtLimit:   s.stats.atLimit.Load(),
		Exhausted: s.stats.exhausted.Load(),
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
