package datagram

import (
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// upstream is a socket to endpoints, registered with its loop for good.
type upstream struct {
	worker    *worker
	session   *session // nil while it is spare, and connected to nothing
	reg       poll.Registration
	fd        int32
	family    service.Family
	once      bool  // bound, or marked as returning: it cannot be used again
	untracked bool  // it passes connection tracking
	trains    bool  // the kernel hands trains over in one piece
	class     uint8 // DSCP of its packets
	noTrain   bool  // the kernel does not send trains from it
	ttl       uint8 // of packets to an endpoint that may lead back to a Service; 0 to another
	// held is the client's address that answers come back to while the socket is
	// open, if the way of steering has to be told: see redirect.Clients.
	held netip.Addr
}

// HandleEvents is told that an endpoint sent something, or that it is closed.
// What it sent before it was closed goes first: then the next refusal counts.
func (u *upstream) HandleEvents(_ uint8, ev poll.Events) {
	w, c := u.worker, u.session
	w.company.events++
	if c == nil {
		u.drain() // it was on its way when the session ended
		return
	}
	closed := false
	if ev&poll.Failed != 0 {
		closed, _ = c.readErrors()
	}
	switch {
	case ev&poll.Readable != 0:
		c.receive()
	case closed:
		c.leave(c.held.count())
		w.opening.endTurn(w.loop.Now())
	}
}

// setHeader has what is sent to the endpoint carry the client's DSCP, and the TTL
// of an endpoint that may lead back to a Service.
func (c *session) setHeader() {
	u := c.upstream
	if u.class != c.outClass && sys.SetClass(int(u.fd), u.family == service.IPv6, c.outClass) == 0 {
		u.class = c.outClass
	}
	if int(u.ttl) > c.ttl && sys.SetTTL(int(u.fd), u.family == service.IPv6, c.ttl) == 0 {
		u.ttl = uint8(c.ttl)
	}
}

// trainBatch is from how many answers at once on a socket takes trains.
const trainBatch = 4

// receive takes what the endpoint sent into the first slots of w.downIn from
// first on, and gives their number. Most sessions have one answer for each
// question: that is received by the cheapest call, and the socket takes trains only
// once answers come in numbers.
func (u *upstream) receive(c *session, w *worker, first int) (int, sys.Errno) {
	n, got := int(c.batch), 1
	before := c.round
	c.round = w.round
	if n == 1 && !u.trains {
		if errno := w.downIn.ReceiveOne(int(u.fd), first); errno != 0 {
			return 0, errno
		}
		if w.round-before > 1 {
			return got, 0
		}
		// The round before had an answer too: there may be more behind this.
	} else {
		var errno sys.Errno
		if got, errno = w.downIn.Receive(int(u.fd), first, n); errno != 0 {
			return 0, errno
		}
	}
	c.batch = uint8(nextBatch(n, got, 1, w.downIn.Slots()))
	if c.batch >= trainBatch && !u.trains {
		// A kernel that cannot goes on handing datagrams over one by one.
		sys.SetCoalesce(int(u.fd))
		u.trains = true
	}
	return got, 0
}

// leastSpare is how many sockets rest before one is used again, as long as new
// ones can be had: what was on its way to a socket when it was disconnected has
// arrived by then, and is thrown away.
const leastSpare = 16

// spares are sockets that can be used again, the one that rested longest first.
type spares struct {
	list []*upstream
	head int
}

func (p *spares) len() int { return len(p.list) - p.head }

func (p *spares) push(u *upstream) {
	if p.head > 0 && len(p.list) == cap(p.list) {
		n := copy(p.list, p.list[p.head:])
		clear(p.list[n:])
		p.list, p.head = p.list[:n], 0
	}
	p.list = append(p.list, u)
}

func (p *spares) pop() *upstream {
	u := p.list[p.head]
	p.list[p.head] = nil
	p.head++
	return u
}

// pool gives the sockets that can be used again of a family, those that pass
// connection tracking or the others.
func (w *worker) pool(f service.Family, untracked bool) *spares {
	if untracked {
		return &w.spares[f][1]
	}
	return &w.spares[f][0]
}

// takeUpstream gives a socket that is connected to nothing, and passes connection
// tracking or not. once says that it is used for this one session alone.
func (w *worker) takeUpstream(f service.Family, untracked, once bool) (*upstream, sys.Errno) {
	pool := w.pool(f, untracked)
	if !once && pool.len() > leastSpare {
		return w.reuse(pool), 0
	}
	fd, errno := sys.UDPSocket(f == service.IPv6)
	if errno != 0 {
		if pool.len() == 0 || once {
			return nil, errno
		}
		return w.reuse(pool), 0
	}
	if untracked {
		if errno = sys.SetTransparent(fd, f == service.IPv6); errno == 0 {
			errno = sys.SetMark(fd, w.server.options.Traits.Replies.Mark)
		}
		if errno != 0 {
			sys.Close(fd)
			return nil, errno
		}
	}
	sys.SetReceiveBuffer(fd, upstreamBuffer) // not vital
	u := &upstream{worker: w, fd: int32(fd), family: f, once: once, untracked: untracked}
	var err error
	if u.reg, err = w.loop.Add(fd, 0, poll.Readable, u); err != nil {
		sys.Close(fd)
		return nil, sys.ENOMEM
	}
	return u, 0
}

// upstreamBuffer is what the kernel may hold of one endpoint's answers, in
// bytes.
const upstreamBuffer = 1 << 20

func (w *worker) reuse(pool *spares) *upstream {
	u := pool.pop()
	u.drain()
	return u
}

// drain throws away what a socket received for a session that ended.
func (u *upstream) drain() {
	u.worker.errors.Drain(int(u.fd))
	sys.Drain(int(u.fd))
}

// giveUpstream takes a socket back.
func (w *worker) giveUpstream(u *upstream) {
	u.session = nil
	pool, other := w.pool(u.family, u.untracked), w.pool(u.family, !u.untracked)
	if u.once || pool.len()+other.len() >= w.maxSpare || sys.DisconnectUDP(int(u.fd)) != 0 {
		w.closeUpstream(u)
		return
	}
	pool.push(u)
}

func (w *worker) closeUpstream(u *upstream) {
	w.loop.Forget(u.reg)
	sys.Close(int(u.fd))
	if u.held.IsValid() {
		w.server.options.Traits.Replies.Clients.Release(u.held)
		u.held = netip.Addr{}
	}
}

// own reports whether an address is this node's own.
func (w *worker) own(a netip.Addr) bool { return w.server.state.Load().host.Has(a) }

// sourceFor gives whose address an endpoint sees.
func (w *worker) sourceFor(v *policy.Verdict, client, endpoint netip.Addr) policy.Source {
	o := &w.server.options
	if !o.Traits.Replies.Diverted || client.IsLinkLocalUnicast() || w.own(endpoint) || o.SameLink(client, endpoint) {
		return policy.SourceNode
	}
	return v.SourceFor(client, endpoint)
}

// connectTo gives a socket that is connected to an endpoint.
func (w *worker) connectTo(ep *service.Endpoint, client netip.Addr, source policy.Source) (*upstream, sys.Errno) {
	o, endpoint := &w.server.options, ep.Addr
	own := w.own(endpoint.Addr())
	untracked := source == policy.SourceNode && o.Traits.Replies.PassTracking(ep, own)
	// The kernel may choose the endpoint's own port, if it is one of those that
	// it gives away. On this node that would connect the socket to itself.
	choose := source == policy.SourceNode && own && w.server.ports.kernelGives(endpoint.Port())
	u, errno := w.takeUpstream(service.FamilyOf(endpoint.Addr()), untracked, source == policy.SourceClient || choose || ep.MayReturn)
	if errno != 0 {
		return nil, errno
	}
	if ep.MayReturn {
		if errno = w.markReturns(u); errno != 0 {
			w.closeUpstream(u)
			return nil, errno
		}
	}
	switch {
	case source == policy.SourceClient:
		var ports [2]uint16
		if ports, errno = w.hold(u, client); errno == 0 {
			errno = w.connectAs(u, endpoint, client, ports)
		}
	case choose:
		errno = w.connectFrom(u, endpoint, sys.Unspecified(endpoint.Addr()), w.server.ports.kernel)
	default:
		errno = sys.ConnectUDP(int(u.fd), endpoint, netip.AddrPort{})
	}
	if errno != 0 {
		w.closeUpstream(u)
		return nil, errno
	}
	return u, 0
}

// markReturns has a socket's datagrams pass steering, and end where they come to
// Services all the same: see session.setHeader.
func (w *worker) markReturns(u *upstream) sys.Errno {
	if mark := w.server.options.Traits.PastMark; mark != 0 {
		if errno := sys.SetMark(int(u.fd), mark); errno != 0 {
			return errno
		}
	}
	u.ttl = redirect.FirstReturnTTL
	return sys.SetTTL(int(u.fd), u.family == service.IPv6, redirect.FirstReturnTTL)
}

// hold gives the ports that a socket with a client's address may have, first and
// last, and has answers come back to it where the way of steering has to be told.
func (w *worker) hold(u *upstream, client netip.Addr) (ports [2]uint16, errno sys.Errno) {
	r := &w.server.options.Traits.Replies
	if r.Clients == nil || w.own(client) {
		return [2]uint16{r.FirstPort, r.LastPort}, 0
	}
	ports, err := r.Clients.Hold(client)
	if err != nil {
		return ports, sys.EADDRNOTAVAIL // the next look at the steering says why
	}
	u.held = client
	return ports, 0
}

// connectAs connects a socket from a client's address. Where answers come back to certain ports only, the port
// is chosen here: those that the kernel gives by itself are none of them.
func (w *worker) connectAs(u *upstream, endpoint netip.AddrPort, client netip.Addr, ports [2]uint16) sys.Errno {
	if ports[0] == 0 || w.own(client) {
		return sys.ConnectUDP(int(u.fd), endpoint, netip.AddrPortFrom(client, 0))
	}
	return w.connectFrom(u, endpoint, client, w.server.ports.repliesWithin(ports))
}

// portTries is how many ports are tried that may be taken.
const portTries = 64

// connectFrom connects a socket from one of some ports, but not from the
// endpoint's own.
func (w *worker) connectFrom(u *upstream, endpoint netip.AddrPort, local netip.Addr, from []uint16) sys.Errno {
	for range min(portTries, len(from)) {
		port := from[rand.IntN(len(from))]
		if port == endpoint.Port() {
			continue
		}
		errno := sys.ConnectUDP(int(u.fd), endpoint, netip.AddrPortFrom(local, port))
		if errno != sys.EADDRINUSE {
			return errno
		}
	}
	return sys.EADDRNOTAVAIL
}

// ports are the local ports that sessions' sockets may be given here. None is
// reserved for servers (net.ipv4.ip_local_reserved_ports).
type ports struct {
	replies     []uint16 // those that answers come back to; none if any will do
	kernel      []uint16 // those that the kernel gives away by itself
	first, last uint16   // the range of these
}

func newPorts(firstReply, lastReply uint16) (p ports) {
	var err error
	if p.first, p.last, err = sys.LocalPortRange(); err != nil {
		p.first, p.last = 32768, 60999
	}
	reserved := sys.ReservedPorts()
	p.kernel = reserved.Without(p.first, p.last)
	if firstReply != 0 {
		p.replies = reserved.Without(firstReply, lastReply)
	}
	return p
}

// repliesWithin gives those of replies from a first to a last one.
func (p *ports) repliesWithin(ends [2]uint16) []uint16 {
	from, _ := slices.BinarySearch(p.replies, ends[0])
	to, last := slices.BinarySearch(p.replies, ends[1])
	if last {
		to++
	}
	return p.replies[from:to]
}

// kernelGives tells whether the kernel may give a port away.
func (p *ports) kernelGives(port uint16) bool { return port >= p.first && port <= p.last }
