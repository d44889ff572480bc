package datagram

import (
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// receiveBuffer is what the kernel may hold for a lane while its loop is busy,
// in bytes, of which small datagrams take 2 KiB and more each.
const receiveBuffer = 2 << 20

// place says what a lane is for: a service port and family; or, when it has no
// name, all that share one; or a destination that it is bound to.
type place struct {
	name   service.PortName
	family service.Family
	bound  service.Destination
}

func (p *place) isBound() bool { return p.bound.Addr.IsValid() }

// isShared tells whether the lane is that of several service ports.
func (p *place) isShared() bool { return !p.isBound() && p.name == service.PortName{} }

// lane is where the kernel puts the datagrams of clients: a socket for each
// loop, all on one address. The kernel gives all datagrams between two addresses and
// ports to one of them.
type lane struct {
	address netip.AddrPort
	shards  []*shard
}

// openLane makes the sockets of a lane, on an address of which the port may be
// 0.
func openLane(at place, addr netip.AddrPort, workers []*worker) (*lane, error) {
	bound := at.isBound()
	l := &lane{address: addr}
	for _, w := range workers {
		fd, err := sys.BindUDP(l.address, sys.UDPOptions{
			Transparent:   true,
			FreeBind:      bound,
			ReusePort:     true,
			Destination:   !bound,
			Class:         true,
			Coalesce:      true,
			MinTTL:        redirect.ReturnTTL + 1,
			ReceiveBuffer: receiveBuffer,
		})
		if err == nil {
			sh := &shard{worker: w, fd: fd, batch: leastBatch, shared: at.isShared()}
			if bound {
				sh.outlet = &outlet{fd: fd, address: addr, lane: true}
			}
			l.shards = append(l.shards, sh)
			if l.address.Port() == 0 {
				l.address, err = localAddr(fd)
			}
		}
		if err != nil {
			for _, sh := range l.shards {
				sys.Close(sh.fd)
			}
			return nil, err
		}
	}
	for _, sh := range l.shards {
		sh.worker.loop.Post(sh.listen)
	}
	return l, nil
}

func localAddr(fd int) (netip.AddrPort, error) {
	addr, errno := sys.LocalAddr(fd)
	if errno != 0 {
		return addr, errno
	}
	return addr, nil
}

// shard is one loop's socket of a lane.
type shard struct {
	worker *worker
	fd     int
	reg    poll.Registration
	outlet *outlet // where answers leave; nil if the destination is the datagram's
	batch  int     // datagrams to receive at once
	shared bool    // by several service ports
	ttl    bool    // the TTL of datagrams is known
	rest   poll.Timer
}

// listen begins to receive.
func (l *shard) listen() {
	reg, err := l.worker.loop.Add(l.fd, 0, poll.Readable, l)
	if err != nil {
		// Out of kernel memory. The sockets of the other loops go on.
		return
	}
	l.reg = reg
}

// close ends receiving. Sessions whose answers leave by this socket were cut.
func (l *shard) close() {
	w := l.worker
	w.flushDown()
	if l.outlet != nil {
		w.endOf(l.outlet)
	}
	w.loop.Cancel(&l.rest)
	w.loop.Forget(l.reg)
	sys.Close(l.fd)
}

// leastBatch is how many datagrams a lane receives at once under light traffic:
// to look for another one costs less than another round of the loop.
const leastBatch = 4

// HandleEvents receives what is there, up to a batch, which doubles as long as
// it is full. After one that began sessions it is small, so that a flood from
// ever new addresses leaves its turn to others after a few of them: after one,
// if there are others on the loop. Then the lane may have to rest, too; one that is
// shared never does, as the neighbours would have to wait (see worker.open).
func (l *shard) HandleEvents(uint8, poll.Events) {
	w := l.worker
	w.company.events++
	n, errno := w.upIn.Receive(l.fd, 0, l.batch)
	if errno != 0 {
		return
	}
	w.shared = l.shared
	w.deliver(l, n)
	w.shared = false
	now := w.loop.Now()
	h, company := w.opening.endTurn(now)
	switch {
	case h == nil:
		l.batch = nextBatch(l.batch, n, leastBatch, w.upIn.Slots())
	case !company:
		l.batch = leastBatch
	default:
		l.batch = 1
		if ns := h.begin.rest(); ns > 0 && !l.shared && w.loop.Modify(l.reg, 0) == nil {
			w.server.stats.pauses.Add(1)
			w.loop.Schedule(&l.rest, now+ns, l)
		}
	}
}

// limitTTL takes note of the TTL that a session's datagram came with; 0 if that is
// not known. A datagram from another proxy lowers the TTL towards an endpoint that
// may lead back to a Service, also when the session was begun by one from a client.
// The socket tells TTLs from the first datagram for such an endpoint on, as they
// cost time: those that are here already pass as if from a client. A loop still
// ends, as each socket lets it pass once so.
func (l *shard) limitTTL(c *session, ttl int) {
	switch {
	case ttl != 0:
		c.ttl = min(c.ttl, redirect.TTLAfter(ttl))
	case c.socket.ttl == 0 || l.ttl:
	case sys.ReceiveTTL(l.fd, c.record.VIP.Addr().Is6()) == 0:
		l.ttl = true
	default:
		c.ttl = redirect.ReturnTTL
	}
}

// HandleTimer ends the lane's rest.
func (l *shard) HandleTimer(*poll.Timer) {
	if err := l.worker.loop.Modify(l.reg, poll.Readable); err != nil {
		// Out of kernel memory.
		l.worker.loop.Schedule(&l.rest, l.worker.loop.Now()+int64(time.Second), l)
	}
}

// nextBatch gives how many datagrams to receive at once after n of batch came.
func nextBatch(batch, n, least, most int) int {
	switch {
	case n >= batch:
		return min(2*batch, most)
	case n <= batch/2:
		return max(batch/2, least)
	}
	return batch
}
