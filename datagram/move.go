package datagram

import (
	"encoding/json"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/upstream"
)

// While another process takes over, sessions move to it with their sockets to endpoints, after
// this process has stopped to receive from clients and before that one begins: until then, what
// clients send waits in the listening sockets, and what endpoints send in the sessions'. A
// session whose destination is not the same service port's in the next process stays.

// movedUDP is the kind of a moved session.
const movedUDP = "udp"

// movedSession is a session on its way to another process. Times are in ns.
type movedSession struct {
	Record conntrack.Moved `json:"record"`
	Socket movedSocket     `json:"socket"`
	Slot   uint16          `json:"slot"`             // session.slot
	Idle   int64           `json:"idle"`             // since the last datagram
	Dialed int64           `json:"dialed"`           // since the endpoint was chosen
	Phase  class           `json:"phase"`            // session.class
	Class  uint8           `json:"class,omitempty"`  // session.outClass
	Doubt  bool            `json:"doubt,omitempty"`  // session.doubted
	TTL    uint8           `json:"ttl"`              // session.ttl
	Copies [][]byte        `json:"copies,omitempty"` // session.unacked
}

// movedSocket is what a process knows of a session's socket.
type movedSocket struct {
	Once      bool  `json:"once,omitempty"`
	Untracked bool  `json:"untracked,omitempty"`
	GRO       bool  `json:"gro,omitempty"`
	NoGSO     bool  `json:"no_gso,omitempty"`
	Class     uint8 `json:"class,omitempty"`
	TTL       uint8 `json:"ttl,omitempty"`
	Held      bool  `json:"held,omitempty"` // it has the client's address, see upstream.Rules.Hold
}

// Move gives the sessions to another process by a function that tells which it has, until there
// is none left that can move or the function returns an error. It returns how many the other
// process has. Pause comes before it, and Leave after it.
func (s *Server) Move(give func([]handover.Moved) ([]bool, error)) (moved int, err error) {
	for _, w := range s.workers {
		for err == nil {
			var list []*session
			var messages []handover.Moved
			w.run(func() { list, messages = w.detach() })
			if len(list) == 0 {
				break
			}
			var taken []bool
			taken, err = give(messages)
			w.run(func() {
				for i, c := range list {
					c.settle(taken[i])
				}
			})
			for _, is := range taken {
				if is {
					moved++
				}
			}
		}
	}
	return moved, err
}

// run runs f on the worker's loop, and waits for it.
func (w *worker) run(f func()) { <-poll.PostAll([]*poll.Loop{w.loop}, func(int) { f() }) }

// detach takes some sessions out of the loop, in the order in which they expire, and describes
// them for another process. settle must follow.
func (w *worker) detach() (list []*session, messages []handover.Moved) {
	w.flushDown() // the other one's answers come after these
	for _, n := range w.active {
		for _, g := range n.groups {
			for _, h := range g.members {
				list = h.appendMovable(list)
			}
		}
	}
	for _, c := range list {
		c.away = true
		w.exclude(c)
		w.loop.Remove(c.socket.reg)
		state, _ := json.Marshal(c.moved()) // plain data
		messages = append(messages, handover.Moved{Kind: movedUDP, State: state, FDs: []int{int(c.socket.fd)}})
	}
	return list, messages
}

// appendMovable adds sessions that can move to a list, until it is full.
func (h *serviceSessions) appendMovable(list []*session) []*session {
	for i := range h.lists {
		for c := h.lists[i].head; c != nil && len(list) < handover.MostMoved; c = c.next {
			if !c.stays {
				list = append(list, c)
			}
		}
	}
	return list
}

// moved describes a session for another process.
func (c *session) moved() *movedSession {
	now, u := poll.Nanotime(), c.socket
	m := &movedSession{
		Record: c.record.Moved(now),
		Socket: movedSocket{
			Once: u.once, Untracked: u.untracked, GRO: u.gro, NoGSO: u.noGSO, Class: u.class, TTL: u.ttl, Held: u.held.IsValid(),
		},
		Slot: c.slot, Idle: now - c.last, Dialed: now - c.dialed, Phase: c.class, Class: c.outClass, Doubt: c.doubted, TTL: c.ttl,
	}
	for i := range c.unacked.count() {
		m.Copies = append(m.Copies, c.unacked.datagram(i))
	}
	return m
}

// settle ends the time out of the loop. A session that another process has leaves no record here.
func (c *session) settle(given bool) {
	w := c.sessions.worker
	c.away = false
	if given {
		w.unacked.drop(c)
		sys.Close(int(c.socket.fd))
		c.socket.letGo()
		c.replySocket.release()
		w.shard.Leave(&c.record)
		w.freeSession(c)
		return
	}
	c.stays = true
	c.sessions.places().Add()
	w.include(c)
	if c.cut == conntrack.EndNone && !c.socket.listen() {
		c.cut = conntrack.LimitReached
	}
	if c.cut != conntrack.EndNone {
		c.end(c.cut)
	}
}

// arrived is a session from another process.
type arrived struct {
	listener *listener
	service  *portService
	port     *service.Port
	state    movedSession
	fd       int
	gone     bool // its endpoint serves no more
}

// Take accepts a session from another process; nil if it is to stay there. It belongs to the
// configuring goroutine. Apply comes before it, and Begin after it.
func (s *Server) Take(m *handover.Moved) handover.Taken {
	var a arrived
	if m.Kind != movedUDP || len(m.FDs) != 1 || json.Unmarshal(m.State, &a.state) != nil {
		return nil
	}
	r := &a.state.Record
	if r.Protocol != service.UDP || r.Endpoint == nil || a.state.Phase >= classes {
		return nil
	}
	st := s.state.Load()
	port := st.table.Resolve(service.UDP, r.Client.Addr(), r.VIP).Port
	if port == nil || port.Name != r.Port {
		return nil
	}
	if a.listener = s.listenerOf(port.Name, r.VIP, int(a.state.Slot)); a.listener == nil {
		return nil
	}
	if a.state.Socket.Held {
		// Without a hold, nothing may be released: this process needs no answers to such addresses.
		if held, errno := s.options.Upstream.Hold(r.Client.Addr()); errno != 0 || held == (upstream.Range{}) {
			return nil
		}
	}
	a.service, a.port, a.fd, a.gone = st.services[port.ID], port, m.FDs[0], !serves(port, r.Endpoint.Addr)
	return &a
}

// serves reports whether an endpoint keeps its sessions.
func serves(port *service.Port, endpoint netip.AddrPort) bool {
	return slices.ContainsFunc(port.Families[service.FamilyOf(endpoint.Addr())].Endpoints, func(e service.Endpoint) bool {
		return e.Addr == endpoint && (e.Serving || e.Ready)
	})
}

// listenerOf returns the listening socket that a session's datagrams come to: the one in the same
// place as in the process before. It is nil if there is none.
func (s *Server) listenerOf(port service.PortName, vip netip.AddrPort, slot int) *listener {
	f := service.FamilyOf(vip.Addr())
	for _, at := range []listeningKey{
		{bound: service.Destination{Protocol: service.UDP, Addr: vip.Addr(), Port: vip.Port()}}, {name: port, family: f}, {family: f},
	} {
		if l := s.listening[at]; l != nil {
			return l.sockets[slot%len(l.sockets)]
		}
	}
	return nil
}

// Discard implements handover.Taken.
func (a *arrived) Discard() {
	sys.Close(a.fd)
	if a.state.Socket.Held {
		a.listener.worker.server.options.Upstream.Release(a.state.Record.Client.Addr())
	}
}

// Begin implements handover.Taken.
func (a *arrived) Begin() {
	if !a.listener.worker.loop.Post(a.begin) {
		a.Discard()
	}
}

func (a *arrived) begin() {
	w, m := a.listener.worker, &a.state
	h, now := &a.service.sessions[w.index], poll.Nanotime()
	w.makeRoom(h)
	end := conntrack.EndNone
	if a.gone {
		end = conntrack.EndpointGone
	}
	o := a.listener.replySocket
	if o == nil {
		o = w.replySocketFor(m.Record.VIP)
	}
	if o == nil {
		end, o = conntrack.LimitReached, &replySocket{listens: true}
	}
	c := w.newSession()
	c.sessions, c.replySocket, c.batch, c.ttl, c.last = h, o, 1, m.TTL, now-m.Idle
	c.dialed, c.class, c.outClass, c.doubted, c.slot = now-m.Dialed, m.Phase, m.Class, m.Doubt, a.listener.slot
	o.users++
	u := &socket{
		worker: w, session: c, fd: int32(a.fd), family: service.FamilyOf(m.Record.Endpoint.Addr.Addr()),
		once: m.Socket.Once, untracked: m.Socket.Untracked, gro: m.Socket.GRO, noGSO: m.Socket.NoGSO, class: m.Socket.Class, ttl: m.Socket.TTL,
	}
	if m.Socket.Held {
		u.held = m.Record.Client.Addr()
	}
	c.socket, c.record.Counters, c.record.Owner = u, a.service.counters, c
	w.shard.Join(&c.record, &m.Record, a.port, now)
	h.places().Add()
	w.include(c)
	for _, p := range m.Copies {
		w.unacked.keepOne(c, p)
	}
	if !u.listen() && end == conntrack.EndNone {
		end = conntrack.LimitReached
	}
	if end != conntrack.EndNone {
		c.end(end)
	}
}
