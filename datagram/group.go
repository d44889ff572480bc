package datagram

import (
	"cmp"
	"slices"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/service"
)

// tally counts the sessions of a part of a loop. It knows the part's place in the list of
// those that have sessions.
type tally struct {
	count int
	index int // while count > 0
}

func (t *tally) own() *tally { return t }

// parts are the parts that have sessions.
type parts[P interface{ own() *tally }] []P

// add counts a new session of a part.
func (l *parts[P]) add(p P) {
	t := p.own()
	if t.count++; t.count == 1 {
		t.index = len(*l)
		*l = append(*l, p)
	}
}

// remove counts a session less, and reports whether it was the part's last one.
func (l *parts[P]) remove(p P) bool {
	t, list := p.own(), *l
	if t.count--; t.count > 0 {
		return false
	}
	last := len(list) - 1
	list[t.index] = list[last]
	list[t.index].own().index = t.index
	clear(list[last:])
	*l = list[:last]
	return true
}

// largest returns the part with the most sessions. There must be one.
func (l parts[P]) largest() P {
	return slices.MaxFunc(l, func(a, b P) int { return cmp.Compare(a.own().count, b.own().count) })
}

// group is the part of one Service on one loop: all of its ports.
type group struct {
	tally     // in namespace.groups
	members   parts[*serviceSessions]
	namespace *namespace
}

// namespace is the part of one namespace on one loop: all of its Services.
type namespace struct {
	tally  // in worker.active
	groups parts[*group]
}

// groups are the groups of one Service, by worker.
type groups struct {
	loops []group
	open  atomic.Int64 // see places
	ports int          // of the Service; the Server's
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
