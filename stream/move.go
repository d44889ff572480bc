package stream

import (
	"encoding/json"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/message"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/upstream"
)

// Which process a connection is with, while another one takes over: one that is relayed moves;
// one that is dialled, or waits for a PROXY header or a place, first gets its endpoint where it
// is, within the time that this may take, and moves then; one that is held moves, as only the next process
// learns of endpoints. A connection whose destination is not the same service port's in the next
// process stays.

// movedConn is a connection on its way to another process. Without a link, it is held.
type movedConn struct {
	Record   conntrack.Moved `json:"record"`
	Link     *relay.Moved    `json:"link,omitempty"`     // of a relayed TCP connection
	Messages *message.Moved  `json:"messages,omitempty"` // of a relayed association of SCTP
	Bound    bool            `json:"bound,omitempty"`    // its socket has the client's address, see upstream.Rules.Hold
}

// kind is what the other process is told: it leaves kinds that it does not know.
func (m *movedConn) kind() string {
	kind := strings.ToLower(m.Record.Protocol.String())
	if !m.Record.Connected {
		kind += " held" // it waits for an endpoint
	}
	return kind
}

// take sets the descriptors, and reports whether they, and what is said, make a connection.
func (m *movedConn) take(fds []int) bool {
	relayed := m.Record.Connected && m.Record.Endpoint != nil
	switch {
	case m.Link == nil && m.Messages == nil:
		return !m.Record.Connected && m.Record.Protocol != service.UDP && len(fds) == 1
	case m.Messages == nil:
		return relayed && m.Record.Protocol == service.TCP && m.Link.SetFDs(fds) == nil
	case m.Link == nil:
		return relayed && m.Record.Protocol == service.SCTP && m.Messages.SetFDs(fds) == nil
	}
	return false
}

// leaving is a connection that is out of its loop.
type leaving struct {
	conn  *conn
	id    uint64
	state movedConn
	fds   []int
	began time.Time
}

// moveAtOnce bounds the connections that are out of their loop at the same time: one message
// has their descriptors, two sockets and two pipes, or files in memory, for each at most.
const moveAtOnce = handover.MostMoved / 6

// Pauses says how long connections were out of their loops.
type Pauses []time.Duration

// Move gives connections to another process by a function that tells which it has, until there
// is none left that can move or the function returns an error. It returns how long each was
// with no process. Leave comes before it. It may be called again, for connections that have
// got an endpoint meanwhile.
func (s *Server) Move(give func([]handover.Moved) ([]bool, error)) (pauses Pauses, err error) {
	for _, w := range s.workers {
		var all []leaving
		w.run(func() { all = w.movable() })
		for len(all) > 0 {
			n := min(len(all), moveAtOnce)
			some := all[:n]
			all = all[n:]
			w.run(func() { some = w.detach(some) })
			taken := make([]bool, len(some))
			if err == nil && len(some) > 0 {
				taken, err = give(messages(some))
			}
			w.run(func() {
				for i := range some {
					some[i].settle(taken[i], err == nil)
				}
			})
			for i := range some {
				if taken[i] {
					pauses = append(pauses, time.Since(some[i].began))
				}
			}
			if err != nil {
				return pauses, err
			}
		}
	}
	return pauses, nil
}

// run runs f on the worker's loop, and waits for it.
func (w *worker) run(f func()) {
	<-poll.PostAll([]*poll.Loop{w.loop}, func(int) { f() })
}

// movable lists the connections that can move now.
func (w *worker) movable() (list []leaving) {
	w.shard.Each(func(r *conntrack.Record) {
		if c, is := r.Owner.(*conn); is && c.counts&amongStaying == 0 && c.mayMove() {
			list = append(list, leaving{conn: c, id: r.ID})
		}
	})
	return list
}

// mayMove reports whether the connection is relayed, or held and nothing of it was read: a
// PROXY header for the endpoint may wait in the link.
func (c *conn) mayMove() bool {
	return c.cut == conntrack.EndNone && (c.record.Connected || c.awaits == endpoints && !c.carrier.holds())
}

// detach takes connections out of the loop. Those that have ended since movable, and those that
// cannot move now, are left out.
func (w *worker) detach(list []leaving) (out []leaving) {
	for _, l := range list {
		c := l.conn
		if c.record.ID != l.id || !c.mayMove() {
			continue
		}
		l.began = time.Now()
		l.state.Bound = c.held != (upstream.Range{})
		if c.record.Connected {
			var ok bool
			if l.fds, ok = c.carrier.detach(&l.state); !ok {
				continue
			}
		} else {
			c.release()
			c.endWait()
			l.fds = []int{int(c.client)}
		}
		c.awaits = process
		l.state.Record = c.record.Moved(poll.Nanotime())
		out = append(out, l)
	}
	return out
}

// messages are what another process is told of connections.
func messages(list []leaving) []handover.Moved {
	out := make([]handover.Moved, len(list))
	for i := range list {
		state, _ := json.Marshal(&list[i].state) // plain data
		out[i] = handover.Moved{Kind: list[i].state.kind(), State: state, FDs: list[i].fds}
	}
	return out
}

// settle ends the time out of the loop. A connection that was not given goes on here. asked says
// that the other process was asked for it, and need not be again.
func (l *leaving) settle(given, asked bool) {
	c := l.conn
	w := c.worker
	c.awaits = nothing
	if !given && asked {
		c.counts |= amongStaying
	}
	switch {
	case given && c.record.Connected:
		c.carrier.given(&l.state)
		w.forget(c)
	case given:
		c.endDialing()
		c.carrier.drop()         // a PROXY header, which the other one writes anew
		sys.Close(int(c.client)) // the other process has it
		w.forget(c)
	case c.record.Connected:
		c.carrier.back(&l.state)
		switch c.cut { // meanwhile
		case conntrack.EndNone:
		case conntrack.Rebalanced: // it was idle, and may not be now
			c.cut = conntrack.EndNone
		default:
			c.abort()
		}
	case c.cut != conntrack.EndNone:
		c.fail(c.cut)
	default:
		c.hold()
	}
}

// forget frees a connection that another process has, without a record.
func (w *worker) forget(c *conn) {
	c.carrier.closed()
	w.shard.Leave(&c.record)
	w.uncount(c)
}

// arrived is a connection from another process.
type arrived struct {
	worker *worker
	state  movedConn
	fds    []int
	port   *service.Port
	pool   *pool
	held   upstream.Range
}

// Take accepts a connection from another process; nil if it is to stay there. It is safe for
// concurrent use with all but itself.
func (s *Server) Take(m *handover.Moved) handover.Taken {
	a := &arrived{fds: m.FDs}
	if json.Unmarshal(m.State, &a.state) != nil || a.state.kind() != m.Kind || !a.state.take(a.fds) {
		return nil
	}
	r := &a.state.Record
	st := s.state.Load()
	v := st.table.Resolve(r.Protocol, r.Client.Addr(), r.VIP)
	if v.Port == nil || v.Port.Name != r.Port {
		return nil
	}
	a.port, a.pool = v.Port, st.pools[v.Port.ID]
	if !s.hasRoom(a.pool) {
		return nil
	}
	if a.state.Bound {
		var errno sys.Errno
		if a.held, errno = s.options.Upstream.Hold(r.Client.Addr()); errno != 0 {
			return nil
		}
	}
	a.pool.countOpen(s) // at once: others of the batch need room, and a process without connections may end
	a.worker = s.workers[s.taken%len(s.workers)]
	s.taken++
	return a
}

// hasRoom reports whether new connections have room beside one that arrives, at each limit.
func (s *Server) hasRoom(p *pool) bool {
	below := func(open *atomic.Int64, most int64) bool { return open.Load() < most-max(most/64, 1) }
	return below(&s.open, s.limit.Load()) &&
		below(&p.service.open, s.mostOf(s.config.MaxServiceConnections, 16)) &&
		below(&p.namespace.open, s.mostOf(s.config.MaxNamespaceConnections, 32))
}

// countOpen counts a connection at each limit.
func (p *pool) countOpen(s *Server) {
	s.open.Add(1)
	p.service.open.Add(1)
	p.namespace.open.Add(1)
}

// uncountOpen undoes countOpen, or that it was entered everywhere.
func (p *pool) uncountOpen(s *Server) {
	p.leave()
	s.open.Add(-1)
}

// Discard implements handover.Taken.
func (a *arrived) Discard() {
	a.pool.uncountOpen(a.worker.server)
	if a.held != (upstream.Range{}) {
		a.worker.server.options.Upstream.Release(a.state.Record.Client.Addr())
	}
	for _, fd := range a.fds {
		sys.Close(fd)
	}
}

// Begin implements handover.Taken.
func (a *arrived) Begin() {
	if !a.worker.loop.Post(a.begin) {
		a.Discard()
	}
}

func (a *arrived) begin() {
	w, m := a.worker, &a.state.Record
	c := w.newConn(m.Protocol)
	c.pool, c.held = a.pool, a.held
	c.record.Counters, c.record.Owner = a.pool.counters, c
	w.shard.Join(&c.record, m, a.port, poll.Nanotime())
	if m.Connected {
		c.counts |= amongServed
		c.pool.service.served.Add(1)
		c.carrier.attach(&a.state)
		return
	}
	c.client = int32(a.fds[0])
	c.plan = balancer.Dial{}
	st, v := w.decide(m.Protocol, m.Client.Addr(), m.VIP)
	if v.Port == nil || v.Port.Name != m.Port {
		v = policy.Verdict{Port: a.port} // it went just now: no endpoints
	}
	if c.begin(st, &v) {
		w.stalled = append(w.stalled, stalled{conn: c})
		w.awaitRoom()
	}
}
