package datagram

import "github.com/sluice-proxy/sluice/service"

// group is the part of one Service on one loop: all of its ports.
type group struct {
	members []*serviceSessions // those with sessions
	count   int                // of sessions
	index   int                // in namespace.groups while count > 0

	namespace *namespace
}

// namespace is the part of one namespace on one loop: all of its Services.
type namespace struct {
	groups []*group // those with sessions
	count  int      // of sessions
	index  int      // in worker.active while count > 0
}

// groups are the groups of one Service, by worker.
type groups struct {
	loops []group
	ports int // of the Service; the Server's
}

// namespaces are the parts of one namespace, by worker.
type namespaces struct {
	loops    []namespace
	services int // number of served Services of the namespace; used by the Server only
}

// joinGroups returns the groups of a service port and counts the port until
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

// add adds a service port that has its first session.
func (g *group) add(h *serviceSessions) {
	h.index = len(g.members)
	g.members = append(g.members, h)
}

// remove removes a service port that has no session any more.
func (g *group) remove(h *serviceSessions) {
	last := len(g.members) - 1
	g.members[h.index] = g.members[last]
	g.members[h.index].index = h.index
	g.members[last] = nil
	g.members = g.members[:last]
}

// largest returns the service port with the most sessions. There is one if count > 0.
func (g *group) largest() *serviceSessions {
	largest := g.members[0]
	for _, h := range g.members[1:] {
		if h.count > largest.count {
			largest = h
		}
	}
	return largest
}

// add adds a Service that has its first session.
func (n *namespace) add(g *group) {
	g.index = len(n.groups)
	n.groups = append(n.groups, g)
}

// remove removes a Service that has no session any more.
func (n *namespace) remove(g *group) {
	last := len(n.groups) - 1
	n.groups[g.index] = n.groups[last]
	n.groups[g.index].index = g.index
	n.groups[last] = nil
	n.groups = n.groups[:last]
}

// largest returns the Service with the most sessions. There is one if count > 0.
func (n *namespace) largest() *group {
	largest := n.groups[0]
	for _, g := range n.groups[1:] {
		if g.count > largest.count {
			largest = g
		}
	}
	return largest
}
