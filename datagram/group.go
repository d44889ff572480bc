package datagram

import "github.com/sluice-proxy/sluice/service"

// group is what the ports of one Service have in one loop together.
type group struct {
	shares []*share // those with sessions
	count  int      // of sessions
	place  int      // in namespace.groups while count > 0

	namespace *namespace
}

// namespace is what the Services of one namespace have in one loop together.
type namespace struct {
	groups []*group // those with sessions
	count  int      // of sessions
	place  int      // in worker.active while count > 0
}

// groups are those of one Service, by worker.
type groups struct {
	loops []group
	ports int // of the Service, that are served; the Server's
}

// namespaces are those of one namespace, by worker.
type namespaces struct {
	loops    []namespace
	services int // of the namespace, that are served; the Server's
}

// joinGroups gives the groups of a service port, which has them until
// leaveGroups.
func (s *Server) joinGroups(name service.Name) *groups {
	g := s.groups[name]
	if g == nil {
		n := s.namespaces[name.Namespace]
		if n == nil {
			n = &namespaces{loops: make([]namespace, len(s.workers))}
			s.namespaces[name.Namespace] = n
		}
		n.services++
		g = &groups{loops: make([]group, len(s.workers))}
		for i := range g.loops {
			g.loops[i].namespace = &n.loops[i]
		}
		s.groups[name] = g
	}
	g.ports++
	return g
}

func (s *Server) leaveGroups(name service.Name) {
	g := s.groups[name]
	if g.ports--; g.ports > 0 {
		return
	}
	delete(s.groups, name) // the port's sessions are cut
	n := s.namespaces[name.Namespace]
	if n.services--; n.services == 0 {
		delete(s.namespaces, name.Namespace)
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

// enter takes note of a Service's first session.
func (n *namespace) enter(g *group) {
	g.place = len(n.groups)
	n.groups = append(n.groups, g)
}

// leave takes note that a Service has no session any more.
func (n *namespace) leave(g *group) {
	last := len(n.groups) - 1
	n.groups[g.place] = n.groups[last]
	n.groups[g.place].place = g.place
	n.groups[last] = nil
	n.groups = n.groups[:last]
}

// largest gives the Service with the most sessions. There is one if count > 0.
func (n *namespace) largest() *group {
	largest := n.groups[0]
	for _, g := range n.groups[1:] {
		if g.count > largest.count {
			largest = g
		}
	}
	return largest
}
