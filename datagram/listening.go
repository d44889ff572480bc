package datagram

import (
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// receiveBuffer is the receive buffer of a listening socket, for while its loop is busy,
// in bytes. A small datagram takes 2 KiB or more of it.
const receiveBuffer = 2 << 20

// listeningKey says what listening sockets are for: a service port and family; without a
// name, all service ports that share sockets; or a destination that they are bound to.
type listeningKey struct {
	name   service.PortName
	family service.Family
	bound  service.Destination
}

func (p *listeningKey) isBound() bool { return p.bound.Addr.IsValid() }

// isShared reports whether several service ports share the sockets.
func (p *listeningKey) isShared() bool { return !p.isBound() && p.name == service.PortName{} }

// listening is where the kernel queues the datagrams of clients: a socket for each loop,
// all bound to one address and port. The kernel delivers all datagrams between two
// addresses and ports to the same socket.
type listening struct {
	address netip.AddrPort
	sockets []*listener
}

// openListening opens listening sockets on an address whose port may be 0, or takes those of
// the process before.
func (s *Server) openListening(at listeningKey, addr netip.AddrPort) (*listening, error) {
	l := &listening{address: addr}
	err := s.inherit(at, l)
	if len(l.sockets) == 0 && err == nil {
		err = s.bindEach(at, l)
	}
	if err != nil {
		for _, sh := range l.sockets {
			sys.Close(sh.fd)
		}
		return nil, err
	}
	if s.inherited == nil {
		l.listen()
	}
	return l, nil
}

// listen has the loops receive.
func (l *listening) listen() {
	for _, sh := range l.sockets {
		sh.worker.loop.Post(sh.listen)
	}
}

// bindEach binds a socket for each loop. The kernel chooses a port for the first one if there
// is none.
func (s *Server) bindEach(at listeningKey, l *listening) error {
	for _, w := range s.workers {
		fd, err := sys.BindUDP(l.address, sys.UDPOptions{
			Transparent:   true,
			FreeBind:      at.isBound(),
			ReusePort:     true,
			Destination:   !at.isBound(),
			Class:         true,
			Coalesce:      true,
			MinTTL:        redirect.ReturnTTL + 1,
			ReceiveBuffer: receiveBuffer,
		})
		if err != nil {
			return err
		}
		if err := l.add(at, w, fd); err != nil {
			return err
		}
	}
	return nil
}

// add adds a loop's socket.
func (l *listening) add(at listeningKey, w *worker, fd int) (err error) {
	sh := &listener{worker: w, fd: fd, slot: uint16(len(l.sockets)), batch: leastBatch, shared: at.isShared()}
	if at.isBound() {
		sh.replySocket = &replySocket{fd: fd, address: l.address, listens: true}
	}
	l.sockets = append(l.sockets, sh)
	if l.address.Port() == 0 {
		l.address, err = localAddr(fd)
	}
	return err
}

func localAddr(fd int) (netip.AddrPort, error) {
	addr, errno := sys.LocalAddr(fd)
	if errno != 0 {
		return addr, errno
	}
	return addr, nil
}

// listener is one loop's listening socket.
type listener struct {
	worker      *worker
	fd          int
	slot        uint16 // its place among those of one address: by that, the kernel selects it
	reg         poll.Registration
	replySocket *replySocket // where answers leave; nil if the destination is the datagram's
	batch       int          // datagrams to receive at once
	shared      bool         // by several service ports
	ttl         bool         // the TTL of datagrams is known
	pause       poll.Timer
}

// listen begins to receive.
func (l *listener) listen() {
	reg, err := l.worker.loop.Add(l.fd, 0, poll.Readable, l)
	if err != nil {
		// Out of kernel memory. The sockets of the other loops go on.
		return
	}
	l.reg = reg
}

// remove ends receiving. Another process may have the socket too, so that closing it would
// not be enough.
func (l *listener) remove() {
	l.worker.loop.Cancel(&l.pause)
	l.worker.loop.Remove(l.reg)
}

// close ends receiving, and the sessions whose answers leave by this socket.
func (l *listener) close(end conntrack.End) {
	w := l.worker
	w.flushDown()
	if l.replySocket != nil {
		w.endOf(l.replySocket, end)
	}
	l.remove()
	sys.Close(l.fd)
}

// leave ends receiving, and closes the socket unless no other socket can send its sessions'
// answers: then it stays open until the process ends.
func (l *listener) leave() {
	w := l.worker
	w.flushDown()
	l.remove()
	if l.replySocket != nil && !w.replyElsewhere(l.replySocket) {
		return
	}
	sys.Close(l.fd)
}

// leastBatch is how many datagrams a listener receives at once under light traffic:
// looking for one more costs less than another round of the loop.
const leastBatch = 4

// HandleEvents receives a batch, whose size doubles as long as it is full. After a batch
// that began sessions it is small, so that a flood from ever new addresses gives others
// their turn after a few datagrams: after one, if there are other users of the loop. Then
// the listener may have to pause, too; a shared one never does, as the other service ports
// would have to wait (see worker.open).
func (l *listener) HandleEvents(uint8, poll.Events) {
	w := l.worker
	w.others.events++
	n, errno := w.upIn.Receive(l.fd, 0, l.batch)
	if errno != 0 {
		return
	}
	w.shared = l.shared
	w.deliver(l, n)
	w.shared = false
	now := w.loop.Now()
	h, others := w.opening.endTurn(now)
	switch {
	case h == nil:
		l.batch = nextBatch(l.batch, n, leastBatch, w.upIn.Slots())
	case !others:
		l.batch = leastBatch
	default:
		l.batch = 1
		if ns := h.begin.pause(); ns > 0 && !l.shared && w.loop.Modify(l.reg, 0) == nil {
			w.server.stats.Pauses.Add(1)
			w.loop.Schedule(&l.pause, now+ns, l)
		}
	}
}

// limitTTL notes the TTL of a session's datagram; 0 if that is not known. A datagram from
// another proxy lowers the TTL towards an endpoint that may lead back to a Service, also
// when a client's datagram began the session. The socket reports TTLs from the first
// datagram for such an endpoint on, because this costs time: datagrams that are in the
// queue by then pass as a client's. A loop of proxies still ends, as each socket lets
// datagrams pass in this way only once.
func (l *listener) limitTTL(c *session, ttl int) {
	switch {
	case ttl != 0:
		c.ttl = min(c.ttl, uint8(redirect.TTLAfter(ttl)))
	case c.socket.ttl == 0 || l.ttl:
	case sys.ReceiveTTL(l.fd, c.record.VIP.Addr().Is6()) == 0:
		l.ttl = true
	default:
		c.ttl = redirect.ReturnTTL
	}
}

// HandleTimer ends the pause.
func (l *listener) HandleTimer(*poll.Timer) {
	if err := l.worker.loop.Modify(l.reg, poll.Readable); err != nil {
		// Out of kernel memory.
		l.worker.loop.Schedule(&l.pause, l.worker.loop.Now()+int64(time.Second), l)
	}
}

// nextBatch returns how many datagrams to receive at once after n of batch came.
func nextBatch(batch, n, least, most int) int {
	switch {
	case n >= batch:
		return min(2*batch, most)
	case n <= batch/2:
		return max(batch/2, least)
	}
	return batch
}
