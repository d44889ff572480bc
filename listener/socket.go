package listener

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
)

// socket is a listening socket that all workers accept from. The manager owns
// it; workers hold it until they have left it.
type socket struct {
	fd int
	// filtered says that it has had a filter. What it accepts may have
	// inherited one then.
	filtered atomic.Bool
	// shared says that several service ports' connections come by it.
	shared atomic.Bool
	// unguarded is how many destinations its filter leaves out for want of
	// room. The manager's.
	unguarded int
	// counted says that it is among Stats.Listeners. The manager's.
	counted bool
	// hidden says that no new connection finds it, and stopped that it does not
	// listen either. The manager's.
	hidden, stopped bool
}

// listen makes a listening socket that nobody accepts from yet.
func listen(addr netip.AddrPort, o sys.ListenOptions) (*socket, error) {
	fd, err := sys.ListenTCP(addr, o)
	if err != nil {
		return nil, err
	}
	return newSocket(fd, o), nil
}

func newSocket(fd int, o sys.ListenOptions) *socket {
	s := &socket{fd: fd}
	s.filtered.Store(len(o.Filter) > 0)
	return s
}

// listenInPlaceOf is listen where hidden sockets of ours are.
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

// listenOptions gives what lanes and claims have in common.
func (cfg *Config) listenOptions() sys.ListenOptions {
	return sys.ListenOptions{
		Backlog:    cfg.Backlog,
		MinTTL:     redirect.ReturnTTL + 1,
		Liveness:   Liveness(cfg.KeepAlive),
		Congestion: cfg.Congestion,
	}
}

// filter puts a program in force, in place of the one before. Where there is no
// room for both at once, nobody is answered for a moment; clients ask again.
func (s *socket) filter(program []sys.FilterOp) sys.Errno {
	s.filtered.Store(true)
	errno := sys.AttachFilter(s.fd, program)
	if errno == sys.ENOMEM {
		if errno = sys.AttachFilter(s.fd, nobody); errno == 0 {
			errno = sys.AttachFilter(s.fd, program)
		}
	}
	return errno
}

// unfilter lets everybody in.
func (s *socket) unfilter() {
	if s.filtered.Load() {
		sys.DetachFilter(s.fd) // it may have none any more
	}
}

// join has all workers accept from a socket.
func (m *Manager) join(s *socket) {
	s.counted = true
	m.stats.listeners.Add(1)
	for _, w := range m.workers {
		w.post(func() { w.join(s) })
	}
}

// uncount takes a socket out of those that are counted.
func (m *Manager) uncount(s *socket) {
	if s.counted {
		s.counted = false
		m.stats.listeners.Add(-1)
	}
}

// leave has no worker accept from a socket any more, but for what waits in its
// queue. When all have let go of it, then is called, on one of their loops.
func (m *Manager) leave(s *socket, then func()) {
	m.uncount(s)
	var holders atomic.Int32
	holders.Store(int32(len(m.workers)))
	for _, w := range m.workers {
		w.post(func() {
			w.leave(s)
			if holders.Add(-1) == 0 && then != nil {
				then()
			}
		})
	}
}

// discard closes a socket as soon as every worker has let go of it. A handshake
// that is not complete by then is reset by the kernel.
func (m *Manager) discard(s *socket) {
	m.leftOpen(s, 0)
	m.leave(s, func() { sys.Close(s.fd) })
}

// keepAliveProbes is how many probes stay unanswered before a connection is
// given up, a third of the idle time apart.
const keepAliveProbes = 3

// Liveness gives the options that find out a peer that is gone, on both sides
// of a connection: it is probed when it was quiet for keepAlive and given up
// after twice the time. While data is unacknowledged the kernel does not probe:
// see relay.Config.GoneAfter.
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
