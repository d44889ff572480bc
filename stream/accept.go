package stream

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// acceptShare is how many connections are accepted from one socket before
	// other work of the loop has its turn.
	acceptShare = 16
	// Pauses of accepting, when a limit is reached or the kernel lacks memory.
	shortestPause = 5 * time.Millisecond
	longestPause  = time.Second
)

// acceptor is one worker's registration of one listening socket. All workers wait
// for the same queue, and the kernel wakes one that is free: this keeps the slowest
// connections fast.
type acceptor struct {
	worker *worker
	socket *socket
	reg    poll.Registration
}

// HandleEvents accepts waiting connections.
func (a *acceptor) HandleEvents(uint8, poll.Events) { a.accept(acceptShare) }

// accept accepts up to share of the waiting connections.
func (a *acceptor) accept(share int) {
	w := a.worker
	for range share {
		if !w.server.enter() {
			w.server.stats.atLimit.Add(1)
			w.pause(a)
			return
		}
		accept := sys.AcceptTCP
		if a.socket.protocol == service.SCTP {
			accept = sys.Accept
		}
		fd, client, errno := accept(a.socket.fd)
		if errno != 0 {
			w.server.open.Add(-1)
		}
		switch errno {
		case 0:
		case sys.EAGAIN, sys.EINVAL:
			return // another worker was faster, or the socket does not listen any more
		case sys.EMFILE, sys.ENFILE, sys.ENOBUFS, sys.ENOMEM:
			w.server.stats.exhausted.Add(1)
			w.pause(a)
			return
		default:
			// The client gave up while it waited, or the network reports an
			// error of this one connection (accept(2)).
			continue
		}
		w.backoff = 0
		if a.socket.filtered.Load() && a.socket.protocol == service.TCP {
			// The filter is for first packets. For others it would cost time,
			// and it would break the connection when it changes.
			sys.DetachFilter(fd)
		}
		vip, errno := sys.LocalAddr(fd)
		if errno != 0 {
			w.server.open.Add(-1)
			sys.Close(fd)
			continue
		}
		if c := w.admit(fd, a.socket.protocol, unmap(client), unmap(vip)); c != nil {
			if a.socket.shared.Load() {
				c.fail(conntrack.LimitReached) // other service ports use the socket too
				continue
			}
			w.stall(c, a)
			return
		}
	}
}

// unmap returns the IPv4 form of an IPv4 address mapped into IPv6.
func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// decide returns the verdict on a connection, and the configuration that it
// follows from.
func (w *worker) decide(protocol service.Protocol, client netip.Addr, vip netip.AddrPort) (*state, policy.Verdict) {
	st := w.server.state.Load()
	verdict := st.table.Resolve(protocol, client, vip)
	if verdict.Action != policy.Accept && verdict.Action != policy.Hold && len(st.past) > 0 {
		if was, v := st.inGrace(protocol, client, vip, verdict, w.server.clock()); v.Action != policy.Hold {
			return was, v // else the port is gone, and will have no endpoint
		}
	}
	return st, verdict
}

// admit decides about an accepted connection, which is counted among all, and begins to dial. It returns the
// connection if it has to wait, because its Service is at its limit of connections
// that are being dialled: no more should be accepted for the moment.
func (w *worker) admit(fd int, protocol service.Protocol, client, vip netip.AddrPort) (waits *conn) {
	st, verdict := w.decide(protocol, client.Addr(), vip)
	if verdict.Port == nil {
		// Not a service's address: a client on this node found the socket's own.
		w.server.stats.strays.Add(1)
		w.server.open.Add(-1)
		sys.Close(fd) // resets it
		return nil
	}
	p := st.pools[verdict.Port.ID]
	c := w.newConn(protocol)
	c.pool = p
	c.client = int32(fd)
	c.record = conntrack.Record{
		Start:    w.loop.Now(),
		Client:   client,
		VIP:      vip,
		Port:     verdict.Port,
		Protocol: protocol,
		Kind:     verdict.Kind,
		Counters: p.counters,
		Owner:    c,
	}
	w.shard.Open(&c.record)
	c.counts |= p.enter(w.server)
	if len(verdict.Port.AcceptProxy) > 0 {
		c.awaitHeader()
		return nil
	}
	if c.begin(st, &verdict) {
		return c
	}
	return nil
}

// begin begins to dial as the verdict says. It returns true if the connection has to wait
// for room.
func (c *conn) begin(st *state, v *policy.Verdict) (waits bool) {
	switch v.Action {
	case policy.Accept, policy.Hold:
	case policy.Drop:
		// The socket's filter drops clients that may not connect; this one came
		// before the filter changed, or the filter has no room for all ranges.
		c.fail(conntrack.NotAdmitted)
		return false
	default:
		// Steering refuses connections without endpoints; the handshake of this
		// one took longer than the grace period after the last endpoint went.
		c.fail(conntrack.NoEndpoints)
		return false
	}
	peer := c.record.Client
	if via := c.record.Via(); via.IsValid() {
		peer = via
	}
	if refuses := c.worker.server.options.Refuses; refuses != nil && refuses(peer, c.record.VIP, v.Port) {
		c.fail(conntrack.NotForwarded)
		return false
	}
	if end := c.counts.end(); end != conntrack.EndNone {
		c.fail(end)
		return false
	}
	c.carrier.accepted()
	if !c.beginDialing() {
		return true
	}
	if v.Action == policy.Hold {
		c.hold()
		return false
	}
	c.dial(st, v)
	return false
}

// join begins accepting from a listening socket.
func (w *worker) join(s *socket) {
	a := &acceptor{worker: w, socket: s}
	w.acceptors[s] = a
	w.listen(a)
}

// leave accepts what waits in a listening socket's queue, and stops accepting from
// it.
func (w *worker) leave(s *socket) {
	if a := w.acceptors[s]; a != nil {
		if !slices.Contains(w.paused, a) && !w.isStalled(a) {
			a.accept(max(w.server.config.Backlog, acceptShare))
		}
		w.drop(s)
	}
}

// drop stops accepting from a listening socket at once.
func (w *worker) drop(s *socket) {
	a := w.acceptors[s]
	delete(w.acceptors, s)
	if i := slices.Index(w.paused, a); i >= 0 {
		w.paused = slices.Delete(w.paused, i, i+1)
		w.server.paused.Add(-1)
		return
	}
	if w.unstall(a) {
		return
	}
	w.loop.Remove(a.reg)
}

func (w *worker) listen(a *acceptor) {
	reg, err := w.loop.Add(a.socket.fd, 0, poll.Readable|poll.Exclusive, a)
	if err != nil {
		// The kernel has no memory: try again after the pause.
		w.server.stats.exhausted.Add(1)
		w.sleep(a)
		return
	}
	a.reg = reg
}

// pause stops accepting from one socket for a while; clients wait in its queue.
// The pause doubles while nothing can be accepted.
func (w *worker) pause(a *acceptor) {
	w.loop.Remove(a.reg)
	w.sleep(a)
}

func (w *worker) sleep(a *acceptor) {
	w.paused = append(w.paused, a)
	w.server.paused.Add(1)
	if !w.pauseTimer.Scheduled() {
		w.backoff = min(max(2*w.backoff, shortestPause), longestPause)
		w.loop.Schedule(&w.pauseTimer, w.loop.Now()+int64(w.backoff), (*resumer)(w))
	}
}

// resumer is the worker as the handler of its pause timer.
type resumer worker

// HandleTimer ends the pause.
func (r *resumer) HandleTimer(*poll.Timer) { (*worker)(r).resume() }

// resume accepts again from all paused sockets.
func (w *worker) resume() {
	w.loop.Cancel(&w.pauseTimer)
	paused := w.paused
	w.paused = nil
	w.server.paused.Add(-int64(len(paused)))
	for _, a := range paused {
		w.listen(a)
	}
}
