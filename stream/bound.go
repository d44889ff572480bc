package stream

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/internal/sockfilter"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// boundSocket is a socket that is bound to a destination itself: to a node port, to
// a Service's address that is one of this node's (A3.15), or, where steering only
// makes addresses local, to any destination. The socket exists whatever the action,
// so that no other program gets the port in between:
//
//	Accept  it listens, with a filter if not every client may connect
//	Drop    it listens with a filter that drops everything (F5); for the grace
//	        period the filter keeps what belongs to handshakes that have begun
//	Refuse  it is bound, and listens where nobody finds it, or not at all, so
//	        that the kernel refuses
type boundSocket struct {
	socket *socket // nil once it is not bound any more
	does   policy.Action
}

// Bind has a socket that is bound to a destination do what the Opening says. On an
// error no socket is bound; the error wraps EADDRINUSE if another program has the
// port.
func (s *Server) Bind(at policy.Opening) error {
	b := s.bound[at.Destination]
	if b == nil {
		sock, does := s.inheritBound(at.Destination)
		if sock == nil {
			return s.bind(at)
		}
		b = &boundSocket{sock, does}
		s.bound[at.Destination] = b
	}
	err := s.change(b, at)
	if err != nil {
		s.Unbind(at.Destination)
	}
	return err
}

// Unbind closes the socket of a destination after the grace period. Established
// connections go on (A8.7).
func (s *Server) Unbind(d service.Destination) {
	b := s.bound[d]
	if b == nil {
		return
	}
	sock := b.socket
	b.socket = nil
	delete(s.bound, d)
	if s.hide(sock) != nil {
		sys.LetGo(sock.fd)
	}
	s.retire(sock, d)
}

// bind makes the socket of a destination that has none.
func (s *Server) bind(at policy.Opening) error {
	sock, err := s.openBound(at, s.grace.at(at.Destination))
	if err != nil {
		return err
	}
	if at.Action == policy.Refuse {
		if errno := sys.StopListening(sock.fd); errno != 0 {
			sys.Close(sock.fd)
			return errno
		}
		sock.hidden, sock.stopped = true, true
	} else {
		s.join(sock)
	}
	s.bound[at.Destination] = &boundSocket{sock, at.Action}
	return nil
}

// openBound makes a listening socket for a destination, with its filter, in place
// of other sockets of ours, if there are any.
func (s *Server) openBound(at policy.Opening, old []*socket) (*socket, error) {
	o := s.config.listenOptions()
	// The address may be tentative (IPv6 duplicate address detection), or go and
	// come back. If an external IP moves to another host, the socket that was bound
	// while it was this node's goes on serving it.
	o.FreeBind = true
	o.Transparent = s.options.Traits.BindEach && at.Kind != service.NodePort
	if at.Limited || at.Action != policy.Accept {
		o.Filter = dropAll
	}
	addr := netip.AddrPortFrom(at.Addr, at.Port)
	var sock *socket
	var err error
	if len(old) == 0 {
		sock, err = listen(addr, o)
	} else {
		sock, err = listenInPlaceOf(old, addr, o)
	}
	if err == nil && at.Action == policy.Accept {
		s.admit(sock, limits(&at))
	}
	return sock, err
}

// limits returns what admit needs of one Opening.
func limits(at *policy.Opening) []*policy.Opening {
	if !at.Limited {
		return nil
	}
	return []*policy.Opening{at}
}

// change has the socket of a destination do something else. A refusing socket
// cannot listen again; it is replaced.
func (s *Server) change(b *boundSocket, at policy.Opening) error {
	switch {
	case at.Action == policy.Refuse:
		if b.does != policy.Refuse {
			if err := s.hide(b.socket); err != nil {
				return err
			}
		}
	case b.does == policy.Refuse:
		again, err := s.openBound(at, append(s.grace.at(at.Destination), b.socket))
		if err != nil {
			return err
		}
		s.join(again)
		s.retire(b.socket, at.Destination)
		b.socket = again
	case at.Action == policy.Drop:
		if errno := b.socket.filter(sockfilter.NoOpenings); errno != 0 {
			return errno
		}
		s.setUnfiltered(b.socket, 0)
		s.grace.drop(b, s.clock())
	case at.Action == policy.Accept:
		s.admit(b.socket, limits(&at))
	}
	b.does = at.Action
	return nil
}

// hide has a socket refuse new connections. Handshakes that have begun go on, where
// the kernel can do that.
func (s *Server) hide(sock *socket) error {
	if sock.hidden {
		return nil
	}
	if sys.Hide(sock.fd) != 0 {
		if errno := sys.StopListening(sock.fd); errno != 0 {
			return errno
		}
		s.leave(sock, nil)
		sock.stopped = true
	}
	sock.hidden = true
	return nil
}
