package conntrack

import (
	"cmp"
	"slices"
	"sync"

	"github.com/sluice-proxy/sluice/service"
)

// registry holds the counters of all service ports. The number of service
// ports is what bounds it: a port that is forgotten goes when its last
// connection has ended.
type registry struct {
	mu      sync.Mutex
	ports   map[service.PortName]*Counters
	leaving map[service.PortName]*Counters // those of them that are forgotten
	retired Totals                         // what forgotten ports counted, so that totals never fall
}

// Counters returns the counters of a service port. They stay the same ones, and
// keep their values, across all changes of the port until it is forgotten.
func (t *Table) Counters(name service.PortName) *Counters {
	g := &t.registry
	g.mu.Lock()
	defer g.mu.Unlock()
	c := g.ports[name]
	if c == nil {
		c = &Counters{name: name}
		if g.ports == nil {
			g.ports = make(map[service.PortName]*Counters)
		}
		g.ports[name] = c
	}
	delete(g.leaving, name)
	return c
}

// Forget tells that the service port exists no more. Its counters go when its
// last connection has ended, unless the port comes back before.
func (t *Table) Forget(name service.PortName) {
	g := &t.registry
	g.mu.Lock()
	defer g.mu.Unlock()
	if c := g.ports[name]; c != nil {
		if g.leaving == nil {
			g.leaving = make(map[service.PortName]*Counters)
		}
		g.leaving[name] = c
	}
	g.sweepLocked()
}

// PortTotals is what one service port counted.
type PortTotals struct {
	Name   service.PortName
	Totals Totals
}

// Totals returns what each service port counted, sorted by name, and the sum over
// these and all that were forgotten.
func (t *Table) Totals() (ports []PortTotals, all Totals) {
	g := &t.registry
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sweepLocked()
	all = g.retired
	ports = make([]PortTotals, 0, len(g.ports))
	for name, c := range g.ports {
		p := PortTotals{Name: name, Totals: c.Totals()}
		all.Add(&p.Totals)
		ports = append(ports, p)
	}
	slices.SortFunc(ports, func(a, b PortTotals) int {
		return cmp.Or(
			cmp.Compare(a.Name.Namespace, b.Name.Namespace),
			cmp.Compare(a.Name.Name.Name, b.Name.Name.Name),
			cmp.Compare(a.Name.Port, b.Name.Port),
			cmp.Compare(a.Name.Protocol, b.Name.Protocol),
		)
	})
	return ports, all
}

// sweepLocked lets forgotten ports without connections go.
func (g *registry) sweepLocked() {
	for name, c := range g.leaving {
		if c.active.Load() == 0 {
			totals := c.Totals()
			g.retired.Add(&totals)
			delete(g.ports, name)
			delete(g.leaving, name)
		}
	}
}
