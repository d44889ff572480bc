package flow

import (
	"maps"
	"slices"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// Relay owns the sockets of a protocol behind kernel flows, and serves everything that the kernel
// does not forward. stream.Server, stream.SCTP and datagram.Server are Relays.
type Relay interface {
	Bind(policy.Opening) error
	Unbind(service.Destination)
	// Balancer returns the balancer of a service port, which both data paths use, or
	// nil. It is called after the relay has the policy.
	Balancer(service.PortName) *balancer.Balancer
	// Places returns the places of a service port, after the relay has the policy; nil if nothing
	// bounds its connections.
	Places(service.PortName) conntrack.Places
}

// Path is what the kernel forwards of one protocol, with the Relay behind it. The control
// plane opens bound ports through it.
type Path struct {
	relay    Relay // nil: it has all of the protocol, and the kernel nothing
	server   *Server
	protocol service.Protocol
	state    atomic.Pointer[state]
	services map[service.PortName]*portService
	orphans  *portService                 // of adopted flows whose Service is gone
	bound    map[service.Destination]bool // by sockets of the relay
	adopted  bool
	ready    bool // of the loop: flows of an earlier process are adopted
}

// state is a configuration. It never changes.
type state struct {
	table    *policy.Table
	host     hostnet.Addresses
	forwards [2]bool        // by service.Family: the node does
	judged   bool           // rules of others judge what it forwards
	services []*portService // by service.PortID; nil for other protocols
}

// Over returns the data path of a protocol with a Relay behind it. Call it before the
// Server starts.
func (s *Server) Over(r Relay, p service.Protocol) *Path {
	path := &Path{relay: r, server: s, protocol: p, services: make(map[service.PortName]*portService), bound: make(map[service.Destination]bool)}
	path.orphans = &portService{path: path}
	path.orphans.timeouts.Store(&timeouts{session: s.options.UDPTimeout, stream: s.options.UDPStreamTimeout})
	path.state.Store(&state{table: policy.Compile(nil, &service.Snapshot{}, policy.Config{})})
	s.paths[p] = path
	return path
}

// Apply publishes a policy that the relay already has. When it returns, the kernel asks about the
// destinations of this policy. Before the Server has started, all is relayed, and Apply does
// nothing.
func (p *Path) Apply(table *policy.Table, host hostnet.Addresses) {
	if !p.server.Started() {
		return
	}
	p.server.setOrigins(table, host)
	prev := p.state.Load()
	if !p.adopted && p.protocol == service.UDP {
		p.server.leaveToRelay()
	}
	next := &state{table: table, host: host, forwards: *p.server.forwarding.now.Load(), judged: p.server.judges.judged()}
	c := p.sync(prev, next)
	// The worker must know each destination that the kernel asks about: it is withdrawn
	// before the policy that lacks it comes, and there only after the one that has it.
	wanted := p.wantedOf(c.changed, next)
	stay := make(map[bpf.KernelDestination]bool)
	for i := range wanted {
		for _, d := range wanted[i].destinations {
			stay[d.at] = true
		}
	}
	if p.adopted && len(c.changed)+len(c.gone) > 0 {
		p.onLoop(func() { p.server.worker.readNotices() }) // flows have begun by the old policy
	}
	for _, s := range slices.Concat(c.changed, c.gone) {
		p.withdraw(s, stay)
	}
	if p.adopted {
		p.state.Store(next)
	} else { // at once: what begins by the first policy is none of the earlier process's flows
		p.onLoop(func() {
			p.state.Store(next)
			p.server.worker.adopt(p, next)
		})
	}
	p.steer(c.changed, wanted)
	for _, s := range c.gone {
		p.forget(s, steering{})
	}
	if !p.adopted {
		p.adopted = true
		p.purge()
	}
	p.follow(next, &c)
}

// change is what a policy changes of service ports.
type change struct {
	changed, gone []*portService
	replaced      map[*portService]*portService
	cuts          map[*portService]*service.Port // whose UDP sessions may end; nil: the port is gone
}

// sync brings the service ports of next up to date, and returns what has changed since prev.
func (p *Path) sync(prev, next *state) (c change) {
	c.replaced, c.cuts = make(map[*portService]*portService), make(map[*portService]*service.Port)
	keep := func(port *service.Port) *portService {
		s, old := p.keep(port, next.judged)
		if s.port != port {
			s.port = port
			c.cuts[s] = port
		}
		if old != nil {
			c.replaced[old] = s
		}
		c.changed = append(c.changed, s)
		return s
	}
	next.services = policy.Sync(next.table, prev.table, []service.Protocol{p.protocol}, prev.services, keep, func(s *portService) {
		if p.services[s.port.Name] == s { // else keep has replaced it
			delete(p.services, s.port.Name)
			c.cuts[s] = nil
		}
		c.gone = append(c.gone, s)
	})
	if next.judged != prev.judged {
		p.server.boundHandshakes(next.judged)
		next.services = slices.Clone(next.services)
		for i, s := range next.services {
			if s != nil && s.judged != next.judged {
				next.services[i] = keep(s.port)
			}
		}
	}
	if !next.table.UniformAs(prev.table) || !maps.Equal(next.host, prev.host) || next.forwards != prev.forwards {
		c.changed = slices.Collect(maps.Values(p.services))
	}
	if next.forwards != prev.forwards {
		for _, s := range p.services {
			c.cuts[s] = s.port
		}
	}
	return c
}

// Bind binds a destination. At an address of this node, the kernel forwards only what is
// bound: another program may hold the port (A3.15).
func (p *Path) Bind(o policy.Opening) error {
	err := p.relay.Bind(o)
	p.noteBound(o.Destination, o.Name, err == nil)
	return err
}

// Unbind undoes Bind. The next Apply withdraws the destination from the kernel.
func (p *Path) Unbind(d service.Destination) {
	p.relay.Unbind(d)
	delete(p.bound, d)
}

// noteBound notes whether a destination of a service port is bound, and steers accordingly.
func (p *Path) noteBound(d service.Destination, name service.PortName, is bool) {
	if p.bound[d] == is {
		return
	}
	if is {
		p.bound[d] = true
	} else {
		delete(p.bound, d)
	}
	if s := p.services[name]; s != nil {
		w := p.wanted(s, p.state.Load(), &p.server.buffers)
		stay := make(map[bpf.KernelDestination]bool)
		for _, d := range w.destinations {
			stay[d.at] = true
		}
		p.withdraw(s, stay)
		p.steer([]*portService{s}, []steering{w})
	}
}

// keep returns the service of a new or changed port, and the one that it replaces, if any.
func (p *Path) keep(port *service.Port, judged bool) (s, replaced *portService) {
	s = p.services[port.Name]
	is, problem := eligible(port, judged)
	p.server.once.Warn("Service "+port.Name.Name.String(), problem)
	b, places := p.relay.Balancer(port.Name), p.relay.Places(port.Name)
	load := uint32(port.ID) + 1
	if s == nil || s.inKernel != is || s.balancer != b || s.load != load {
		// The loop reads both without a lock, so a port that changes one of them gets a new
		// object. Its flows stay with the old one.
		replaced = s
		s = &portService{path: p, name: port.Name, balancer: b, places: places, counters: p.server.options.Table.Counters(port.Name), inKernel: is, load: load}
		if replaced != nil {
			s.destinations, replaced.destinations = replaced.destinations, nil
			s.lists, replaced.lists = replaced.lists, nil
			s.sets, replaced.sets = replaced.sets, nil
		}
		p.services[port.Name] = s
	}
	s.judged = judged
	s.timeouts.Store(sessionTimeouts(port, &p.server.options))
	if is && b != nil && b.AffinityWindow() > 0 {
		p.server.remember(s)
	}
	return s, replaced
}

// follow applies a change to flows: those of replaced services, and UDP sessions that end. It
// returns when that is done.
func (p *Path) follow(st *state, c *change) {
	if p.protocol != service.UDP {
		clear(c.cuts) // connections outlive their endpoint's removal (A8.1)
	}
	if len(c.replaced)+len(c.cuts) == 0 {
		return
	}
	p.onLoop(func() {
		p.server.worker.readNotices()
		now := poll.Nanotime()
		for old, s := range c.replaced {
			for old.first != 0 {
				f := p.server.worker.flows[old.first]
				f.moveTo(s)
			}
		}
		for s, port := range c.cuts {
			s.cut(p.server.worker.flows, st, port, now)
		}
	})
}

// onLoop runs f on the loop, and waits for it.
func (p *Path) onLoop(f func()) {
	_ = p.server.onLoop(func() error { // else the loop has ended
		f()
		return nil
	})
}
