package datagram

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	// batchSlots is how many datagrams, or GSO batches, are received at once.
	batchSlots = 32
	// spareSessions bounds the unused session objects that are kept for reuse.
	spareSessions = 1024
)

// worker is the Server's part on one event loop. All of its state belongs to that
// loop. Other goroutines access it only by post.
type worker struct {
	server *Server
	index  int
	loop   *poll.Loop
	shard  *conntrack.Shard

	maxSessions, maxService, maxSpare int

	sessions     map[key]*session
	recent       *session // the last result of find
	count        int
	active       parts[*namespace]
	replySockets map[netip.AddrPort]*replySocket
	spares       [2][2]spares // by service.Family, then tracked and untracked
	unacked      keeper
	spare        []*session
	round        uint32 // number of the loop's round; it wraps around
	others       otherUsers
	opening      opening
	shared       bool // whether the current listening socket is shared

	// upIn receives clients' datagrams. up holds those of one session for its
	// endpoint.
	upIn *sys.Inbox
	up   *sys.Outbox
	// upAfter is how many of the session's copies are older than the datagrams in
	// up.
	upAfter int
	errors  sys.ErrorQueue
	// downIn receives endpoints' datagrams. Its first downUsed slots are queued in
	// down for one reply socket.
	downIn     *sys.Inbox
	downUsed   int
	down       *sys.Outbox
	downSocket *replySocket
}

func newWorker(s *Server, index int, loop *poll.Loop, shard *conntrack.Shard) *worker {
	o := &s.options
	n := len(o.Loops)
	part := func(all int) int { return max((all+n-1)/n, 1) }
	w := &worker{
		server:       s,
		index:        index,
		loop:         loop,
		shard:        shard,
		maxSessions:  part(o.MaxSessions),
		maxService:   part(o.MaxServiceSessions),
		maxSpare:     max(part(o.MaxSessions)/8, 2*leastSpare),
		sessions:     make(map[key]*session),
		replySockets: make(map[netip.AddrPort]*replySocket),
		unacked:      keeper{loop: loop},
		upIn:         sys.NewInbox(batchSlots),
		up:           sys.NewOutbox(batchSlots),
		downIn:       sys.NewInbox(batchSlots),
		down:         sys.NewOutbox(batchSlots),
	}
	loop.Post(func() { loop.AtTick(w.endRound) })
	return w
}

// endRound runs at the end of each round of the loop.
func (w *worker) endRound() {
	w.flushDown()
	w.others.endRound(w.loop)
	w.round++
}

// find returns the session of a client and creates it if necessary; nil if the
// datagram must be dropped. Its replies leave by o, or if that is nil, by a reply
// socket of its destination.
func (w *worker) find(o *replySocket, k key) *session {
	if c := w.recent; c != nil && c.record.Client == k.client && c.record.VIP == k.vip {
		return c
	}
	c := w.sessions[k]
	if c == nil {
		c = w.open(o, k)
	}
	w.recent = c
	return c
}

func (w *worker) newSession() *session {
	if n := len(w.spare); n > 0 {
		c := w.spare[n-1]
		w.spare[n-1] = nil
		w.spare = w.spare[:n-1]
		return c
	}
	return new(session)
}

func (w *worker) freeSession(c *session) {
	*c = session{}
	if len(w.spare) < spareSessions {
		w.spare = append(w.spare, c)
	}
}

// retime resets a service port's timer after its timeouts changed.
func (w *worker) retime(p *portService) { p.sessions[w.index].schedule() }

// cut ends the sessions that a configuration change ends (A8.2).
func (w *worker) cut(c *cut) {
	h := &c.service.sessions[w.index]
	for i := range h.lists {
		for s := h.lists[i].head; s != nil; {
			next := s.next
			if c.hits(&s.record) {
				s.end(conntrack.EndpointGone)
			}
			s = next
		}
	}
}

// endOf ends the sessions that reply by a closed socket.
func (w *worker) endOf(o *replySocket, end conntrack.End) {
	for _, c := range w.sessions {
		if c.replySocket == o {
			c.end(end)
		}
	}
}

// replyElsewhere has the answers of a listening socket's sessions leave by a reply socket. It
// reports whether that could be opened, or there are none.
func (w *worker) replyElsewhere(o *replySocket) bool {
	for _, c := range w.sessions {
		if c.replySocket != o {
			continue
		}
		other := w.replySocketFor(o.address)
		if other == nil {
			return false
		}
		o.release()
		c.replySocket = other
		other.users++
	}
	return true
}

// endFrom ends the sessions whose endpoints answer to an address that the node has lost.
func (w *worker) endFrom(lost hostnet.Addresses) {
	for _, c := range w.sessions {
		if _, is := lost[c.record.SourceAddr.Addr()]; is {
			c.end(conntrack.EndpointGone)
		}
	}
}

// stop ends all sessions and closes all sockets.
func (w *worker) stop() {
	w.flushDown()
	for _, c := range w.sessions {
		c.end(conntrack.Shutdown)
	}
	for _, o := range w.replySockets {
		w.loop.Cancel(&o.timer)
		o.close()
	}
	for f := range w.spares {
		for i := range w.spares[f] {
			for pool := &w.spares[f][i]; pool.len() > 0; {
				w.closeSocket(pool.pop())
			}
		}
	}
	w.loop.Cancel(&w.unacked.timer)
	w.shard.Flush()
}
