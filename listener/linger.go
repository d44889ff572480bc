package listener

import (
	"context"
	"maps"
	"net/netip"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
)

// lingers tells whether connections may use destinations that left the plan.
func (m *Manager) lingers() bool {
	return m.planner.lingering.Len() > 0 || len(m.planner.lingeringIPs) > 0
}

// leaveToOthers has connections linger that were made to cluster IPs which
// another proxy serves from now on.
func (m *Manager) leaveToOthers(others map[netip.Addr]service.Other) {
	fresh := maps.Clone(others)
	maps.DeleteFunc(fresh, func(a netip.Addr, _ service.Other) bool { return m.planner.isOthers(a) })
	if len(fresh) == 0 || m.Stats().Open == 0 {
		return
	}
	post := func(shard int, f func()) bool { return m.workers[shard].post(f) }
	// The error is that the loops have stopped: then there are no connections.
	_ = m.table.List(context.Background(), post, func(r *conntrack.Record) error {
		if _, is := fresh[r.VIP.Addr()]; is && r.Protocol == service.TCP {
			m.planner.linger(service.Destination{Addr: r.VIP.Addr(), Port: r.VIP.Port(), Protocol: r.Protocol}, true)
		}
		return nil
	})
}

// dropIdle forgets the lingering destinations and addresses that no connection
// uses, nor one that is late. It tells whether there were any.
func (m *Manager) dropIdle() bool {
	p := &m.planner
	if !m.lingers() {
		return false
	}
	idleIPs := make(map[netip.Addr]struct{})
	idle := make(map[service.Destination]struct{})
	now := m.clock()
	maps.DeleteFunc(p.late, func(_ service.Destination, until int64) bool { return until < now })
	for a := range p.lingeringIPs {
		if _, late := p.late[service.Destination{Addr: a}]; !late {
			idleIPs[a] = struct{}{}
		}
	}
	for dst := range p.lingering.All() {
		if _, late := p.late[dst]; !late {
			idle[dst] = struct{}{}
		}
	}
	post := func(shard int, f func()) bool { return m.workers[shard].post(f) }
	err := m.table.List(context.Background(), post, func(r *conntrack.Record) error {
		delete(idleIPs, r.VIP.Addr())
		delete(idle, service.Destination{Addr: r.VIP.Addr(), Port: r.VIP.Port(), Protocol: r.Protocol})
		return nil
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
