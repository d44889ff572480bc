package stream

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// listening is where the kernel queues the connections of one service port, or,
// when there are very many ports, of several: a listening socket for each family
// that is needed. The sockets are bound to loopback addresses, so that they open no
// port to the outside; only steering leads to them. The Server owns them; workers
// accept from them.
type listening struct {
	sides [2]side // by service.Family
	ports int     // service ports that use it
}

// side is the part of one family.
type side struct {
	socket *socket // nil while it is not needed
	port   uint16
	ranges map[service.Destination]*policy.Opening // those that are Limited
	stale  bool                                    // the filter does not say what ranges do
}

// Listen returns the listening socket to which connections to a destination must be
// steered to, and opens it if necessary. Its filter admits the clients that the
// Opening allows once Apply has returned.
func (s *Server) Listen(at policy.Opening) (redirect.Target, error) {
	l := s.listening[at.Name]
	if l == nil {
		l = s.assign()
		s.listening[at.Name] = l
		l.count(1)
	}
	f := service.FamilyOf(at.Addr)
	sd := &l.sides[f]
	if sd.socket == nil {
		if err := s.openSide(l, f, at.Name); err != nil {
			return redirect.Target{}, fmt.Errorf("service %s: %w", at.Name, err)
		}
	}
	if at.Limited {
		if sd.ranges == nil {
			sd.ranges = make(map[service.Destination]*policy.Opening)
		}
		sd.ranges[at.Destination] = &at
		s.setStale(sd)
	}
	return redirect.Target{Port: sd.port, FD: sd.socket.fd}, nil
}

// Unlisten says that a destination is not steered to its listening socket any more,
// or that Listen will be called for it again.
func (s *Server) Unlisten(at policy.Opening) {
	if l := s.listening[at.Name]; l != nil {
		if sd := &l.sides[service.FamilyOf(at.Addr)]; sd.ranges[at.Destination] != nil {
			delete(sd.ranges, at.Destination)
			s.setStale(sd)
		}
	}
}

func (s *Server) setStale(sd *side) {
	if !sd.stale {
		sd.stale = true
		s.stale = append(s.stale, sd)
	}
}

// updateFilters brings the filters of listening sockets up to date.
func (s *Server) updateFilters() {
	for _, sd := range s.stale {
		sd.stale = false
		if sd.socket != nil {
			s.admit(sd.socket, slices.Collect(maps.Values(sd.ranges)))
		}
	}
	s.stale = nil
}

// assign returns new listening sockets as long as the bound allows, else those with
// the fewest service ports.
func (s *Server) assign() *listening {
	if len(s.shared) < s.config.MaxListeners {
		l := new(listening)
		s.shared = append(s.shared, l)
		return l
	}
	s.once.Warn("listening sockets", fmt.Errorf("more than %d service ports: some share a listening socket, and with it its queue", s.config.MaxListeners))
	least := s.shared[0]
	for _, l := range s.shared[1:] {
		if l.ports < least.ports {
			least = l
		}
	}
	return least
}

// openSide opens the listening socket of a family, or takes that of the process before.
func (s *Server) openSide(l *listening, f service.Family, name service.PortName) error {
	sock := s.inheritSide(name.String(), f)
	if sock != nil {
		s.setStale(&l.sides[f])
	} else {
		o := s.config.listenOptions()
		o.Transparent = true
		var err error
		if sock, err = listen(netip.AddrPortFrom(redirect.ListenAddress(f), 0), o); err != nil {
			return err
		}
	}
	addr, errno := sys.LocalAddr(sock.fd)
	if errno != 0 {
		sys.Close(sock.fd)
		return fmt.Errorf("address of a listening socket: %w", errno)
	}
	l.sides[f].socket, l.sides[f].port = sock, addr.Port()
	l.count(0)
	s.join(sock)
	return nil
}

// count notes service ports that begin or cease to use the sockets.
func (l *listening) count(more int) {
	l.ports += more
	for f := range l.sides {
		if s := l.sides[f].socket; s != nil {
			s.shared.Store(l.ports > 1)
		}
	}
}

// unlisten takes a service port off its listening sockets, and closes them after
// the grace period if no other port uses them.
func (s *Server) unlisten(name service.PortName) {
	l := s.listening[name]
	if l == nil {
		return
	}
	delete(s.listening, name)
	if l.count(-1); l.ports > 0 {
		return
	}
	i := slices.Index(s.shared, l)
	s.shared[i] = s.shared[len(s.shared)-1]
	s.shared = s.shared[:len(s.shared)-1]
	for f := range l.sides {
		if sock := l.sides[f].socket; sock != nil {
			s.retire(sock, service.Destination{})
		}
	}
}
