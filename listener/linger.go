package listener

import (
	"context"
	"maps"
	"net/netip"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
)

// lingers reports whether connections may use destinations that left the plan.
func (p *planner) lingers() bool { return p.lingering.Len() > 0 || len(p.lingeringIPs) > 0 }

// connections calls visit with a copy of the record of each open connection, until
// the event loops stop.
func (m *Manager) connections(visit func(*conntrack.Record)) error {
	return m.options.Table.List(context.Background(), conntrack.OnLoops(m.options.Loops), func(r *conntrack.Record) error {
		visit(r)
		return nil
	})
}

// lingerForOthers keeps destinations whose cluster IPs another proxy serves from now on, as long as
// they have connections.
func (m *Manager) lingerForOthers(others map[netip.Addr]service.Other) {
	fresh := maps.Clone(others)
	maps.DeleteFunc(fresh, func(a netip.Addr, _ service.Other) bool { return m.planner.isOthers(a) })
	if len(fresh) == 0 {
		return
	}
	// On an error the loops have stopped: there are no connections then.
	_ = m.connections(func(r *conntrack.Record) {
		if _, is := fresh[r.VIP.Addr()]; is && m.planner.keeps(r.Protocol) {
			m.planner.linger(service.Destination{Addr: r.VIP.Addr(), Port: r.VIP.Port(), Protocol: r.Protocol}, true)
		}
	})
}

// dropLingering forgets the lingering destinations and addresses that no connection
// uses and whose grace period is over. It reports whether there were any.
func (m *Manager) dropLingering() bool {
	p := &m.planner
	if !p.lingers() {
		return false
	}
	idleIPs := make(map[netip.Addr]struct{})
	idle := make(map[service.Destination]struct{})
	now := m.options.Clock()
	maps.DeleteFunc(p.grace, func(_ service.Destination, until int64) bool { return until < now })
	for a := range p.lingeringIPs {
		if _, grace := p.grace[service.Destination{Addr: a}]; !grace {
			idleIPs[a] = struct{}{}
		}
	}
	for dst := range p.lingering.All() {
		if _, grace := p.grace[dst]; !grace {
			idle[dst] = struct{}{}
		}
	}
	err := m.connections(func(r *conntrack.Record) {
		delete(idleIPs, r.VIP.Addr())
		delete(idle, service.Destination{Addr: r.VIP.Addr(), Port: r.VIP.Port(), Protocol: r.Protocol})
	})
	if err != nil {
		return false // the loops have stopped
	}
	for a := range idleIPs {
		p.lingerIP(a, false)
	}
	for dst := range idle {
		p.linger(dst, false)
	}
	return len(idle)+len(idleIPs) > 0
}
