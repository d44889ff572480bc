package datagram

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	// batchSlots is how many datagrams, or GRO batches, are received at once.
	batchSlots = 32
	// spareSessions bounds the memory that is kept for sessions to come.
	spareSessions = 1024
)

// worker is the Server's part of one event loop. Everything in it belongs to
// that loop; other goroutines reach it by post only.
type worker struct {
	server *Server
	index  int
	loop   *poll.Loop
	shard  *conntrack.Shard

	maxSessions, maxService, maxSpare int

	sessions map[key]*session
	recent   *session // the one that was found last
	count    int
	active   []*namespace // those with sessions
	outlets  map[netip.AddrPort]*outlet
	spares   [2][2]spares // by service.Family; those that pass connection tracking last
	unacked  keeper
	spare    []*session
	round    uint32 // of the loop; it wraps
	others   otherUsers
	opening  opening
	shared   bool // the listener whose turn it is is shared

	// upIn is where clients' datagrams are received; up are those of one
	// session, on their way to its endpoint.
	upIn *sys.Inbox
	up   *sys.Outbox
	// upAfter is the number of copies of datagrams that were sent before those of up.
	upAfter int
	errors  sys.ErrorQueue
	// downIn is where endpoints' datagrams are received; its first downUsed
	// slots are on their way, in down, to clients, out of one outlet.
	downIn     *sys.Inbox
	downUsed   int
	down       *sys.Outbox
	downOutlet *outlet
}

func newWorker(s *Server, index int, loop *poll.Loop, shard *conntrack.Shard) *worker {
	o := &s.options
	n := len(o.Loops)
	part := func(all int) int { return max((all+n-1)/n, 1) }
	w := &worker{
		server:      s,
		index:       index,
		loop:        loop,
		shard:       shard,
		maxSessions: part(o.MaxSessions),
		maxService:  part(o.MaxServiceSessions),
		maxSpare:    max(part(o.MaxSessions)/8, 2*leastSpare),
		sessions:    make(map[key]*session),
		outlets:     make(map[netip.AddrPort]*outlet),
		unacked:     keeper{loop: loop},
		upIn:        sys.NewInbox(batchSlots),
		up:          sys.NewOutbox(batchSlots),
		downIn:      sys.NewInbox(batchSlots),
		down:        sys.NewOutbox(batchSlots),
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

// find gives the session of a client, or makes it; nil if there is to be none.
// Its answers leave by o, or by an outlet of its destination if that is nil.
func (w *worker) find(o *outlet, k key) *session {
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

// retime sets a service port's timer anew after its timeouts changed.
func (w *worker) retime(p *portService) { p.sessions[w.index].schedule() }

// cut ends the sessions that a change of the configuration ends (A8.2).
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
	// A socket that is bound to a destination can keep the kernel from refusing
	// what is sent there.
	for _, o := range w.outlets {
		if o.users == 0 && o.fd >= 0 {
			w.loop.Cancel(&o.timer)
			o.close()
		}
	}
}

// endOf ends the sessions whose answers leave by an outlet that is closed.
func (w *worker) endOf(o *outlet) {
	for _, c := range w.sessions {
		if c.outlet == o {
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
	for _, o := range w.outlets {
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
