package listener

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// lane is where the kernel queues the connections of one service port, or, when
// there are very many ports, of several: a listening socket for each family
// that is needed. It is bound to a loopback address, so that it opens no port
// to anybody; only steering leads to it. The manager owns it; workers accept
// from its sockets.
type lane struct {
	sockets [2]socket // by service.Family
	ports   int       // service ports that use it
}

// socket is one listening socket of a lane.
type socket struct {
	fd   int
	port uint16 // 0 while there is no socket
}

// laneAddress gives the address that lanes of a family are bound to.
func laneAddress(f service.Family) netip.Addr {
	if f == service.IPv4 {
		return redirect.ListenIPv4
	}
	return redirect.ListenIPv6
}

// open makes the socket of a family.
func (l *lane) open(f service.Family, cfg *Config) error {
	fd, err := sys.ListenTCP(netip.AddrPortFrom(laneAddress(f), 0), sys.ListenOptions{
		Transparent: true,
		Backlog:     cfg.Backlog,
		Liveness:    Liveness(cfg.KeepAlive),
		Congestion:  cfg.Congestion,
	})
	if err != nil {
		return err
	}
	addr, errno := sys.LocalAddr(fd)
	if errno != 0 {
		sys.Close(fd)
		return fmt.Errorf("listener's own address: %w", errno)
	}
	l.sockets[f] = socket{fd: fd, port: addr.Port()}
	return nil
}

// keepAliveProbes is how many probes stay unanswered before a connection is
// given up, a third of the idle time apart.
const keepAliveProbes = 3

// Liveness gives the options that find out a peer that is gone, on both sides
// of a connection: it is probed when it was quiet for keepAlive and given up
// after twice the time, whether it is silent or leaves data unacknowledged
// (TCP_USER_TIMEOUT is idle + count x interval).
func Liveness(keepAlive time.Duration) sys.Liveness {
	if keepAlive <= 0 {
		return sys.Liveness{}
	}
	return sys.Liveness{
		Idle:        keepAlive,
		Interval:    keepAlive / keepAliveProbes,
		Count:       keepAliveProbes,
		UserTimeout: 2 * keepAlive,
	}
}

// close closes what open made, as soon as every worker has let go of it. What
// still waits in the queues is reset by the kernel. It gives the number of
// sockets.
func (l *lane) close(workers []*worker) (closed int) {
	for f := range l.sockets {
		s := &l.sockets[f]
		if s.port == 0 {
			continue
		}
		closed++
		fd := s.fd
		*s = socket{}
		var holders atomic.Int32
		holders.Store(int32(len(workers)))
		for _, w := range workers {
			w.post(func() {
				w.leave(fd)
				if holders.Add(-1) == 0 {
					sys.Close(fd)
				}
			})
		}
	}
	return closed
}
