package datagram

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/internal/hostnet"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// Server serves UDP. Its methods belong to one goroutine, except Stats.
type Server struct {
	options Options
	log     zerolog.Logger
	workers []*worker

	state    atomic.Pointer[state]
	stats    stats
	warnings warnings

	// What follows is the configuring goroutine's.
	services    map[service.PortName]*portService
	groups      map[service.Name]*groups
	namespaces  map[string]*namespaces
	listening   map[listeningKey]*listening
	listeningOf [2]int             // those that are not bound to a destination, by service.Family
	removed     []service.PortName // services that went since the last Prune
	once        once.Log
}

// state is one configuration in force. It never changes.
type state struct {
	table    *policy.Table
	host     hostnet.Addresses // of this node
	services []*portService    // by service.PortID; nil where there is none of UDP
}

// New gives a Server that serves nothing yet.
func New(o Options) *Server {
	if most := o.Traits.MaxListeners; most > 0 {
		o.MaxListeners = min(o.MaxListeners, most)
	}
	o.Balancer.Plan.AtOnce = maxAttempts
	s := &Server{
		options:    o,
		log:        o.Logger,
		services:   make(map[service.PortName]*portService),
		groups:     make(map[service.Name]*groups),
		namespaces: make(map[string]*namespaces),
		listening:  make(map[listeningKey]*listening),
		once:       once.Log{Logger: o.Logger},
	}
	if err := sys.CanDisown(); err != nil {
		s.once.Warn("UDP sockets", fmt.Errorf("other processes of this user on this node can join them and take a share of the datagrams (CAP_CHOWN is missing): %w", err))
	}
	s.state.Store(&state{table: policy.Compile(nil, &service.Snapshot{}, policy.Config{})})
	for i, loop := range o.Loops {
		s.workers = append(s.workers, newWorker(s, i, loop, o.Table.Shard(i)))
	}
	return s
}

// Apply puts a policy in force for new sessions, and cuts those whose endpoint
// serves no more or whose service went. Sockets of service ports that went stay open
// until Prune.
func (s *Server) Apply(table *policy.Table, host hostnet.Addresses, _ bool) {
	prev, ports := s.state.Load(), table.Snapshot().Ports
	next := &state{table: table, host: host, services: make([]*portService, len(ports))}
	copy(next.services, prev.services)
	ids := slices.Collect(table.Changed(prev.table))
	var cuts []*cut
	for _, id := range ids {
		if int(id) >= len(ports) {
			continue
		}
		next.services[id] = nil
		port := ports[id]
		if port == nil || port.Name.Protocol != service.UDP {
			continue
		}
		p := s.services[port.Name]
		if p == nil {
			p = s.addService(port)
		} else if p.port != port {
			if c := changesOf(p, port); c != nil {
				cuts = append(cuts, c)
			}
			s.warn(port, p.configure(port, &s.options.Config))
			s.onLoops(func(w *worker) { w.retime(p) })
		}
		next.services[id] = p
	}
	for _, id := range ids {
		if int(id) >= len(prev.services) || prev.services[id] == nil {
			continue
		}
		p := prev.services[id]
		if now := p.port.ID; int(now) < len(next.services) && next.services[now] == p {
			continue
		}
		delete(s.services, p.port.Name)
		s.leaveGroups(p.port.Name.Name)
		s.options.Table.Forget(p.port.Name)
		cuts = append(cuts, &cut{service: p, all: true})
		s.removed = append(s.removed, p.port.Name)
	}
	s.state.Store(next)
	if len(cuts) > 0 {
		s.cut(cuts)
	}
}

// cut ends sessions, and waits for that, so that what a client sends after Apply
// goes to the endpoints that there are. (A session that a loop makes by the state
// before is made before the loop gets to this.)
func (s *Server) cut(cuts []*cut) {
	var pending sync.WaitGroup
	for _, w := range s.workers {
		pending.Add(1)
		if !w.loop.Post(func() {
			defer pending.Done()
			for _, c := range cuts {
				w.cut(c)
			}
		}) {
			pending.Done()
		}
	}
	if s.stats.sessions.Load() > 0 { // else the loops may not even run
		pending.Wait()
	}
}

func (s *Server) addService(port *service.Port) *portService {
	p, problem := newPortService(port, &s.options.Config, s.options.Table.Counters(port.Name), s.workers, s.joinGroups(port.Name.Name))
	s.warn(port, problem)
	s.services[port.Name] = p
	return p
}

// onLoops has f run on each loop.
func (s *Server) onLoops(f func(*worker)) {
	for _, w := range s.workers {
		w.loop.Post(func() { f(w) })
	}
}

// warn logs a problem of a service port once.
func (s *Server) warn(port *service.Port, problem error) {
	s.once.Warn("Service "+port.Name.Name.String(), problem)
}

// Listen returns the sockets that a destination's datagrams are to be steered to, and
// opens them if necessary. Policy decides about each client when its session begins.
func (s *Server) Listen(o policy.Opening) (redirect.Target, error) {
	f := service.FamilyOf(o.Addr)
	at := listeningKey{name: o.Name, family: f}
	if s.listening[at] == nil && s.listeningOf[f] >= s.options.MaxListeners {
		s.once.Warn("UDP listening sockets", fmt.Errorf("more than %d UDP service ports: the others share a socket, and with it its queue", s.options.MaxListeners))
		at = listeningKey{family: f}
	}
	addr := redirect.ListenIPv4
	if f == service.IPv6 {
		addr = redirect.ListenIPv6
	}
	l := s.listening[at]
	if l == nil {
		var err error
		if l, err = openListening(at, netip.AddrPortFrom(addr, 0), s.workers); err != nil {
			return redirect.Target{}, fmt.Errorf("service %s: UDP: %w", o.Name, err)
		}
		s.add(at, l)
	}
	return redirect.Target{Port: l.address.Port(), FD: l.sockets[0].fd}, nil
}

// Unlisten does nothing: who may send is not up to the sockets.
func (s *Server) Unlisten(policy.Opening) {}

// SocketsPerPort is the number of sockets of a bound destination.
func (s *Server) SocketsPerPort() int { return len(s.workers) }

// KeepsConnections is false: sessions end with their destination (A8.2).
func (s *Server) KeepsConnections() bool { return false }

// InGrace is false: there is no handshake that could have begun before.
func (s *Server) InGrace() bool { return false }

// Bind has datagrams to a destination received by sockets that are bound to it: a
// node port, or any destination where steering binds each. While the destination
// refuses, it has no socket, so that the kernel refuses. Policy decides about each
// client. The error wraps EADDRINUSE if another program has the port.
func (s *Server) Bind(o policy.Opening) error {
	at := listeningKey{bound: o.Destination}
	if o.Action == policy.Refuse {
		s.Unbind(o.Destination)
		return nil
	}
	if s.listening[at] != nil {
		return nil
	}
	l, err := openListening(at, netip.AddrPortFrom(o.Addr, o.Port), s.workers)
	if err != nil {
		return err
	}
	s.add(at, l)
	return nil
}

// Unbind undoes Bind. Sessions whose replies leave from there end.
func (s *Server) Unbind(d service.Destination) {
	at := listeningKey{bound: d}
	if l := s.listening[at]; l != nil {
		s.closeListening(at, l)
	}
}

// add notes listening sockets that were opened.
func (s *Server) add(at listeningKey, l *listening) {
	s.listening[at] = l
	if !at.isBound() {
		s.listeningOf[at.family]++
	}
}

// Prune closes the listening sockets of service ports that went. Steering must not lead
// to them any more.
func (s *Server) Prune() {
	for _, name := range s.removed {
		if s.services[name] != nil {
			continue // it came back
		}
		for _, f := range []service.Family{service.IPv4, service.IPv6} {
			at := listeningKey{name: name, family: f}
			if l := s.listening[at]; l != nil {
				s.closeListening(at, l)
			}
		}
	}
	s.removed = nil
}

func (s *Server) closeListening(at listeningKey, l *listening) {
	delete(s.listening, at)
	if !at.isBound() {
		s.listeningOf[at.family]--
	}
	for _, sh := range l.sockets {
		if !sh.worker.loop.Post(sh.close) {
			sys.Close(sh.fd)
		}
	}
}

// Stop ends all sessions and closes all sockets. Steering should have been taken
// back before. The loops go on.
func (s *Server) Stop(ctx context.Context) error {
	for at, l := range s.listening {
		s.closeListening(at, l)
	}
	var pending sync.WaitGroup
	for _, w := range s.workers {
		pending.Add(1)
		if !w.loop.Post(func() { defer pending.Done(); w.stop() }) {
			pending.Done()
		}
	}
	done := make(chan struct{})
	go func() { pending.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("ending %d UDP sessions: %w", s.stats.sessions.Load(), ctx.Err())
	}
}

// stats counts what concerns no single session.
type stats struct {
	sessions    atomic.Int64
	pauses      atomic.Uint64
	unserved    atomic.Uint64
	lost        atomic.Uint64
	resent      atomic.Uint64
	disbelieved atomic.Uint64
	conflicts   atomic.Uint64
}

// Stats is what a Server has counted.
type Stats struct {
	Sessions    int64  // now
	Pauses      uint64 // times that a listener paused, as its service port had begun too many sessions
	Unserved    uint64 // datagrams that policy dropped, or that were for no service
	Lost        uint64 // datagrams that could not be sent on: no room in the kernel, too large for the way
	Resent      uint64 // datagrams that were sent again because an endpoint was closed
	Disbelieved uint64 // ICMP messages about sessions that were not believed
	Conflicts   uint64 // destinations whose port another program has on all addresses
}

// Stats gives what was counted.
func (s *Server) Stats() Stats {
	return Stats{
		Sessions:    s.stats.sessions.Load(),
		Pauses:      s.stats.pauses.Load(),
		Unserved:    s.stats.unserved.Load(),
		Lost:        s.stats.lost.Load(),
		Resent:      s.stats.resent.Load(),
		Disbelieved: s.stats.disbelieved.Load(),
		Conflicts:   s.stats.conflicts.Load(),
	}
}

// InUse tells whether an error of Bind says that another program has the port.
func InUse(err error) bool { return errors.Is(err, sys.EADDRINUSE) }
