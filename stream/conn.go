package stream

import (
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/upstream"
)

// conn is one connection from accept to its end. Its worker's loop owns it. Until an
// endpoint has answered, it handles the events of the socket that is connecting; then
// the relay owns both sockets, and calls LinkEnded at the end.
type conn struct {
	link   relay.Link
	record conntrack.Record
	plan   balancer.Dial
	worker *worker
	pool   *pool

	timer    poll.Timer // of the current attempt, or of the pause before the next
	endpoint poll.Registration
	client   int // the client's socket
	upstream int // the socket that is connecting
	dialing  bool
	class    uint8          // the client's DSCP
	held     upstream.Range // ports for sockets with the client's address, from Rules.Hold
	next     *conn          // in a retryQueue
}

// ownTroublePause is how long a dial waits when the node, not an endpoint, makes it
// fail (no descriptor, no local port): times the number of attempts made, up to
// longestPause.
const ownTroublePause = 25 * time.Millisecond

// dial begins the next attempt, on the endpoint that the balancer proposes. If the
// attempt fails at once, the one after that follows, as long as the loop's round has
// room for more attempts.
func (c *conn) dial(st *state, v *policy.Verdict) {
	w := c.worker
	client := c.record.Client.Addr()
	for {
		now := poll.Nanotime()
		i, patience, ok := c.pool.balancer.Next(&c.plan, v.Candidates, client, now)
		if !ok {
			c.fail(conntrack.ConnectFailed)
			return
		}
		if i == balancer.Pause {
			w.loop.Schedule(&c.timer, now+int64(patience), c)
			return
		}
		ep := &v.Candidates[i]
		c.record.BeginAttempt(ep, now)
		fd, errno := c.connect(st, v, ep)
		if errno == 0 || errno == sys.EINPROGRESS {
			// The handshake with an endpoint on this node is over by now.
			errno = w.relay.Probe(&c.link, c.client, fd)
			if errno == 0 {
				c.connected(relay.Socket{FD: fd})
				return
			}
			if errno == sys.EAGAIN {
				var err error
				if c.endpoint, err = w.loop.Add(fd, 0, relay.Watch, c); err == nil {
					c.upstream = fd
					w.loop.Schedule(&c.timer, now+int64(patience), c)
					return
				}
				errno = sys.ENOMEM
			}
			sys.Close(fd)
		}
		if c.attemptFailed(errno) {
			return
		}
		if !w.retries.take() {
			w.retries.push(c)
			return
		}
	}
}

// connect begins to connect to an endpoint as package upstream decides. The record says
// whose address the endpoint sees.
func (c *conn) connect(st *state, v *policy.Verdict, ep *service.Endpoint) (int, sys.Errno) {
	w, client := c.worker, c.record.Client.Addr()
	choice := w.server.upstream.Choose(st.host, v, client, ep)
	c.record.Source = choice.Source
	o := sys.ConnectOptions{Congestion: w.server.config.Congestion, Class: c.class}
	if ep.MayReturn {
		o.TTL = redirect.TTLAfter(sys.ClientTTL(c.client, c.record.VIP.Addr().Is6()))
	}
	if choice.Kind == upstream.FromClient && c.held == (upstream.Range{}) {
		var errno sys.Errno
		if c.held, errno = w.server.upstream.Hold(client); errno != 0 {
			return -1, errno
		}
	}
	return w.dialer.Connect(&choice, ep.Addr, client, c.held, o)
}

// attemptFailed notes a failed attempt. It returns true if the next one has to wait,
// because the node itself made it fail.
func (c *conn) attemptFailed(errno sys.Errno) (waits bool) {
	w := c.worker
	reason := conntrack.DialErrorOf(errno)
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
	switch errno := c.worker.relay.Probe(&c.link, c.client, c.upstream); errno {
	case 0:
		c.worker.loop.Cancel(&c.timer)
		c.connected(relay.Socket{FD: c.upstream, Reg: c.endpoint, Ready: ev})
	case sys.EAGAIN:
	default:
		c.worker.loop.Cancel(&c.timer)
		c.abandonAttempt(errno)
	}
}

// HandleTimer ends the current attempt by its timeout, or the pause before the next.
func (c *conn) HandleTimer(*poll.Timer) {
	if c.upstream >= 0 {
		c.abandonAttempt(sys.ETIMEDOUT)
		return
	}
	c.retryInTurn()
}

// abandonAttempt closes the socket that was connecting and makes the next attempt.
func (c *conn) abandonAttempt(errno sys.Errno) {
	c.worker.loop.Forget(c.endpoint)
	sys.Close(c.upstream)
	c.upstream = -1
	if !c.attemptFailed(errno) {
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
// endpoints that exist now.
func (c *conn) retry() {
	st, v := c.worker.decide(c.record.Client.Addr(), c.record.VIP)
	if v.Action != policy.Accept {
		c.fail(conntrack.ConnectFailed)
		return
	}
	c.dial(st, &v)
}

// connected hands the connection to the relay.
func (c *conn) connected(endpoint relay.Socket) {
	w := c.worker
	now := poll.Nanotime()
	c.upstream = -1
	c.pool.balancer.Connected(&c.plan, c.record.Endpoint.Addr, c.record.Client.Addr(), now)
	c.record.Affinity = c.plan.Affinity()
	c.record.SourceAddr, _ = sys.LocalAddr(endpoint.FD)
	c.record.AttemptSucceeded(now)
	c.endDialing()
	w.relay.Start(&c.link, relay.Socket{FD: c.client}, endpoint, c)
}

// LinkEnded takes the connection back from the relay, which has closed both sockets.
func (c *conn) LinkEnded(_ *relay.Link, end relay.End) {
	if end == relay.ClientFin {
		c.worker.dialer.Rest()
	}
	c.finish(ends[end])
}

// ends maps the relay's ends to the record's.
var ends = [...]conntrack.End{
	relay.ClientFin:       conntrack.ClientFin,
	relay.ClientReset:     conntrack.ClientReset,
	relay.EndpointFin:     conntrack.EndpointFin,
	relay.EndpointReset:   conntrack.EndpointReset,
	relay.ClientTimeout:   conntrack.ClientTimeout,
	relay.EndpointTimeout: conntrack.EndpointTimeout,
	relay.Idle:            conntrack.Idle,
	relay.Shutdown:        conntrack.Shutdown,
	relay.Limit:           conntrack.LimitReached,
}

// fail ends a connection that has no endpoint: the client is reset.
func (c *conn) fail(end conntrack.End) {
	c.worker.loop.Cancel(&c.timer)
	if c.upstream >= 0 {
		c.worker.loop.Forget(c.endpoint)
		sys.Close(c.upstream)
		c.upstream = -1
	}
	c.worker.relay.Drop(&c.link)
	c.record.Affinity = c.plan.Affinity()
	c.endDialing()
	sys.Close(c.client) // resets it
	c.finish(end)
}

// abort ends the connection, whatever its state.
func (c *conn) abort() {
	if c.record.Connected {
		c.worker.relay.Abort(&c.link, relay.Shutdown)
		return
	}
	c.fail(conntrack.Shutdown)
}

// Refresh brings the record up to date while the connection is open.
func (c *conn) Refresh(r *conntrack.Record) {
	r.Progress(c.link.BytesUp(), c.link.BytesDown())
}

// finish writes the record and frees the conn.
func (c *conn) finish(end conntrack.End) {
	w := c.worker
	r := &c.record
	r.End = end
	r.Duration = poll.Nanotime() - r.Start
	r.BytesFromClient = c.link.BytesUp()
	r.BytesFromEndpoint = c.link.BytesDown()
	if first := c.link.FirstByte; first != 0 {
		// The relay's clock does not advance within a round of the loop.
		r.FirstByte = max(first-r.Start, r.ConnectTime, 1)
	}
	if c.held != (upstream.Range{}) {
		w.server.upstream.Release(r.Client.Addr())
		c.held = upstream.Range{}
	}
	w.shard.Close(r)
	c.pool.service.open.Add(-1)
	c.pool.namespace.open.Add(-1)
	w.server.open.Add(-1)
	w.freeConn(c)
	if len(w.paused) > 0 && w.server.open.Load() < w.server.resumeBelow() {
		w.resume()
	}
}
