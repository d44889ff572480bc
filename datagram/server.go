package datagram

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// Server serves UDP. Its methods must be called from one goroutine, except Stats.
type Server struct {
	options Options
	workers []*worker

	state    atomic.Pointer[state]
	stats    Stats
	warnings warnings
	open     atomic.Int64 // see places

	// The fields below belong to the configuring goroutine.
	services    map[service.PortName]*portService
	groups      map[service.Name]*groups
	namespaces  map[string]*namespaces
	listening   map[listeningKey]*listening
	listeningOf [2]int             // number of those that are not bound to a destination, by service.Family
	removed     []service.PortName // service ports deleted since the last Prune
	inherited   *handover.Sockets  // of the process before, until Begin; nil if there is none
	once        once.Log
}

// state is a configuration. It never changes.
type state struct {
	table    *policy.Table
	host     hostnet.Addresses // this node's addresses
	services []*portService    // by service.PortID; nil for other protocols
}

// New creates a Server without services.
func New(o Options) *Server {
	if most := o.Traits.MaxListeners; most > 0 {
		o.MaxListeners = min(o.MaxListeners, most)
	}
	o.Balancer.Plan.AtOnce = maxAttempts
	s := &Server{
		options:    o,
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

// Apply applies a policy to new sessions, and ends the sessions of deleted services
// and unusable endpoints (A8.2), and those with an address that the node has no more,
// where no answer would arrive. Sockets of deleted service ports stay open until
// Prune.
func (s *Server) Apply(table *policy.Table, host hostnet.Addresses, _ bool) {
	prev := s.state.Load()
	var cuts []*cut
	services := policy.Sync(table, prev.table, []service.Protocol{service.UDP}, prev.services, func(port *service.Port) *portService {
		p := s.services[port.Name]
		if p == nil {
			return s.addService(port)
		}
		if p.port != port {
			if c := changesOf(p, port); c != nil {
				cuts = append(cuts, c)
			}
			s.warn(port, p.configure(port, &s.options.Config))
			poll.PostAll(s.options.Loops, func(i int) { s.workers[i].retime(p) })
		}
		return p
	}, func(p *portService) {
		delete(s.services, p.port.Name)
		s.leaveGroups(p.port.Name.Name)
		s.options.Table.Forget(p.port.Name)
		cuts = append(cuts, &cut{service: p, all: true})
		s.removed = append(s.removed, p.port.Name)
	})
	s.state.Store(&state{table: table, host: host, services: services})
	lost := maps.Clone(prev.host)
	maps.DeleteFunc(lost, func(a netip.Addr, _ struct{}) bool { return host.Has(a) })
	if len(cuts)+len(lost) > 0 {
		s.cut(cuts, lost)
	}
}

// cut ends sessions and waits until they have ended, so that a datagram that a
// client sends after Apply goes to a current endpoint. A loop that still uses the
// old state creates its sessions before it handles the cut.
func (s *Server) cut(cuts []*cut, lost hostnet.Addresses) {
	done := poll.PostAll(s.options.Loops, func(i int) {
		for _, c := range cuts {
			s.workers[i].cut(c)
		}
		if len(lost) > 0 {
			s.workers[i].endFrom(lost)
		}
	})
	if s.stats.Sessions.Load() > 0 { // without sessions, the loops may not be running
		<-done
	}
}

func (s *Server) addService(port *service.Port) *portService {
	p, problem := newPortService(port, &s.options.Config, s.options.Table.Counters(port.Name), s.workers, s.joinGroups(port.Name.Name))
	s.warn(port, problem)
	s.services[port.Name] = p
	return p
}

// Choosing returns the balancer of a service port in force, or nil. It may be called from any
// goroutine.
func (s *Server) Choosing(port *service.Port) *balancer.Balancer {
	services := s.state.Load().services
	if int(port.ID) >= len(services) || services[port.ID] == nil {
		return nil
	}
	return services[port.ID].balancer
}

// Balancer returns the balancer of a service port as of the last Apply, or nil.
func (s *Server) Balancer(name service.PortName) *balancer.Balancer {
	if p := s.services[name]; p != nil {
		return p.balancer
	}
	return nil
}

// warn logs a problem of a service port once.
func (s *Server) warn(port *service.Port, problem error) {
	s.once.Warn("Service "+port.Name.Name.String(), problem)
}

// Listen returns the sockets to which a destination's datagrams must be steered,
// and opens them if necessary. Policy decides about each client when its session
// starts.
func (s *Server) Listen(o policy.Opening) (redirect.Target, error) {
	f := service.FamilyOf(o.Addr)
	at := listeningKey{name: o.Name, family: f}
	if s.listening[at] == nil && s.listeningOf[f] >= s.options.MaxListeners {
		s.once.Warn("UDP listening sockets", fmt.Errorf("more than %d UDP service ports: the others share a socket, and with it its queue", s.options.MaxListeners))
		at = listeningKey{family: f}
	}
	l := s.listening[at]
	if l == nil {
		var err error
		if l, err = s.openListening(at, netip.AddrPortFrom(redirect.ListenAddress(f), 0)); err != nil {
			return redirect.Target{}, fmt.Errorf("service %s: UDP: %w", o.Name, err)
		}
		s.add(at, l)
	}
	return redirect.Target{Port: l.address.Port(), FD: l.sockets[0].fd}, nil
}

// Unlisten does nothing, because the sockets do not depend on the clients that are
// allowed.
func (s *Server) Unlisten(policy.Opening) {}

// SocketsPerPort returns the number of sockets of a bound destination.
func (s *Server) SocketsPerPort() int { return len(s.workers) }

// InGrace returns false: UDP has no handshakes in progress.
func (s *Server) InGrace() bool { return false }

// Bind opens sockets that are bound to a destination: a node port, or any
// destination if the steering mode binds each. A refusing destination has no
// socket, so that the kernel refuses. Policy decides about each client. The error
// wraps EADDRINUSE if another program has the port.
func (s *Server) Bind(o policy.Opening) error {
	at := listeningKey{bound: o.Destination}
	if o.Action == policy.Refuse {
		s.Unbind(o.Destination)
		return nil
	}
	if s.listening[at] != nil {
		return nil
	}
	l, err := s.openListening(at, netip.AddrPortFrom(o.Addr, o.Port))
	if err != nil {
		return err
	}
	s.add(at, l)
	return nil
}

// Unbind closes the sockets of Bind and ends the sessions that reply by them.
func (s *Server) Unbind(d service.Destination) {
	at := listeningKey{bound: d}
	if l := s.listening[at]; l != nil {
		s.closeListening(at, l, conntrack.EndpointGone)
	}
}

// add notes listening sockets that were opened.
func (s *Server) add(at listeningKey, l *listening) {
	s.listening[at] = l
	if !at.isBound() {
		s.listeningOf[at.family]++
	}
}

// Prune closes the listening sockets of deleted services. Steering must no longer
// lead to them.
func (s *Server) Prune() {
	for _, name := range s.removed {
		if s.services[name] != nil {
			continue // the service exists again
		}
		for _, f := range []service.Family{service.IPv4, service.IPv6} {
			at := listeningKey{name: name, family: f}
			if l := s.listening[at]; l != nil {
				s.closeListening(at, l, conntrack.EndpointGone)
			}
		}
	}
	s.removed = nil
}

// closeListening closes sockets, and ends the sessions whose answers leave by them.
func (s *Server) closeListening(at listeningKey, l *listening, end conntrack.End) {
	delete(s.listening, at)
	if !at.isBound() {
		s.listeningOf[at.family]--
	}
	for _, sh := range l.sockets {
		if !sh.worker.loop.Post(func() { sh.close(end) }) {
			sys.Close(sh.fd)
		}
	}
}

// Stop ends all sessions and closes all sockets. Remove steering before. The loops
// continue to run. Stop returns an error if ctx ends first.
func (s *Server) Stop(ctx context.Context) error {
	for at, l := range s.listening {
		s.closeListening(at, l, conntrack.Shutdown)
	}
	select {
	case <-poll.PostAll(s.options.Loops, func(i int) { s.workers[i].stop() }):
		return nil
	case <-ctx.Done():
		return fmt.Errorf("ending %d UDP sessions: %w", s.stats.Sessions.Load(), ctx.Err())
	}
}

// Stats are the counts of a Server.
type Stats struct {
	Sessions    atomic.Int64  `metric:"sluice_udp_sessions" help:"UDP sessions that are open."`
	Pauses      atomic.Uint64 `metric:"sluice_udp_pauses_total" help:"Pauses of a service's UDP socket, because the service had created too many sessions."`
	Unserved    atomic.Uint64 `metric:"sluice_udp_datagrams_unserved_total" help:"UDP datagrams from a client that is not allowed, or to no service."`
	Lost        atomic.Uint64 `metric:"sluice_udp_datagrams_lost_total" help:"UDP datagrams that were lost: full socket buffer, larger than the path's MTU, or no socket for the replies."`
	Resent      atomic.Uint64 `metric:"sluice_udp_datagrams_resent_total" help:"UDP datagrams that were sent again, as the first endpoint's port was closed."`
	Disbelieved atomic.Uint64 `metric:"sluice_udp_icmp_ignored_total" help:"ICMP messages about UDP sessions that were ignored as forged or as no refusal."`
	Conflicts   atomic.Uint64 `metric:"sluice_udp_reply_conflicts_total" help:"Times that another program had a service's UDP port, so that replies leave by a raw socket."`
}

// Stats returns the counts, which go on. It is safe for concurrent use.
func (s *Server) Stats() *Stats { return &s.stats }

// InUse reports whether an error of Bind means that another program has the port.
func InUse(err error) bool { return errors.Is(err, sys.EADDRINUSE) }
