package listener

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// lane is where the kernel queues the connections of one service port, or, when
// there are very many ports, of several: a listening socket for each family
// that is needed. It is bound to a loopback address, so that it opens no port
// to anybody; only steering leads to it. The manager owns it; workers accept
// from its sockets.
type lane struct {
	sides [2]side // by service.Family
	ports int     // service ports that use it
}

// side is a lane's part in one family.
type side struct {
	socket *socket // nil while it is not needed
	port   uint16
	guards map[service.Destination]*guard
	stale  bool // the filter does not say what guards do
}

// laneAddress gives the address that lanes of a family are bound to.
func laneAddress(f service.Family) netip.Addr {
	if f == service.IPv4 {
		return redirect.ListenIPv4
	}
	return redirect.ListenIPv6
}

// open makes the socket of a family.
func (l *lane) open(f service.Family, cfg *Config) error {
	o := cfg.listenOptions()
	o.Transparent = true
	s, err := listen(netip.AddrPortFrom(laneAddress(f), 0), o)
	if err != nil {
		return err
	}
	addr, errno := sys.LocalAddr(s.fd)
	if errno != 0 {
		sys.Close(s.fd)
		return fmt.Errorf("listener's own address: %w", errno)
	}
	l.sides[f] = side{socket: s, port: addr.Port()}
	l.count(0)
	return nil
}

// count takes note of service ports that begin or cease to use the lane.
func (l *lane) count(more int) {
	l.ports += more
	for f := range l.sides {
		if s := l.sides[f].socket; s != nil {
			s.shared.Store(l.ports > 1)
		}
	}
}

// setGuard says whom a destination of the lane answers, nil for everybody.
func (l *lane) setGuard(dst service.Destination, g *guard) {
	s := &l.sides[service.FamilyOf(dst.Addr)]
	switch {
	case g != nil:
		if s.guards == nil {
			s.guards = make(map[service.Destination]*guard)
		}
		s.guards[dst] = g
	case s.guards[dst] == nil:
		return
	default:
		delete(s.guards, dst)
	}
	s.stale = true
}

// guardLane brings a lane's filters up to date.
func (m *Manager) guardLane(l *lane) {
	for f := range l.sides {
		if s := &l.sides[f]; s.stale && s.socket != nil {
			s.stale = false
			m.protect(s.socket, slices.Collect(maps.Values(s.guards)))
		}
	}
}

// laneFor gives the lane of a pool, with a socket of a family.
func (m *Manager) laneFor(p *pool, f service.Family) (*lane, error) {
	if p.lane == nil {
		p.lane = m.assignLane()
		p.lane.count(1)
	}
	s := &p.lane.sides[f]
	if s.socket != nil {
		return p.lane, nil
	}
	if err := p.lane.open(f, &m.config); err != nil {
		return nil, err
	}
	m.join(s.socket)
	return p.lane, nil
}

// assignLane gives a lane of its own as long as the bound allows, else the one
// with the fewest service ports.
func (m *Manager) assignLane() *lane {
	if len(m.lanes) < m.config.MaxLanes {
		l := new(lane)
		m.lanes = append(m.lanes, l)
		return l
	}
	m.once("listening sockets", fmt.Errorf("more than %d service ports: some share a listening socket, and with it its queue", m.config.MaxLanes))
	least := m.lanes[0]
	for _, l := range m.lanes[1:] {
		if l.ports < least.ports {
			least = l
		}
	}
	return least
}

// release lets go of a pool whose service port is gone. Its connections go on,
// and those that are on their way are still accepted for a while.
func (m *Manager) release(p *pool) {
	m.table.Forget(p.port.Name)
	l := p.lane
	if l == nil {
		return
	}
	p.lane = nil
	if l.count(-1); l.ports > 0 {
		return
	}
	if i := slices.Index(m.lanes, l); i >= 0 {
		m.lanes[i] = m.lanes[len(m.lanes)-1]
		m.lanes = m.lanes[:len(m.lanes)-1]
	}
	for f := range l.sides {
		if s := l.sides[f].socket; s != nil {
			m.retire(s, service.Destination{})
		}
	}
}

func (m *Manager) closeLane(l *lane) {
	for f := range l.sides {
		if s := &l.sides[f]; s.socket != nil {
			m.discard(s.socket)
			*s = side{}
		}
	}
}
