package listener

import (
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// Steering is the plan's destinations, by what happens there. It never changes.
type Steering struct {
	Steered                         redirect.Map[service.Destination, redirect.Target]
	Refused, Silent, Own, Lingering redirect.Set[service.Destination]
}

// Steering returns the destinations of the plan.
func (m *Manager) Steering() Steering {
	p := &m.planner
	return Steering{Steered: p.steer.Map(), Refused: p.refuse.Map(), Silent: p.silent.Map(), Own: p.own.Map(), Lingering: p.lingering.Map()}
}
