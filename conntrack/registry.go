package conntrack

import (
	"slices"
	"sync"

	"github.com/sluice-proxy/sluice/service"
)

// registry holds the counters of all service ports, and of forgotten ports until
// their last connection ends. So the number of service ports bounds it.
type registry struct {
	mu        sync.Mutex
	ports     map[service.PortName]*Counters
	forgotten map[service.PortName]*Counters // the subset of ports that Forget named
	retired   Totals                         // sum of removed ports, so that totals never decrease
}

// Counters returns the counters of a service port and creates them if necessary.
// They keep their values across changes of the port until Forget.
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
	delete(g.forgotten, name)
	return c
}

// Forget removes the counters of a deleted service port after its last connection
// has ended, unless Counters is called for the port before that.
func (t *Table) Forget(name service.PortName) {
	g := &t.registry
	g.mu.Lock()
	defer g.mu.Unlock()
	if c := g.ports[name]; c != nil {
		if g.forgotten == nil {
			g.forgotten = make(map[service.PortName]*Counters)
		}
		g.forgotten[name] = c
	}
	g.sweepLocked()
}

// PortTotals are the totals of one service port.
type PortTotals struct {
	Name   service.PortName
	Totals Totals
}

// Totals returns the totals of each service port, sorted by name, and their sum
// including removed ports.
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
	slices.SortFunc(ports, func(a, b PortTotals) int { return a.Name.Compare(b.Name) })
	return ports, all
}

// sweepLocked removes forgotten ports without connections.
func (g *registry) sweepLocked() {
	for name, c := range g.forgotten {
		if c.active.Load() == 0 {
			totals := c.Totals()
			g.retired.Add(&totals)
			delete(g.ports, name)
			delete(g.forgotten, name)
		}
	}
}
