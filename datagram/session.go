package datagram

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// key identifies a session.
type key struct {
	client, vip netip.AddrPort
}

// session is the state of one client/VIP flow. Its worker's loop owns it.
type session struct {
	record      conntrack.Record
	plan        balancer.Dial
	sessions    *serviceSessions
	replySocket *replySocket
	socket      *socket  // nil until an endpoint is chosen
	unacked     *unacked // nil if no datagram is kept
	prev, next  *session // in a list of sessions
	last        int64    // when the last datagram arrived, either way
	dialed      int64    // time when the endpoint was chosen
	class       class
	outClass    uint8         // DSCP of the client's datagrams
	doubted     bool          // an ICMP message said that the endpoint is closed, after it had answered
	batch       uint8         // replies to receive at once
	round       uint32        // worker.round of the last reply
	ttl         uint8         // TTL towards an endpoint whose address may be a Service's
	slot        uint16        // of the listening socket that the client's datagrams come to
	stays       bool          // no other process takes it over
	away        bool          // it is on its way to another process
	cut         conntrack.End // how it is to end if it comes back
}

// open begins the session of a client that has none, by the policy in force. It returns
// nil if the datagram is for no service, its client is dropped (A3.5, A3.10) or must not be
// served here (Options.Refuses), a resource has run out, or its service port has begun too many sessions on a shared listener. (The
// kernel refuses datagrams to destinations that refuse; one may get here in the moment in
// which a service's last endpoint goes.)
func (w *worker) open(o *replySocket, k key) *session {
	s := w.server
	st := s.state.Load()
	v := st.table.Resolve(service.UDP, k.client.Addr(), k.vip)
	if v.Action != policy.Accept {
		s.stats.Unserved.Add(1)
		return nil
	}
	if refuses := s.options.Refuses; refuses != nil && refuses(k.client, k.vip, v.Port) {
		return nil
	}
	p := st.services[v.Port.ID]
	h := &p.sessions[w.index]
	now := w.loop.Now()
	others := w.others.has(h, now)
	if w.shared && others && h.begin.overdrawn(now) {
		s.stats.Lost.Add(1)
		return nil
	}
	w.opening.begin(h, now, others)
	w.makeRoom(h)
	if !w.takePlace(h) {
		s.stats.Lost.Add(1)
		return nil
	}
	if o == nil {
		if o = w.replySocketFor(k.vip); o == nil {
			h.places().Give()
			s.stats.Lost.Add(1)
			return nil
		}
	}
	c := w.enter(h, o, k, now)
	c.record.Port, c.record.Kind = v.Port, v.Kind
	if !c.dial(st, &v) {
		return nil
	}
	c.record.Quiet = s.options.Log == LogSampled || s.options.Log == LogOff
	c.record.Announce(now)
	return c
}

// enter adds a session that has no endpoint yet. There must be room.
func (w *worker) enter(h *serviceSessions, o *replySocket, k key, now int64) *session {
	c := w.newSession()
	c.sessions, c.replySocket, c.batch, c.ttl, c.last = h, o, 1, redirect.FirstReturnTTL, now
	o.users++
	c.record = conntrack.Record{
		Start:    now,
		Client:   k.client,
		VIP:      k.vip,
		Protocol: service.UDP,
		Counters: h.service.counters,
		Owner:    c,
	}
	w.shard.Open(&c.record)
	w.include(c)
	return c
}

// include lets the client's datagrams find a session, and its timeout run.
func (w *worker) include(c *session) {
	k := c.key()
	w.sessions[k] = c
	if follow := w.server.options.Follow; follow != nil {
		follow(k.client, k.vip, true)
	}
	c.sessions.add(c)
	w.count++
	w.server.stats.Sessions.Add(1)
}

// exclude undoes include, except that Options.Follow hears nothing.
func (w *worker) exclude(c *session) {
	delete(w.sessions, c.key())
	if w.recent == c {
		w.recent = nil
	}
	c.sessions.remove(c)
	c.sessions.places().Give()
	w.count--
	w.server.stats.Sessions.Add(-1)
}

func (c *session) key() key { return key{c.record.Client, c.record.VIP} }

// makeRoom evicts sessions until there may be one more of a Service.
func (w *worker) makeRoom(h *serviceSessions) {
	for h.group.count >= w.maxService {
		h.group.members.largest().oldest().evict()
	}
	for w.count >= w.maxSessions {
		w.victim(h.group).oldest().evict()
	}
}

// victim returns the service port that has to give up a session for one of a Service. It
// is one of the Service's own namespace if that has its part of all sessions, else of the
// namespace with most; and there one of the Service itself if it has its part of the
// namespace's, else of the Service with most.
func (w *worker) victim(g *group) *serviceSessions {
	n := g.namespace
	if n.count*len(w.active) < w.maxSessions {
		n = w.active.largest()
	}
	if n == g.namespace && g.count > 0 && g.count*len(n.groups) >= n.count {
		return g.members.largest()
	}
	return n.groups.largest().members.largest()
}

// dial connects the session to the endpoint that the balancer proposes, or to the
// next one after a failure. If all fail, the session ends.
func (c *session) dial(st *state, v *policy.Verdict) bool {
	w := c.sessions.worker
	b := c.sessions.service.balancer
	client := c.record.Client.Addr()
	for {
		now := poll.Nanotime()
		i, _, ok := b.Next(&c.plan, v.Candidates, balancer.Conn{Client: c.record.Client, Destination: c.record.VIP}, now)
		if !ok || i == balancer.Pause { // datagrams do not wait for an endpoint to recover
			c.end(conntrack.ConnectFailed)
			return false
		}
		ep := &v.Candidates[i]
		c.record.BeginAttempt(ep, now)
		choice := w.server.options.Upstream.Choose(st.host, v, client, ep)
		c.record.Source = choice.Source
		u, errno := w.connectTo(ep, client, &choice)
		// The rest of the process has taken the descriptors, and may also take one that
		// an evicted session gives back.
		for range descriptorTries {
			if errno != sys.EMFILE && errno != sys.ENFILE {
				break
			}
			o := w.victim(c.sessions.group).oldest()
			if o == nil || o == c {
				break
			}
			o.evict()
			u, errno = w.connectTo(ep, client, &choice)
		}
		if errno == 0 {
			c.socket, u.session, c.dialed = u, c, now
			c.record.SourceAddr, _ = sys.LocalAddr(int(u.fd))
			// Pin when sending: many endpoints never reply.
			b.Connected(&c.plan, ep.Addr, client, now)
			c.record.Affinity = c.plan.Affinity()
			return true
		}
		reason := conntrack.DialErrorOf(errno)
		c.record.AttemptFailed(reason, now)
		if reason.Own() {
			c.end(conntrack.LimitReached)
			return false
		}
		b.Failed(&c.plan, ep.Addr, client, now)
	}
}

// descriptorTries bounds the sessions that one new session evicts for a descriptor.
const descriptorTries = 8

// readErrors reads the ICMP messages about the session's datagrams, and reports whether the
// endpoint is closed. Anyone who guesses the socket's port can send such a message, so only
// the endpoint itself is trusted. One that has answered is doubted at first: copies of what
// is sent to it are kept from then on, and a refusal has to quote one. read is the number
// of messages.
func (c *session) readErrors() (closed bool, read int) {
	w := c.sessions.worker
	q := &w.errors
	for ; read < errorShare && q.Read(int(c.socket.fd)) == 0; read++ {
		switch {
		case q.Errno != sys.ECONNREFUSED || q.Offender != c.record.Endpoint.Addr.Addr():
			w.server.stats.Disbelieved.Add(1)
		case c.class == unanswered:
			closed = true
		case !c.doubted:
			c.doubted = true
		case c.unacked.quotes(q.Quote):
			closed = true
		default:
			w.server.stats.Disbelieved.Add(1)
		}
	}
	return closed, read
}

// errorShare bounds how many ICMP messages are read at once.
const errorShare = 64

// failOver replaces the closed endpoint and sends the first n copies again. It
// returns the session to continue with: the same one if the endpoint never
// answered, else a new one, or nil.
func (c *session) failOver(n int) *session {
	if c.class == unanswered {
		return c.refused(n)
	}
	return c.closed(n)
}

// refused moves the session to another endpoint. It returns nil if the session
// ended.
func (c *session) refused(n int) *session {
	w := c.sessions.worker
	p := c.sessions.service
	if poll.Nanotime()-c.dialed > int64(unackedTime) {
		c.plan = balancer.Dial{} // the endpoint served for a while, so start a new plan
	}
	for {
		ep, now := c.record.Endpoint.Addr, poll.Nanotime()
		c.record.AttemptFailed(conntrack.DialRefused, now)
		p.balancer.Failed(&c.plan, ep, c.record.Client.Addr(), now)
		w.giveSocket(c.socket)
		c.socket = nil
		st := w.server.state.Load()
		v := st.table.Resolve(service.UDP, c.record.Client.Addr(), c.record.VIP)
		if v.Action != policy.Accept || st.services[v.Port.ID] != p {
			c.end(conntrack.ConnectFailed)
			return nil
		}
		if !c.dial(st, &v) {
			return nil
		}
		if w.resend(c, n) {
			return c
		}
	}
}

// closed ends the session, and starts another one for the copies.
func (c *session) closed(n int) *session {
	w := c.sessions.worker
	k, o := c.key(), c.replySocket
	if !o.listens {
		o = nil
	}
	c.sessions.service.balancer.Failed(&c.plan, c.record.Endpoint.Addr, c.record.Client.Addr(), poll.Nanotime())
	kept := c.unacked
	c.unacked = nil
	class, ttl, slot := c.outClass, c.ttl, c.slot
	c.end(conntrack.EndpointGone)
	next := w.find(o, k)
	if next != nil {
		next.outClass, next.ttl, next.slot = class, ttl, slot
	}
	if kept != nil {
		kept.session = next
		if next == nil {
			w.unacked.remove(kept)
			return nil
		}
		next.unacked = kept
	}
	if next != nil && !w.resend(next, n) {
		return next.refused(n)
	}
	return next
}

// Refresh implements conntrack.Refresher. The record is always current.
func (c *session) Refresh(r *conntrack.Record) {
	r.Progress(r.BytesFromClient, r.BytesFromEndpoint)
}

// Inspect implements conntrack.Inspector.
func (c *session) Inspect(t *conntrack.Transport) { t.Idle = max(poll.Nanotime()-c.last, 0) }

// EndConnection implements conntrack.Ender. The client's next datagram begins a new
// session.
func (c *session) EndConnection(end conntrack.End) { c.end(end) }

func (c *session) evict() { c.end(conntrack.Evicted) }

// end ends the session and writes its record. The session must not be used
// afterwards.
func (c *session) end(end conntrack.End) {
	if c.away { // settle ends it, unless it is another process's by then
		c.cut = end
		return
	}
	w := c.sessions.worker
	r := &c.record
	w.exclude(c)
	if follow := w.server.options.Follow; follow != nil {
		follow(r.Client, r.VIP, false)
	}
	w.unacked.drop(c)
	if c.socket != nil {
		w.giveSocket(c.socket)
	}
	c.replySocket.release()
	r.End = end
	r.Duration = poll.Nanotime() - r.Start
	r.Quiet = !w.server.options.Log.Wants(r)
	w.shard.Close(r)
	w.freeSession(c)
}
