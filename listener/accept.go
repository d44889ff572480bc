package listener

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
	// acceptShare is how many connections are accepted from one lane before
	// other work of the loop has its turn.
	acceptShare = 16
	// Pauses of accepting, when something has run out.
	shortestPause = 5 * time.Millisecond
	longestPause  = time.Second
)

// acceptor is one worker's part in one listening socket. All workers wait for
// the same queue, and the kernel wakes one of them: connections spread over the
// loops by who is free, which keeps the slowest ones fast.
type acceptor struct {
	worker *worker
	socket *socket
	reg    poll.Registration
}

// HandleEvents accepts what is waiting.
func (a *acceptor) HandleEvents(uint8, poll.Events) { a.accept(acceptShare) }

// accept accepts up to so many of what is waiting.
func (a *acceptor) accept(share int) {
	w := a.worker
	for range share {
		if w.manager.open.Load() >= w.manager.limit.Load() {
			w.manager.stats.atLimit.Add(1)
			w.pause(a)
			return
		}
		fd, client, errno := sys.Accept(a.socket.fd)
		switch errno {
		case 0:
		case sys.EAGAIN, sys.EINVAL:
			return // another worker was faster, or it listens no more
		case sys.EMFILE, sys.ENFILE, sys.ENOBUFS, sys.ENOMEM:
			w.manager.stats.exhausted.Add(1)
			w.pause(a)
			return
		default:
			// The client gave up before its turn, or the network reports
			// an error of that connection (accept(2)): it concerns no other.
			continue
		}
		w.backoff = 0
		if a.socket.filtered.Load() {
			// The program is for first packets; of the others it would cost
			// time, and break the connection when it changes.
			sys.DetachFilter(fd)
		}
		vip, errno := sys.LocalAddr(fd)
		if errno != 0 {
			sys.Close(fd)
			continue
		}
		if c := w.admit(fd, unmap(client), unmap(vip)); c != nil {
			if a.socket.shared.Load() {
				c.fail(conntrack.LimitReached) // others come by this socket too
				continue
			}
			w.stall(c, a)
			return
		}
	}
}

// unmap gives the IPv4 form of an IPv4 address mapped into IPv6.
func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// decide gives the verdict on a connection, and the configuration that it
// follows from.
func (w *worker) decide(client netip.Addr, vip netip.AddrPort) (*state, policy.Verdict) {
	st := w.manager.state.Load()
	verdict := st.table.Resolve(service.TCP, client, vip)
	if verdict.Action != policy.Accept && len(st.past) > 0 {
		return st.late(client, vip, verdict, w.manager.clock())
	}
	return st, verdict
}

// admit decides about an accepted connection and begins to dial. It gives the
// connection when its Service has as many as may wait for an endpoint, so that it
// has to wait, and no more should be accepted for the moment.
func (w *worker) admit(fd int, client, vip netip.AddrPort) (waits *conn) {
	st, verdict := w.decide(client.Addr(), vip)
	if verdict.Port == nil {
		// Not a service's address: somebody found the lane's own address.
		w.manager.stats.strays.Add(1)
		sys.Close(fd) // resets it
		return nil
	}
	p := st.pools[verdict.Port.ID]
	c := w.newConn()
	c.pool = p
	c.client = fd
	c.record = conntrack.Record{
		Start:    w.loop.Now(),
		Client:   client,
		VIP:      vip,
		Port:     verdict.Port,
		Protocol: service.TCP,
		Kind:     verdict.Kind,
		Counters: p.counters,
		Owner:    c,
	}
	w.manager.open.Add(1)
	w.shard.Open(&c.record)
	p.service.open.Add(1)
	p.namespace.open.Add(1)
	switch verdict.Action {
	case policy.Accept:
	case policy.Drop:
		// The socket's filter drops who may not come in; this one came before
		// the filter changed, or the filter has no room for all the ranges.
		w.manager.stats.notAdmitted.Add(1)
		c.fail(conntrack.NotAdmitted)
		return nil
	default:
		// Steering refuses what has no endpoints; this one was on its way for
		// longer than lateTime when the last endpoint went.
		c.fail(conntrack.NoEndpoints)
		return nil
	}
	if end := c.overLimit(); end != conntrack.EndNone {
		c.fail(end)
		return nil
	}
	c.class = sys.ClientClass(fd, vip.Addr().Is6())
	if !c.beginDialing() {
		return c
	}
	c.dial(st, &verdict)
	return nil
}

// join begins to accept from a listening socket.
func (w *worker) join(s *socket) {
	a := &acceptor{worker: w, socket: s}
	w.acceptors[s] = a
	w.listen(a)
}

// leave accepts what waits in a listening socket's queue, and ends accepting
// from it.
func (w *worker) leave(s *socket) {
	if a := w.acceptors[s]; a != nil {
		if !slices.Contains(w.paused, a) && !w.isStalled(a) {
			a.accept(max(w.manager.config.Backlog, acceptShare))
		}
		w.drop(s)
	}
}

// drop ends accepting from a listening socket at once.
func (w *worker) drop(s *socket) {
	a := w.acceptors[s]
	delete(w.acceptors, s)
	if i := slices.Index(w.paused, a); i >= 0 {
		w.paused = slices.Delete(w.paused, i, i+1)
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
		// Out of kernel memory: the next pause's end tries again.
		w.manager.stats.exhausted.Add(1)
		w.sleep(a)
		return
	}
	a.reg = reg
}

// pause stops accepting from one socket for a while; its clients wait in its
// queue. The pause doubles while nothing can be accepted.
func (w *worker) pause(a *acceptor) {
	w.loop.Remove(a.reg)
	w.sleep(a)
}

func (w *worker) sleep(a *acceptor) {
	w.paused = append(w.paused, a)
	if !w.pauseTimer.Scheduled() {
		w.backoff = min(max(2*w.backoff, shortestPause), longestPause)
		w.loop.Schedule(&w.pauseTimer, w.loop.Now()+int64(w.backoff), (*resumer)(w))
	}
}

// resumer is a worker as the handler of its pause timer.
type resumer worker

// HandleTimer ends the pause.
func (r *resumer) HandleTimer(*poll.Timer) { (*worker)(r).resume() }

// resume goes back to accepting wherever it was paused.
func (w *worker) resume() {
	w.loop.Cancel(&w.pauseTimer)
	paused := w.paused
	w.paused = nil
	for _, a := range paused {
		w.listen(a)
	}
}
