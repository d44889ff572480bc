package upstream

import (
	"math/rand/v2"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	// timeWait is how long the kernel keeps a port in TIME_WAIT.
	timeWait = int64(60 * time.Second)
	// maxResting is how many ports may be in TIME_WAIT on account of one Dialer
	// before it chooses ports itself.
	maxResting = 1024
	// portTries is how many ports are tried that are still in use by the
	// same endpoint, before the kernel is asked.
	portTries = 8
)

// localPorts chooses the local ports of a Dialer's connections to endpoints.
//
// When a client closes first and its FIN is passed on, the endpoint's side closes
// second, and the port towards it stays in TIME_WAIT for a minute. The kernel does not
// assign such a port for the same endpoint again, and searches ever more of them: at some
// thousand connections a second its search takes most of the time, then no port is left.
// But it lets a socket that is bound to a port take over a connection in TIME_WAIT, if
// both hosts use TCP timestamps (RFC 6191), whatever net.ipv4.tcp_tw_reuse says. So once
// many ports are in TIME_WAIT, the Dialer uses a small range of its own again and again;
// this bounds the number of ports in TIME_WAIT too.
type localPorts struct {
	ports  Range
	always bool         // choose every port; otherwise the kernel does until many are in TIME_WAIT
	keep   *sys.PortSet // ports that are never used
	step   int          // the Dialers share the range: each uses every step-th port
	next   int
	began  int64  // of the current minute
	now    uint64 // ports that entered TIME_WAIT in the current minute
	before uint64 // in the minute before
}

func newLocalPorts(r Range, always bool, keep *sys.PortSet, dialer, dialers int) localPorts {
	lp := localPorts{ports: r, always: always, keep: keep, step: max(dialers, 1), next: dialer}
	if n := lp.count(); n > 0 {
		lp.next += lp.step * rand.IntN(n)
	}
	return lp
}

// count is how many ports this Dialer has.
func (lp *localPorts) count() int {
	return (int(lp.ports.Last) - int(lp.ports.First) + 1) / lp.step
}

// rest notes that a port entered TIME_WAIT.
func (lp *localPorts) rest(now int64) {
	lp.turn(now)
	lp.now++
}

// crowded reports whether to choose ports rather than to let the kernel.
func (lp *localPorts) crowded(now int64) bool {
	if lp.always || lp.now+lp.before < maxResting {
		return lp.always
	}
	lp.turn(now)
	left := uint64(timeWait - (now - lp.began))
	return lp.now+lp.before*left/uint64(timeWait) >= maxResting
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

// Dialer connects the sockets of one event loop's connections to endpoints.
type Dialer struct {
	rules   *Rules
	now     func() int64 // the loop's
	dial    func(remote, local netip.AddrPort, o sys.ConnectOptions) (int, sys.Errno)
	ports   localPorts
	replies localPorts // for clients' addresses, where not every port will do
	number  int        // among the Dialers, from 0
	dialers int
	calls   atomic.Uint64
	sources sources // for SCTP
}

// NewDialer returns the Dialer of the loop with a number, from 0, among so many loops.
func (r *Rules) NewDialer(now func() int64, number, loops int) *Dialer {
	return &Dialer{
		rules: r, now: now, dial: sys.ConnectTCP, number: number, dialers: loops,
		ports:   newLocalPorts(r.spare, false, r.reserved, number, loops),
		replies: newLocalPorts(r.replyRange(), true, r.reserved, number, loops),
	}
}

// Calls returns the number of system calls that Connect has made. It may be called from
// any goroutine.
func (d *Dialer) Calls() uint64 { return d.calls.Load() }

// Rest notes that the local port of a connection entered TIME_WAIT: its client closed
// first.
func (d *Dialer) Rest() { d.ports.rest(d.now()) }

// Connect begins to connect to an endpoint as a Choice says; the options' Mark and
// Transparent are set here. held is what Hold returned. It finds a local port also when
// thousands are in TIME_WAIT. EADDRNOTAVAIL means that none is left for this endpoint and
// local address: the node's own problem, never the endpoint's. Where the endpoint sees the
// node's address, a client with a privileged port gets such a port, if one is free.
func (d *Dialer) Connect(c *Choice, endpoint, client netip.AddrPort, held Range, o sys.ConnectOptions) (int, sys.Errno) {
	if isPrivileged(client) {
		if fd, e, done := d.connectPrivileged(c, endpoint, client, o); done {
			return fd, e
		}
	}
	o.Mark = c.Mark
	switch c.Kind {
	case Untracked:
		o.Transparent = true
	case ToOwn:
		return d.connectOwn(endpoint, o)
	case FromOwnClient:
		return d.connect(endpoint, client.Addr(), o)
	case FromClient:
		return d.connectAs(endpoint, client.Addr(), held, o)
	}
	return d.connect(endpoint, netip.Addr{}, o)
}

// connect connects from an address, or any of the node's.
func (d *Dialer) connect(endpoint netip.AddrPort, local netip.Addr, o sys.ConnectOptions) (int, sys.Errno) {
	if d.ports.crowded(d.now()) {
		if fd, e := d.connectFrom(&d.ports, endpoint, local, o, portTries); e != sys.EADDRNOTAVAIL || d.ports.always {
			return fd, e
		}
	}
	fd, e := d.try(endpoint, netip.AddrPortFrom(local, 0), o)
	if e == sys.EADDRNOTAVAIL {
		return d.connectFrom(&d.ports, endpoint, local, o, 4*portTries)
	}
	return fd, e
}

// connectAs connects from a client's own address, which is not the node's (F7).
func (d *Dialer) connectAs(endpoint netip.AddrPort, client netip.Addr, held Range, o sys.ConnectOptions) (int, sys.Errno) {
	o.Transparent = true
	ports := &d.replies
	if held != (Range{}) {
		some := newLocalPorts(held, true, d.rules.reserved, d.number, d.dialers)
		ports = &some
	}
	if ports.ports.Last == 0 {
		return d.connect(endpoint, client, o)
	}
	return d.connectFrom(ports, endpoint, client, o, 4*portTries)
}

// connectOwn connects to an endpoint at an address of this node; see ToOwn.
func (d *Dialer) connectOwn(endpoint netip.AddrPort, o sys.ConnectOptions) (int, sys.Errno) {
	fd, e := d.connectFrom(&d.ports, endpoint, netip.Addr{}, o, portTries)
	for range portTries {
		if e != sys.EADDRNOTAVAIL {
			break
		}
		fd, e = d.connect(endpoint, netip.Addr{}, o)
		if local, errno := sys.LocalAddr(fd); errno == 0 && local == endpoint {
			sys.Close(fd)
			fd, e = -1, sys.EADDRNOTAVAIL
		}
	}
	return fd, e
}

// connectFrom tries ports that are chosen here, not by the kernel.
func (d *Dialer) connectFrom(ports *localPorts, endpoint netip.AddrPort, local netip.Addr, o sys.ConnectOptions, tries int) (fd int, e sys.Errno) {
	if !local.IsValid() {
		local = sys.Unspecified(endpoint.Addr())
	}
	for range min(tries, ports.count()) {
		port := ports.choose()
		if port == endpoint.Port() {
			continue // see ToOwn
		}
		fd, e = d.try(endpoint, netip.AddrPortFrom(local, port), o)
		// The port has a connection to this endpoint, or belongs to a socket that
		// does not share it.
		if e != sys.EADDRNOTAVAIL && e != sys.EADDRINUSE {
			return fd, e
		}
	}
	return -1, sys.EADDRNOTAVAIL
}

// try connects from one address and port.
func (d *Dialer) try(endpoint, local netip.AddrPort, o sys.ConnectOptions) (int, sys.Errno) {
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
	d.calls.Add(calls)
	return d.dial(endpoint, local, o)
}
