package stream

import (
	"cmp"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/upstream"
)

// conn is one connection from accept to its end. Its worker's loop owns it. Until an
// endpoint has answered, it handles the events of the socket that is connecting; then
// the carrier's relay owns both sockets, until it calls ended.
type conn struct {
	carrier carrier
	record  conntrack.Record
	plan    balancer.Dial
	worker  *worker
	pool    *pool

	timer    poll.Timer // of the current attempt, or of the pause before the next
	endpoint poll.Registration
	client   int32 // the client's socket
	upstream int32 // the socket that is connecting
	counts   counted
	awaits   awaited
	cut      conntrack.End  // how EndConnection ends it, else EndNone
	class    uint8          // the TCP client's DSCP
	held     upstream.Range // ports for TCP sockets with the client's address, from Rules.Hold
	next     *conn          // in a retryQueue
}

// counted says among which connections one counts.
type counted uint8

const (
	amongDialing counted = 1 << iota
	amongServed
	amongQueued  // it waits at a limit, or has its turn
	amongStaying // the process that takes over does not take it
	// Beyond one of these limits, neither the Service nor the namespace counts it.
	beyondService
	beyondNamespace
)

// ownTroublePause is how long a dial waits when the node, not an endpoint, makes it
// fail (no descriptor, no local port): times the number of attempts made, up to
// longestPause.
const ownTroublePause = 25 * time.Millisecond

// QuietFor implements relay.Patient and message.Patient by the annotations that the Service
// had when the connection began.
func (c *conn) QuietFor(isHalfClosed bool, idle, halfClosed time.Duration) time.Duration {
	return c.record.Port.QuietFor(isHalfClosed, idle, halfClosed)
}

// dial begins the next attempt, on the endpoint that the balancer proposes. If the
// attempt fails at once, the one after that follows, as long as the loop's round has
// room for more attempts.
func (c *conn) dial(st *state, v *policy.Verdict) {
	w := c.worker
	if !c.enter(&v.Port.Limits) {
		c.enqueue(v)
		return
	}
	from := balancer.Conn{Client: c.record.Client, Destination: c.record.VIP}
	for {
		now := poll.Nanotime()
		i, patience, ok := c.pool.balancer.Next(&c.plan, v.Candidates, from, now)
		if !ok {
			c.fail(conntrack.ConnectFailed)
			return
		}
		if i == balancer.Full {
			c.enqueue(v)
			return
		}
		if i == balancer.Pause {
			w.loop.Schedule(&c.timer, now+int64(patience), c)
			return
		}
		ep := &v.Candidates[i]
		if !c.record.BeginAttemptBelow(c.pool.balancer.MaxOpen(), ep, now) {
			c.plan.Excuse() // another connection took the place
			continue
		}
		c.unqueue(!c.hasFailed())
		fd, errno := c.carrier.connect(st, v, ep)
		if errno == 0 || errno == sys.EINPROGRESS {
			// The handshake with an endpoint on this node is over by now.
			errno = c.carrier.probe(fd)
			if errno == 0 {
				c.connected(fd, poll.Registration{}, 0)
				return
			}
			if errno == sys.EAGAIN {
				var err error
				if c.endpoint, err = w.loop.Add(fd, 0, c.carrier.watch(), c); err == nil {
					c.upstream = int32(fd)
					w.loop.Schedule(&c.timer, now+int64(patience), c)
					return
				}
				errno = sys.ENOMEM
			}
			sys.Close(fd)
		}
		if c.attemptFailed(conntrack.DialErrorOf(errno)) {
			return
		}
		if !w.retries.take() {
			w.retries.push(c)
			return
		}
	}
}

// attemptFailed notes a failed attempt. It returns true if the next one has to wait,
// because the node itself made it fail.
func (c *conn) attemptFailed(reason conntrack.DialError) (waits bool) {
	w := c.worker
	c.record.AttemptFailed(reason, poll.Nanotime())
	if !reason.Own() {
		c.pool.balancer.Failed(&c.plan, c.record.Endpoint.Addr, c.record.Client.Addr(), poll.Nanotime())
		return false
	}
	c.plan.Excuse()
	w.loop.Schedule(&c.timer, poll.Nanotime()+int64(min(ownTroublePause*time.Duration(c.plan.Attempts()), longestPause)), c)
	return true
}

// HandleEvents reports how the current attempt ended.
func (c *conn) HandleEvents(_ uint8, ev poll.Events) {
	switch c.awaits {
	case header:
		c.takeHeader(ev)
		return
	case endpoints, place:
		c.leaves(ev)
		return
	}
	switch errno := c.carrier.probe(int(c.upstream)); errno {
	case 0:
		c.worker.loop.Cancel(&c.timer)
		c.connected(int(c.upstream), c.endpoint, ev)
	case sys.EAGAIN:
	default:
		c.worker.loop.Cancel(&c.timer)
		c.abandonAttempt(conntrack.DialErrorOf(errno))
	}
}

// HandleTimer ends the wait for a header, endpoints or a place, the current attempt by its timeout, or the pause
// before the next.
func (c *conn) HandleTimer(*poll.Timer) {
	switch c.awaits {
	case header:
		c.fail(conntrack.ProxyHeaderTimeout)
		return
	case endpoints:
		c.fail(conntrack.NoEndpoints)
		return
	case place:
		c.lookForPlace()
		return
	}
	if c.upstream >= 0 {
		c.abandonAttempt(c.silence())
		return
	}
	c.retryInTurn()
}

// silence says why the endpoint has not answered in time.
func (c *conn) silence() conntrack.DialError {
	w, to := c.worker, c.record.Endpoint.Addr
	switch {
	case w.neighbours.Unreachable(to.Addr()):
		return conntrack.DialUnreachable // the kernel says so too, but later
	case c.record.Protocol == service.TCP && w.server.options.Drops.Dropped(to, sys.Monotonic()-c.record.Attempting(poll.Nanotime())):
		return conntrack.DialDropped
	}
	return conntrack.DialTimeout
}

// abandonAttempt closes the socket that was connecting and makes the next attempt.
func (c *conn) abandonAttempt(reason conntrack.DialError) {
	c.worker.loop.Forget(c.endpoint)
	sys.Close(int(c.upstream))
	c.upstream = -1
	if !c.attemptFailed(reason) {
		c.retryInTurn()
	}
}

// retryInTurn makes the next attempt, in this round of the loop or a later one.
func (c *conn) retryInTurn() {
	if !c.worker.retries.take() {
		c.worker.retries.push(c)
		return
	}
	c.retry()
}

// retry makes the next attempt by the configuration that is in force now, with the
// endpoints that exist now. The connection ends if the address is another service port's
// by now: its record, limits and balancer are those of the port that it began with.
func (c *conn) retry() {
	if c.cut != conntrack.EndNone {
		c.fail(c.cut)
		return
	}
	st, v := c.worker.decide(c.record.Protocol, c.record.Client.Addr(), c.record.VIP)
	if v.Action == policy.Hold && v.Port.Name == c.record.Port.Name {
		c.hold()
		return
	}
	if v.Action != policy.Accept || v.Port.Name != c.record.Port.Name {
		c.fail(conntrack.ConnectFailed)
		return
	}
	c.dial(st, &v)
}

// connected hands the connection to the relay. ready are the last events of the
// endpoint's registration, if it has one.
func (c *conn) connected(endpoint int, reg poll.Registration, ready poll.Events) {
	now := poll.Nanotime()
	c.upstream = int32(endpoint) // for Inspect
	c.pool.balancer.Connected(&c.plan, c.record.Endpoint.Addr, c.record.Client.Addr(), now)
	c.record.Affinity = c.plan.Affinity()
	c.record.SourceAddr, _ = sys.LocalAddr(endpoint)
	c.record.AttemptSucceeded(now)
	c.upstream = -1
	if c.hasFailed() {
		c.pool.service.queue.call(c.pool, nil)
	}
	c.endDialing()
	c.carrier.start(endpoint, reg, ready)
}

// fail ends a connection that has no endpoint: the client is reset.
func (c *conn) fail(end conntrack.End) {
	c.worker.shard.Note(&c.record)
	c.worker.loop.Cancel(&c.timer)
	if c.awaits == endpoints {
		c.release()
	}
	c.unqueue(true)
	if c.awaits != nothing {
		c.endWait()
	}
	if c.upstream >= 0 {
		c.worker.loop.Forget(c.endpoint)
		sys.Close(int(c.upstream))
		c.upstream = -1
	}
	c.carrier.drop()
	c.record.Affinity = c.plan.Affinity()
	c.endDialing()
	sys.Close(int(c.client)) // resets it
	c.finish(end)
}

// abort ends the connection, whatever its state.
func (c *conn) abort() {
	if c.record.Connected {
		c.carrier.abort()
		return
	}
	c.fail(conntrack.Shutdown)
}

// IdleFor implements conntrack.Idler.
func (c *conn) IdleFor(atLeast time.Duration) bool {
	return c.record.Connected && c.carrier.idle(atLeast)
}

// EndConnection implements conntrack.Ender: both sides are reset, or get a FIN for the sake of
// balance. A connection that waits for its turn or for room ends when it would have gone on.
func (c *conn) EndConnection(end conntrack.End) {
	c.cut = end
	switch {
	case c.awaits == process: // it ends when it is back, if it does not leave
	case c.record.Connected && end == conntrack.Rebalanced:
		c.carrier.release()
	case c.record.Connected:
		c.carrier.abort()
	case c.upstream >= 0 || c.timer.Scheduled():
		c.fail(end)
	}
}

// Refresh brings the record up to date while the connection is open.
func (c *conn) Refresh(r *conntrack.Record) {
	c.count()
	r.Progress(r.BytesFromClient, r.BytesFromEndpoint)
}

// Inspect implements conntrack.Inspector.
func (c *conn) Inspect(t *conntrack.Transport) { c.carrier.inspect(t) }

// count brings what the record says of forwarded bytes up to date.
func (c *conn) count() {
	if first := c.carrier.count(&c.record); first != 0 {
		// The relay's clock does not advance within a round of the loop.
		c.record.FirstByte = max(first-c.record.Start, c.record.ConnectTime, 1)
	}
}

// ended finishes a connection that the relay has ended.
func (c *conn) ended(end conntrack.End) { c.finish(cmp.Or(c.cut, end)) }

// finish writes the record and frees the conn.
func (c *conn) finish(end conntrack.End) {
	w := c.worker
	r := &c.record
	r.End = end
	r.Duration = poll.Nanotime() - r.Start
	c.count()
	c.carrier.closed()
	w.shard.Close(r)
	w.uncount(c)
}

// uncount frees a conn that is not this process's any more.
func (w *worker) uncount(c *conn) {
	c.leave()
	c.pool.service.queue.freed(c.pool)
	if c.counts.end() == conntrack.EndNone {
		c.pool.leave()
	}
	w.server.open.Add(-1)
	w.freeConn(c)
	if len(w.paused) > 0 && w.server.open.Load() < w.server.resumeBelow() {
		w.resume()
	}
}
