package stream

import (
	"encoding/json"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/upstream"
)

// Which process a connection is with, while another one takes over: one that is relayed moves;
// one that is dialled, or waits for a PROXY header or a place, first gets its endpoint where it
// is, within the time that this may take, and moves then; one that is held moves, as only the next process
// learns of endpoints. An association of SCTP stays, and so does a connection whose destination
// is not the same service port's in the next process.

// Kinds of moved connections.
const (
	movedTCP  = "tcp"
	movedHeld = "tcp held" // it waits for an endpoint
)

// movedConn is a connection on its way to another process.
type movedConn struct {
	Record conntrack.Moved `json:"record"`
	Link   *relay.Moved    `json:"link,omitempty"`  // of a relayed one
	Bound  bool            `json:"bound,omitempty"` // its socket has the client's address, see upstream.Rules.Hold
}

// leaving is a connection that is out of its loop.
type leaving struct {
	conn  *tcpConn
	id    uint64
	state movedConn
	fds   []int
	began time.Time
}

// moveAtOnce bounds the connections that are out of their loop at the same time: one message
// has their descriptors, two sockets and two pipes for each at most.
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
					some[i].conn.settle(taken[i], err == nil)
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
		c, is := r.Owner.(*conn)
		if !is {
			return
		}
		if t, is := c.carrier.(*tcpConn); is && c.counts&amongStaying == 0 && t.mayMove() {
			list = append(list, leaving{conn: t, id: r.ID})
		}
	})
	return list
}

// mayMove reports whether the connection is relayed, or held and nothing of it was read: a
// PROXY header for the endpoint may wait in the link.
func (t *tcpConn) mayMove() bool {
	return t.cut == conntrack.EndNone && (t.record.Connected || t.awaits == endpoints && !t.worker.relay.Holds(&t.link))
}

// detach takes connections out of the loop. Those that have ended since movable, and those that
// cannot move now, are left out.
func (w *worker) detach(list []leaving) (out []leaving) {
	for _, l := range list {
		t := l.conn
		if t.record.ID != l.id || !t.mayMove() {
			continue
		}
		l.began = time.Now()
		l.state.Bound = t.held != (upstream.Range{})
		if t.record.Connected {
			link, ok := w.relay.Detach(&t.link)
			if !ok {
				continue
			}
			l.state.Link, l.fds = &link, link.FDs(nil)
		} else {
			t.release()
			t.endWait()
			l.fds = []int{int(t.client)}
		}
		t.awaits = process
		l.state.Record = t.record.Moved(poll.Nanotime())
		out = append(out, l)
	}
	return out
}

// messages are what another process is told of connections.
func messages(list []leaving) []handover.Moved {
	out := make([]handover.Moved, len(list))
	for i := range list {
		state, _ := json.Marshal(&list[i].state) // plain data
		kind := movedTCP
		if list[i].state.Link == nil {
			kind = movedHeld
		}
		out[i] = handover.Moved{Kind: kind, State: state, FDs: list[i].fds}
	}
	return out
}

// settle ends the time out of the loop. A connection that was not given goes on here. asked says
// that the other process was asked for it, and need not be again.
func (t *tcpConn) settle(given, asked bool) {
	w := t.worker
	t.awaits = nothing
	if !given && asked {
		t.counts |= amongStaying
	}
	switch {
	case given && t.record.Connected:
		w.relay.Given(&t.link)
		w.forget(t)
	case given:
		t.endDialing()
		w.relay.Drop(&t.link)    // a PROXY header, which the other one writes anew
		sys.Close(int(t.client)) // the other process has it
		w.forget(t)
	case t.record.Connected:
		w.relay.Return(&t.link)
		switch t.cut { // meanwhile
		case conntrack.EndNone:
		case conntrack.Rebalanced: // it was idle, and may not be now
			t.cut = conntrack.EndNone
		default:
			t.abort()
		}
	case t.cut != conntrack.EndNone:
		t.fail(t.cut)
	default:
		t.hold()
	}
}

// forget frees a connection that another process has, without a record.
func (w *worker) forget(t *tcpConn) {
	t.closed()
	w.shard.Leave(&t.record)
	w.uncount(&t.conn)
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
	if m.Kind != movedTCP && m.Kind != movedHeld || json.Unmarshal(m.State, &a.state) != nil {
		return nil
	}
	r, link := &a.state.Record, a.state.Link
	if r.Protocol != service.TCP || (m.Kind == movedTCP) != (link != nil && r.Connected && r.Endpoint != nil) {
		return nil
	}
	if link == nil && len(a.fds) != 1 || link != nil && link.SetFDs(a.fds) != nil {
		return nil
	}
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
	a.pool.countOpen(s, 1) // at once: others of the batch need room, and a process without connections may end
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

// countOpen counts connections at each limit.
func (p *pool) countOpen(s *Server, n int64) {
	s.open.Add(n)
	p.service.open.Add(n)
	p.namespace.open.Add(n)
}

// Discard implements handover.Taken.
func (a *arrived) Discard() {
	a.pool.countOpen(a.worker.server, -1)
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
	c := w.newConn(service.TCP)
	t := c.carrier.(*tcpConn)
	c.pool, c.held = a.pool, a.held
	c.record.Counters, c.record.Owner = a.pool.counters, c
	w.shard.Join(&c.record, m, a.port, poll.Nanotime())
	if a.state.Link != nil {
		c.counts |= amongServed
		c.pool.service.served.Add(1)
		w.relay.Attach(&t.link, a.state.Link, t)
		return
	}
	c.client = int32(a.fds[0])
	c.plan = balancer.Dial{}
	st, v := w.decide(service.TCP, m.Client.Addr(), m.VIP)
	if v.Port == nil || v.Port.Name != m.Port {
		v = policy.Verdict{Port: a.port} // it went just now: no endpoints
	}
	if c.begin(st, &v) {
		w.stalled = append(w.stalled, stalled{conn: c})
		w.awaitRoom()
	}
}
