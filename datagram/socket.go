package datagram

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/upstream"
)

// socket is a socket to endpoints. It stays registered with its loop.
type socket struct {
	worker    *worker
	session   *session // nil while the socket is spare and not connected
	reg       poll.Registration
	fd        int32
	family    service.Family
	once      bool  // bound or marked as returning, so not reusable
	untracked bool  // exempt from connection tracking
	gro       bool  // the kernel delivers GRO batches in one piece
	class     uint8 // DSCP of its packets
	noGSO     bool  // the kernel does not send GSO batches from it
	ttl       uint8 // TTL towards an endpoint whose address may be a Service's; 0 otherwise
	// held is the client's address that must be released when the socket is closed; see
	// upstream.Rules.Hold.
	held netip.Addr
}

// HandleEvents receives what an endpoint sent, or learns that it is closed. What it sent
// before it was closed comes first: then the next refusal counts.
func (u *socket) HandleEvents(_ uint8, ev poll.Events) {
	w, c := u.worker, u.session
	w.others.events++
	if c == nil {
		u.drain() // it arrived after the session had ended
		return
	}
	closed := false
	if ev&poll.Failed != 0 {
		var read int
		if closed, read = c.readErrors(); read == 0 {
			// An error without a message (see retries) stays until it is returned.
			sys.SocketError(int(u.fd))
		}
	}
	switch {
	case ev&poll.Readable != 0:
		c.receive()
	case closed:
		c.failOver(c.unacked.count())
		w.opening.endTurn(w.loop.Now())
	}
}

// setHeader sets the client's DSCP on datagrams to the endpoint, and the TTL if the
// endpoint's address may be a Service's.
func (c *session) setHeader() {
	u := c.socket
	if u.class != c.outClass && sys.SetClass(int(u.fd), u.family == service.IPv6, c.outClass) == 0 {
		u.class = c.outClass
	}
	if u.ttl > c.ttl && sys.SetTTL(int(u.fd), u.family == service.IPv6, int(c.ttl)) == 0 {
		u.ttl = c.ttl
	}
}

// groBatch is the batch size from which a socket receives GSO batches.
const groBatch = 4

// receive puts what the endpoint sent into the slots of w.downIn from first on, and
// returns their number. Most sessions have one reply for each request: it is received by
// the cheapest call, and the socket receives GRO batches only once replies come in numbers.
func (u *socket) receive(c *session, w *worker, first int) (int, sys.Errno) {
	n, got := int(c.batch), 1
	before := c.round
	c.round = w.round
	if n == 1 && !u.gro {
		if errno := w.downIn.ReceiveOne(int(u.fd), first); errno != 0 {
			return 0, errno
		}
		if w.round-before > 1 {
			return got, 0
		}
		// There was a reply in the previous round too, so there may be more than
		// one.
	} else {
		var errno sys.Errno
		if got, errno = w.downIn.Receive(int(u.fd), first, n); errno != 0 {
			return 0, errno
		}
	}
	c.batch = uint8(nextBatch(n, got, 1, w.downIn.Slots()))
	if c.batch >= groBatch && !u.gro {
		// An older kernel continues to deliver single datagrams.
		sys.SetCoalesce(int(u.fd))
		u.gro = true
	}
	return got, 0
}

// leastSpare is how many spare sockets must wait before one is reused, as long as
// new ones can be created. By then, datagrams that were in flight when a socket was
// disconnected have arrived and can be discarded.
const leastSpare = 16

// spares is a FIFO queue of reusable sockets.
type spares struct {
	list []*socket
	head int
}

func (p *spares) len() int { return len(p.list) - p.head }

func (p *spares) push(u *socket) {
	if p.head > 0 && len(p.list) == cap(p.list) {
		n := copy(p.list, p.list[p.head:])
		clear(p.list[n:])
		p.list, p.head = p.list[:n], 0
	}
	p.list = append(p.list, u)
}

func (p *spares) pop() *socket {
	u := p.list[p.head]
	p.list[p.head] = nil
	p.head++
	return u
}

// pool returns the spare sockets of a family: those that pass connection tracking, or the
// others.
func (w *worker) pool(f service.Family, untracked bool) *spares {
	if untracked {
		return &w.spares[f][1]
	}
	return &w.spares[f][0]
}

// takeSocket returns an unconnected socket for a Choice. once means that it is used
// for one session only.
func (w *worker) takeSocket(f service.Family, choice *upstream.Choice, once bool) (*socket, sys.Errno) {
	untracked := choice.Kind == upstream.Untracked
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
		errno = sys.SetTransparent(fd, f == service.IPv6)
	}
	if errno == 0 && choice.Mark != 0 {
		errno = sys.SetMark(fd, choice.Mark)
	}
	if errno != 0 {
		sys.Close(fd)
		return nil, errno
	}
	sys.SetReceiveBuffer(fd, socketBuffer) // best effort
	u := &socket{worker: w, fd: int32(fd), family: f, once: once, untracked: untracked}
	if !u.listen() {
		sys.Close(fd)
		return nil, sys.ENOMEM
	}
	return u, 0
}

// listen registers the socket with its loop. It fails if the kernel has no memory.
func (u *socket) listen() bool {
	var err error
	u.reg, err = u.worker.loop.Add(int(u.fd), 0, poll.Readable, u)
	return err == nil
}

// socketBuffer is the receive buffer of a socket to an endpoint, in bytes.
const socketBuffer = 1 << 20

func (w *worker) reuse(pool *spares) *socket {
	u := pool.pop()
	u.drain()
	return u
}

// drain discards what a socket received for a session that ended.
func (u *socket) drain() {
	u.worker.errors.Drain(int(u.fd))
	sys.Drain(int(u.fd))
}

// giveSocket returns a socket for reuse, or closes it.
func (w *worker) giveSocket(u *socket) {
	u.session = nil
	pool, other := w.pool(u.family, u.untracked), w.pool(u.family, !u.untracked)
	if u.once || pool.len()+other.len() >= w.maxSpare || sys.DisconnectUDP(int(u.fd)) != 0 {
		w.closeSocket(u)
		return
	}
	pool.push(u)
}

func (w *worker) closeSocket(u *socket) {
	w.loop.Forget(u.reg)
	sys.Close(int(u.fd))
	u.letGo()
}

// letGo releases the client's address of a socket that was closed.
func (u *socket) letGo() {
	if u.held.IsValid() {
		u.worker.server.options.Upstream.Release(u.held)
		u.held = netip.Addr{}
	}
}

// connectTo returns a socket that is connected to an endpoint as a Choice says.
func (w *worker) connectTo(ep *service.Endpoint, client netip.Addr, choice *upstream.Choice) (*socket, sys.Errno) {
	u, errno := w.takeSocket(service.FamilyOf(ep.Addr.Addr()), choice, choice.IsBound() || ep.MayReturn)
	if errno != 0 {
		return nil, errno
	}
	if ep.MayReturn {
		// A low TTL ends loops through Services: see session.setHeader.
		u.ttl = redirect.FirstReturnTTL
		errno = sys.SetTTL(int(u.fd), u.family == service.IPv6, redirect.FirstReturnTTL)
	}
	rules := w.server.options.Upstream
	var held upstream.Range
	if errno == 0 && choice.Kind == upstream.FromClient {
		if held, errno = rules.Hold(client); held != (upstream.Range{}) {
			u.held = client
		}
	}
	if errno == 0 {
		errno = rules.ConnectUDP(int(u.fd), choice, ep.Addr, client, held)
	}
	if errno != 0 {
		w.closeSocket(u)
		return nil, errno
	}
	return u, 0
}
