package stream

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// socket is a listening socket that all workers accept from. The Server owns it;
// workers use it until they have left it.
type socket struct {
	fd       int
	protocol service.Protocol
	// filtered says that it has had a filter. Accepted sockets may have
	// inherited it.
	filtered atomic.Bool
	// shared says that several service ports' connections come by it.
	shared atomic.Bool
	// unfiltered is how many destinations with source ranges its filter has no
	// room for. The Server's.
	unfiltered int
	// counted says that Stats.Listeners counts it. The Server's.
	counted bool
	// hidden says that no new connection finds it, and stopped that it does not
	// listen either. The Server's.
	hidden, stopped bool
}

// listen makes a listening socket that no worker accepts from yet.
func listen(addr netip.AddrPort, o sys.ListenOptions) (*socket, error) {
	fd, err := sys.ListenTCP(addr, o)
	if err != nil {
		return nil, err
	}
	return newSocket(fd, o), nil
}

func newSocket(fd int, o sys.ListenOptions) *socket {
	s := &socket{fd: fd, protocol: service.TCP}
	s.filtered.Store(len(o.Filter) > 0)
	return s
}

// listenInPlaceOf is listen at an address where hidden sockets of ours are bound.
func listenInPlaceOf(old []*socket, addr netip.AddrPort, o sys.ListenOptions) (*socket, error) {
	fds := make([]int, len(old))
	for i, s := range old {
		fds[i] = s.fd
	}
	fd, err := sys.ListenInPlaceOf(fds, addr, o)
	if err != nil {
		return nil, err
	}
	return newSocket(fd, o), nil
}

// listenOptions returns the options that all listening sockets have in common.
func (cfg *Config) listenOptions() sys.ListenOptions {
	return sys.ListenOptions{
		Backlog:    cfg.Backlog,
		MinTTL:     redirect.ReturnTTL + 1,
		Liveness:   Liveness(cfg.KeepAlive),
		Congestion: cfg.Congestion,
	}
}

// filter attaches a program in place of the one before. Where the kernel has no room
// for both at once, every packet is dropped for a moment; clients send it again.
func (s *socket) filter(program []sys.FilterOp) sys.Errno {
	s.filtered.Store(true)
	errno := sys.AttachFilter(s.fd, program)
	if errno == sys.ENOMEM {
		if errno = sys.AttachFilter(s.fd, dropAll); errno == 0 {
			errno = sys.AttachFilter(s.fd, program)
		}
	}
	return errno
}

// unfilter has the socket answer every client.
func (s *socket) unfilter() {
	if s.filtered.Load() {
		sys.DetachFilter(s.fd) // it may have none any more
	}
}

// join has all workers accept from a socket, after a take-over only once Begin is called.
func (s *Server) join(sock *socket) {
	sock.counted = true
	s.stats.listeners.Add(1)
	if s.inherited != nil {
		s.waiting = append(s.waiting, sock)
		return
	}
	s.accept(sock)
}

// accept has all workers accept from a socket.
func (s *Server) accept(sock *socket) {
	for _, w := range s.workers {
		w.post(func() { w.join(sock) })
	}
}

// uncount takes a socket out of Stats.Listeners.
func (s *Server) uncount(sock *socket) {
	if sock.counted {
		sock.counted = false
		s.stats.listeners.Add(-1)
	}
}

// leave has all workers stop accepting from a socket, after they have accepted what
// waits in its queue. When all have done so, then is called, on one of their loops.
func (s *Server) leave(sock *socket, then func()) {
	s.uncount(sock)
	var holders atomic.Int32
	holders.Store(int32(len(s.workers)))
	for _, w := range s.workers {
		w.post(func() {
			w.leave(sock)
			if holders.Add(-1) == 0 && then != nil {
				then()
			}
		})
	}
}

// discard closes a socket as soon as every worker has left it. The kernel resets
// handshakes that are not complete by then.
func (s *Server) discard(sock *socket) {
	s.setUnfiltered(sock, 0)
	s.leave(sock, func() { sys.Close(sock.fd) })
}

// keepAliveProbes is how many probes, a third of the idle time apart, stay unanswered
// before a connection is given up.
const keepAliveProbes = 3

// Liveness returns the options by which the kernel notices that a peer is gone, for
// both sides of a connection: the peer is probed when it was quiet for keepAlive, and
// given up after twice the time. The kernel does not probe while data is
// unacknowledged: see relay.Config.GoneAfter.
func Liveness(keepAlive time.Duration) sys.Liveness {
	if keepAlive <= 0 {
		return sys.Liveness{}
	}
	return sys.Liveness{
		Idle:     keepAlive,
		Interval: keepAlive / keepAliveProbes,
		Count:    keepAliveProbes,
	}
}
