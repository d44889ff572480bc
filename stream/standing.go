package stream

import (
	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/service"
)

// Choosing is what new connections to a service port meet now.
type Choosing struct {
	Balancer *balancer.Balancer // nil for a port that is not served here
	Held     int                // connections that wait for an endpoint
	Queued   int                // connections that wait at a limit
}

// Choosing may be called from any goroutine.
func (s *Server) Choosing(port *service.Port) (out Choosing) {
	pools := s.state.Load().pools
	if int(port.ID) >= len(pools) {
		return out
	}
	if p := pools[port.ID]; p != nil {
		out = Choosing{Balancer: p.balancer, Held: int(p.held.Load()), Queued: int(p.queued.Load())}
	}
	return out
}
