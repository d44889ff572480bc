package datagram

import (
	"fmt"
	"net/netip"

	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
)

// handoverName is the name of a listening socket in a take-over.
func (p *listeningKey) handoverName() string {
	family := [...]string{service.IPv4: "IPv4", service.IPv6: "IPv6"}[p.family]
	switch {
	case p.isBound():
		return fmt.Sprintf("UDP bound %s", netip.AddrPortFrom(p.bound.Addr, p.bound.Port))
	case p.isShared():
		return fmt.Sprintf("UDP steered %s shared", family)
	}
	return fmt.Sprintf("UDP steered %s %s", family, p.name)
}

// Pause stops receiving from clients, so that their datagrams wait for the process that takes
// over, or for Resume. Sessions go on: what endpoints send reaches the clients.
func (s *Server) Pause() { s.onListeners((*listener).remove) }

// Resume undoes Pause.
func (s *Server) Resume() { s.onListeners((*listener).listen) }

// Leave closes the listening sockets, because another process has them too: in this one they
// would keep a share of the datagrams if the other one closed and bound a port again. Sessions
// go on; their answers leave by other sockets.
func (s *Server) Leave() {
	s.onListeners((*listener).leave)
	clear(s.listening)
	s.listeningOf = [2]int{}
}

// onListeners runs f for each listening socket on its loop, and waits for it.
func (s *Server) onListeners(f func(*listener)) {
	of := make(map[*worker][]*listener)
	for _, l := range s.listening {
		for _, sh := range l.sockets {
			of[sh.worker] = append(of[sh.worker], sh)
		}
	}
	<-poll.PostAll(s.options.Loops, func(i int) {
		for _, sh := range of[s.workers[i]] {
			f(sh)
		}
	})
}

// Sockets returns the listening sockets for the process that takes over. Several have the same
// name: one for each loop, in the order in which the kernel selects among them.
func (s *Server) Sockets() (list []handover.Socket) {
	for at, l := range s.listening {
		for _, sh := range l.sockets {
			list = append(list, handover.Socket{Name: at.handoverName(), FD: sh.fd})
		}
	}
	return list
}

// Inherit has Listen and Bind take the sockets of the process before, in place of new ones.
// It comes before the first Apply, and Begin after it. The caller closes what is left.
func (s *Server) Inherit(from *handover.Sockets) { s.inherited = from }

// Begin receives what has come to inherited sockets: before the first Apply, no policy could
// decide about it.
func (s *Server) Begin() {
	s.inherited = nil
	for _, l := range s.listening {
		l.listen()
	}
}

// inherit adds the sockets of the process before, which may have had more or fewer loops.
func (s *Server) inherit(at listeningKey, l *listening) error {
	for i, sock := range s.inherited.Take(at.handoverName()) {
		if err := l.add(at, s.workers[i%len(s.workers)], sock.FD); err != nil {
			return err
		}
	}
	return nil
}
