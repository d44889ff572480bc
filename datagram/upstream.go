package datagram

import (
	"math/rand/v2"
	"net/netip"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// upstream is a socket to endpoints, registered with its loop for good.
type upstream struct {
	worker  *worker
	session *session // nil while it is spare, and connected to nothing
	reg     poll.Registration
	fd      int32
	family  service.Family
	bound   bool // to a client's address: it cannot be used again
	trains  bool // the kernel hands trains over in one piece
	noTrain bool // the kernel does not send trains from it
}

// HandleEvents is told that an endpoint sent something, or that it is closed.
func (u *upstream) HandleEvents(uint8, poll.Events) {
	u.worker.company.events++
	if u.session == nil {
		sys.Drain(int(u.fd)) // it was on its way when the session ended
		return
	}
	u.session.receive()
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

// takeUpstream gives a socket that is connected to nothing. fresh says that it
// must not have been used before.
func (w *worker) takeUpstream(f service.Family, fresh bool) (*upstream, sys.Errno) {
	pool := &w.spares[f]
	if !fresh && pool.len() > leastSpare {
		return w.reuse(pool), 0
	}
	fd, errno := sys.UDPSocket(f == service.IPv6)
	if errno != 0 {
		if pool.len() == 0 || fresh {
			return nil, errno
		}
		return w.reuse(pool), 0
	}
	sys.SetReceiveBuffer(fd, upstreamBuffer) // not vital
	u := &upstream{worker: w, fd: int32(fd), family: f, bound: fresh}
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
	sys.Drain(int(u.fd))
	return u
}

// giveUpstream takes a socket back.
func (w *worker) giveUpstream(u *upstream) {
	u.session = nil
	pool := &w.spares[u.family]
	if u.bound || pool.len() >= w.maxSpare || sys.DisconnectUDP(int(u.fd)) != 0 {
		w.closeUpstream(u)
		return
	}
	pool.push(u)
}

func (w *worker) closeUpstream(u *upstream) {
	w.loop.Forget(u.reg)
	sys.Close(int(u.fd))
}

// sourceFor gives whose address an endpoint sees.
func (w *worker) sourceFor(v *policy.Verdict, client, endpoint netip.Addr) policy.Source {
	o := &w.server.options
	if !o.Replies.Diverted || client.IsLinkLocalUnicast() || o.OwnAddress(endpoint) || o.SameLink(client, endpoint) {
		return policy.SourceNode
	}
	return v.SourceFor(client, endpoint)
}

// connectTo gives a socket that is connected to an endpoint.
func (w *worker) connectTo(ep *service.Endpoint, client netip.Addr, source policy.Source) (*upstream, sys.Errno) {
	o, endpoint := &w.server.options, ep.Addr
	untracked := source == policy.SourceNode && o.Replies.PassTracking(ep.InCluster(), o.OwnAddress(endpoint.Addr()))
	u, errno := w.takeUpstream(service.FamilyOf(endpoint.Addr()), source == policy.SourceClient || untracked)
	if errno != 0 {
		return nil, errno
	}
	switch {
	case source == policy.SourceClient:
		errno = w.connectAs(u, endpoint, client)
	case untracked:
		errno = w.connectUntracked(u, endpoint)
	default:
		errno = sys.ConnectUDP(int(u.fd), endpoint, netip.AddrPort{})
	}
	if errno != 0 {
		w.closeUpstream(u)
		return nil, errno
	}
	return u, 0
}

// connectUntracked connects a socket from the node's address, past connection
// tracking, or as any other when no port of the range is left.
func (w *worker) connectUntracked(u *upstream, endpoint netip.AddrPort) sys.Errno {
	mark := w.server.options.Replies.Mark
	if mark != 0 {
		if errno := sys.SetMark(int(u.fd), mark); errno != 0 {
			return errno
		}
	}
	errno := w.connectAs(u, endpoint, sys.Unspecified(endpoint.Addr()))
	if errno != sys.EADDRNOTAVAIL {
		return errno
	}
	if mark != 0 {
		if errno := sys.SetMark(int(u.fd), 0); errno != 0 {
			return errno
		}
	}
	return sys.ConnectUDP(int(u.fd), endpoint, netip.AddrPort{})
}

// portTries is how many ports are tried that may be taken.
const portTries = 64

// connectAs connects a socket from a client's address, or from the node's where
// that is unspecified. Where answers come back to certain ports only, the port
// is chosen here: those that the kernel gives by itself are none of them.
func (w *worker) connectAs(u *upstream, endpoint netip.AddrPort, client netip.Addr) sys.Errno {
	first, last := w.server.options.Replies.FirstPort, w.server.options.Replies.LastPort
	if first == 0 || w.server.options.OwnAddress(client) {
		return sys.ConnectUDP(int(u.fd), endpoint, netip.AddrPortFrom(client, 0))
	}
	for range portTries {
		port := first + uint16(rand.UintN(uint(last-first)+1))
		errno := sys.ConnectUDP(int(u.fd), endpoint, netip.AddrPortFrom(client, port))
		if errno != sys.EADDRINUSE {
			return errno
		}
	}
	return sys.EADDRNOTAVAIL
}
