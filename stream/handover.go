package stream

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// Names of sockets in a take-over. A steered socket that several service ports share has
// the name sharedPorts in place of one of a service port.
const sharedPorts = "shared"

func steeredName(ports string, f service.Family) string {
	return fmt.Sprintf("TCP steered %s %s", [...]string{service.IPv4: "IPv4", service.IPv6: "IPv6"}[f], ports)
}

func boundName(d service.Destination) string {
	return fmt.Sprintf("%s bound %s", d.Protocol, netip.AddrPortFrom(d.Addr, d.Port))
}

// Sockets returns the listening sockets for the process that takes over. Those in their grace
// period stay here.
func (s *Server) Sockets() (list []handover.Socket) {
	for name, l := range s.listening {
		if l.ports == 1 {
			list = l.appendTo(list, name.String())
		}
	}
	for _, l := range s.shared {
		if l.ports > 1 {
			list = l.appendTo(list, sharedPorts)
		}
	}
	for d, b := range s.bound {
		list = append(list, handover.Socket{Name: boundName(d), State: b.socket.state(b.does), FD: b.socket.fd})
	}
	for d, b := range s.sctp.bound {
		list = append(list, handover.Socket{Name: boundName(d), State: b.socket.state(b.does), FD: b.fd})
	}
	return list
}

func (l *listening) appendTo(list []handover.Socket, ports string) []handover.Socket {
	for f := range l.sides {
		if sock := l.sides[f].socket; sock != nil {
			list = append(list, handover.Socket{Name: steeredName(ports, service.Family(f)), State: sock.state(policy.Accept), FD: sock.fd})
		}
	}
	return list
}

// What is said of a socket beside what it does.
const (
	isStopped  = "stopped"  // it refuses, and does not listen
	isFiltered = "filtered" // it has had a filter
)

// state says what a socket does.
func (s *socket) state(does policy.Action) string {
	state := does.String()
	if s.stopped {
		state += " " + isStopped
	}
	if s.filtered.Load() {
		state += " " + isFiltered
	}
	return state
}

// inheritedSocket returns a socket of the process before, and what it does.
func inheritedSocket(from handover.Socket, protocol service.Protocol) (*socket, policy.Action) {
	sock := &socket{fd: from.FD, protocol: protocol}
	does := policy.Refuse
	for _, word := range strings.Fields(from.State) {
		switch word {
		case policy.Accept.String():
			does = policy.Accept
		case policy.Drop.String():
			does = policy.Drop
		case isStopped:
			sock.stopped = true
		case isFiltered:
			sock.filtered.Store(true)
		}
	}
	sock.hidden = protocol == service.TCP && does == policy.Refuse
	return sock, does
}

// Inherit has Listen and Bind take the sockets of the process before, in place of new ones.
// It comes before the first Apply, and Begin after it. The caller closes what is left.
func (s *Server) Inherit(from *handover.Sockets) { s.inherited = from }

// Begin accepts what has come to inherited sockets: before the first Apply, no policy could
// decide about it.
func (s *Server) Begin() {
	s.inherited = nil
	for _, sock := range s.waiting {
		if !sock.stopped {
			s.accept(sock)
		}
	}
	s.waiting = nil
}

// inheritSide returns the listening socket that a service port had in the process before, or
// one that several shared; nil if there is none.
func (s *Server) inheritSide(ports string, f service.Family) *socket {
	for _, name := range []string{ports, sharedPorts} {
		if from, ok := s.inherited.TakeOne(steeredName(name, f)); ok {
			sock, _ := inheritedSocket(from, service.TCP)
			return sock
		}
	}
	return nil
}

// inheritBound returns the socket of a destination in the process before, and what it does;
// nil if there is none.
func (s *Server) inheritBound(d service.Destination) (*socket, policy.Action) {
	from, ok := s.inherited.TakeOne(boundName(d))
	if !ok {
		return nil, policy.None
	}
	sock, does := inheritedSocket(from, d.Protocol)
	if !sock.stopped {
		s.join(sock)
	}
	return sock, does
}

// Leave stops accepting, because another process has the listening sockets, and returns when
// they are closed here. What waits in their queues is accepted once more: the other one may
// have no use for a socket. Open connections go on.
func (s *Server) Leave() {
	for _, b := range s.bound {
		s.discard(b.socket)
	}
	for _, b := range s.sctp.bound {
		s.discard(b.socket)
	}
	for _, l := range s.shared {
		for f := range l.sides {
			if sock := l.sides[f].socket; sock != nil {
				s.discard(sock)
				l.sides[f].socket = nil
			}
		}
	}
	for _, c := range s.grace.closing {
		s.discard(c.socket)
	}
	s.grace = grace{}
	s.waiting = nil
	clear(s.bound)
	clear(s.sctp.bound)
	clear(s.listening)
	s.shared = nil
	<-poll.PostAll(s.loops, func(int) {})
}
