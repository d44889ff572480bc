package datagram

import "github.com/sluice-proxy/sluice/service"

// group is what the ports of one Service have in one loop together.
type group struct {
	shares []*share // those with sessions
	count  int      // of sessions
	place  int      // in worker.active while count > 0
}

// groups are those of one Service, by worker.
type groups struct {
	loops []group
	ports int // of the Service, that are served; the Server's
}

// joinGroups gives the groups of a service port, which has them until
// leaveGroups.
func (s *Server) joinGroups(name service.Name) *groups {
	g := s.groups[name]
	if g == nil {
		g = &groups{loops: make([]group, len(s.workers))}
		s.groups[name] = g
	}
	g.ports++
	return g
}

func (s *Server) leaveGroups(name service.Name) {
	g := s.groups[name]
	if g.ports--; g.ports == 0 {
		delete(s.groups, name) // the port's sessions are cut
	}
}

// enter takes note of a share's first session.
func (g *group) enter(h *share) {
	h.place = len(g.shares)
	g.shares = append(g.shares, h)
}

// leave takes note that a share has no session any more.
func (g *group) leave(h *share) {
	last := len(g.shares) - 1
	g.shares[h.place] = g.shares[last]
	g.shares[h.place].place = h.place
	g.shares[last] = nil
	g.shares = g.shares[:last]
}

// largest gives the share with the most sessions. There is one if count > 0.
func (g *group) largest() *share {
	largest := g.shares[0]
	for _, h := range g.shares[1:] {
		if h.count > largest.count {
			largest = h
		}
	}
	return largest
}
