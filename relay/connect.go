package relay

import (
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Ports is a range of local ports, first to last.
type Ports struct {
	First, Last uint16
	// Always takes every port from the range. Otherwise the kernel chooses
	// until many ports are in TIME_WAIT.
	Always bool
}

// has reports whether a port is one of the range.
func (p Ports) has(port uint16) bool { return port >= p.First && port <= p.Last }

// KernelPorts returns the range that the kernel gives ports away from by itself.
func KernelPorts() Ports {
	first, last, err := sys.LocalPortRange()
	if err != nil {
		first, last = 32768, 60999
	}
	return Ports{First: first, Last: last}
}

// SparePorts returns the range that workers use unless told otherwise: the
// ports above those that the kernel gives away by itself, so that none of those
// is lost to other programs; if there are too few, the upper eighth of them.
func SparePorts() Ports {
	kernel := KernelPorts()
	const enough = 2048
	if kernel.Last <= 65534-enough {
		return Ports{First: kernel.Last + 1, Last: 65534}
	}
	return kernel.upperEighth()
}

func (p Ports) upperEighth() Ports {
	return Ports{First: p.Last - (p.Last-p.First)/8, Last: p.Last}
}

const (
	// timeWait is how long the kernel keeps a port in TIME_WAIT.
	timeWait = int64(60 * time.Second)
	// restBound is how many ports may rest in TIME_WAIT on account of one worker
	// before it chooses ports itself.
	restBound = 1024
	// portTries is how many ports are tried that are still in use by the
	// same endpoint, before the kernel is asked.
	portTries = 8
)

// localPorts chooses the local ports of a worker's connections to endpoints.
//
// When a client closes first and its FIN is passed on, the endpoint's side
// closes second, and the port towards it rests in TIME_WAIT for a minute. The
// kernel does not give such a port to the same endpoint again, and looks through
// ever more of them: at some thousand connections a second its search takes most
// of the time, then none is left. But it lets a socket that is bound to a port of
// its own take over a connection in TIME_WAIT, if both hosts use TCP timestamps
// (RFC 6191), whatever net.ipv4.tcp_tw_reuse says. So once many ports rest,
// the worker goes through a small range of its own, again and again; with it the
// number of resting ports is bounded too.
type localPorts struct {
	ports  Ports
	keep   *sys.PortSet // ports that are never taken
	step   int          // the workers share the range: each takes every step-th port
	next   int
	began  int64  // of the current minute
	now    uint64 // ports that went to rest in the current minute
	before uint64 // in the minute before
}

func newLocalPorts(p Ports, keep *sys.PortSet, worker, workers int) localPorts {
	lp := localPorts{ports: p, keep: keep, step: max(workers, 1), next: worker}
	if n := lp.count(); n > 0 {
		lp.next += lp.step * rand.IntN(n)
	}
	return lp
}

// count is how many ports this worker has.
func (lp *localPorts) count() int {
	return (int(lp.ports.Last) - int(lp.ports.First) + 1) / lp.step
}

// rest notes that a port went into TIME_WAIT.
func (lp *localPorts) rest(now int64) {
	lp.turn(now)
	lp.now++
}

// crowded reports whether to choose ports rather than to let the kernel.
func (lp *localPorts) crowded(now int64) bool {
	if lp.ports.Always || lp.now+lp.before < restBound {
		return lp.ports.Always
	}
	lp.turn(now)
	left := uint64(timeWait - (now - lp.began))
	return lp.now+lp.before*left/uint64(timeWait) >= restBound
}

func (lp *localPorts) turn(now int64) {
	switch age := now - lp.began; {
	case age < timeWait:
	case age < 2*timeWait:
		lp.began, lp.now, lp.before = lp.began+timeWait, 0, lp.now
	default:
		lp.began, lp.now, lp.before = now, 0, 0
	}
}

// choose returns the next port that is not reserved; if all are, the next one.
func (lp *localPorts) choose() (port uint16) {
	for range lp.count() {
		lp.next += lp.step
		if size := int(lp.ports.Last) - int(lp.ports.First) + 1; lp.next >= size {
			lp.next %= lp.step
		}
		if port = lp.ports.First + uint16(lp.next); !lp.keep.Has(port) {
			return port
		}
	}
	return port
}

// Connect begins to connect to an endpoint, as sys.ConnectTCP does, for a link
// of this worker. If local has no port, it finds one, also when thousands rest
// in TIME_WAIT. EADDRNOTAVAIL means that there is none left for this endpoint
// and local address: our own trouble, never the endpoint's.
func (w *Worker) Connect(endpoint, local netip.AddrPort, o sys.ConnectOptions) (int, sys.Errno) {
	if local.Port() != 0 {
		return w.connect(endpoint, local, o)
	}
	if w.ports.crowded(w.loop.Now()) {
		if fd, e := w.connectFrom(&w.ports, endpoint, local.Addr(), o, portTries); e != sys.EADDRNOTAVAIL || w.ports.ports.Always {
			return fd, e
		}
	}
	fd, e := w.connect(endpoint, local, o)
	if e == sys.EADDRNOTAVAIL {
		return w.connectFrom(&w.ports, endpoint, local.Addr(), o, 4*portTries)
	}
	return fd, e
}

// UseReplyPorts says which local ports ConnectAs may use, first to last, where
// not every port will do (F11). It is called before the loop runs or on its
// goroutine. Connect then keeps out of them: a packet to such a port may be taken
// for an answer to a client on another node too.
func (w *Worker) UseReplyPorts(first, last uint16) {
	if p := w.ports.ports; !p.Always && p.First <= last && first <= p.Last {
		w.ports = newLocalPorts(w.config.KernelPorts.upperEighth(), w.config.Reserved, w.number, w.config.Workers)
	}
	w.replyPorts = newLocalPorts(Ports{First: first, Last: last, Always: true}, w.config.Reserved, w.number, w.config.Workers)
}

// ConnectAs is Connect from a client's own address (F7), and from certain ports,
// first and last, if they are not 0.
func (w *Worker) ConnectAs(endpoint netip.AddrPort, client netip.Addr, ports [2]uint16, o sys.ConnectOptions) (int, sys.Errno) {
	o.Transparent = true
	if ports != [2]uint16{} {
		some := newLocalPorts(Ports{First: ports[0], Last: ports[1], Always: true}, w.config.Reserved, w.number, w.config.Workers)
		return w.connectFrom(&some, endpoint, client, o, 4*portTries)
	}
	if w.replyPorts.ports.Last == 0 {
		return w.Connect(endpoint, netip.AddrPortFrom(client, 0), o)
	}
	return w.connectFrom(&w.replyPorts, endpoint, client, o, 4*portTries)
}

// ConnectUntracked is Connect from an address of this node that the kernel
// chooses, past connection tracking: by a transparent socket with a mark.
func (w *Worker) ConnectUntracked(endpoint netip.AddrPort, mark uint32, o sys.ConnectOptions) (int, sys.Errno) {
	o.Transparent, o.Mark = true, mark
	return w.Connect(endpoint, netip.AddrPort{}, o)
}

// ConnectOwn is Connect from this node to an endpoint at an address of this node
// itself. There the local port must not be the endpoint's: while nobody listens
// there TCP would connect the socket to itself (simultaneous open). The kernel
// does choose that port, if it is one of those that it gives away.
func (w *Worker) ConnectOwn(endpoint netip.AddrPort, o sys.ConnectOptions) (int, sys.Errno) {
	if !w.config.KernelPorts.has(endpoint.Port()) {
		return w.Connect(endpoint, netip.AddrPort{}, o)
	}
	fd, e := w.connectFrom(&w.ports, endpoint, netip.Addr{}, o, portTries)
	for range portTries {
		if e != sys.EADDRNOTAVAIL {
			break
		}
		fd, e = w.Connect(endpoint, netip.AddrPort{}, o)
		if local, errno := sys.LocalAddr(fd); errno == 0 && local == endpoint {
			w.kernel.close(fd)
			fd, e = -1, sys.EADDRNOTAVAIL
		}
	}
	return fd, e
}

// connectFrom tries ports that are chosen here, not by the kernel.
func (w *Worker) connectFrom(ports *localPorts, endpoint netip.AddrPort, local netip.Addr, o sys.ConnectOptions, tries int) (fd int, e sys.Errno) {
	if !local.IsValid() {
		local = sys.Unspecified(endpoint.Addr())
	}
	for range min(tries, ports.count()) {
		port := ports.choose()
		if port == endpoint.Port() {
			continue // see ConnectOwn
		}
		fd, e = w.connect(endpoint, netip.AddrPortFrom(local, port), o)
		// The port has a connection to this endpoint, or belongs to somebody
		// who does not share it.
		if e != sys.EADDRNOTAVAIL && e != sys.EADDRINUSE {
			w.stats.Chosen++
			return fd, e
		}
		w.stats.Taken++
	}
	return -1, sys.EADDRNOTAVAIL
}

func (w *Worker) connect(endpoint, local netip.AddrPort, o sys.ConnectOptions) (int, sys.Errno) {
	// Socket, SO_LINGER, SO_OOBINLINE, connect; for a local address bind, and
	// SO_REUSEADDR or IP_BIND_ADDRESS_NO_PORT; IP_TRANSPARENT.
	calls := uint64(4)
	if o.Congestion != "" {
		calls++
	}
	if o.Mark != 0 {
		calls++
	}
	if o.TTL != 0 {
		calls++
	}
	if o.Transparent {
		calls++
	}
	if local.Addr().IsValid() {
		calls += 2
	}
	w.stats.Dials += calls
	return w.kernel.connect(endpoint, local, o)
}
