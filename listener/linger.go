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
	return len(m.planner.lingering.m) > 0 || len(m.planner.lingeringIPs) > 0
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
	for dst := range p.lingering.m {
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
		delete(p.lingeringIPs, a)
	}
	for dst := range idle {
		p.lingering.remove(dst)
	}
	dropped := len(idle)+len(idleIPs) > 0
	p.moved = p.moved || dropped
	return dropped
}
