package stream

import (
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/host/drops"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/message"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/upstream"
)

// Config holds the limits and times of listening and dialling. Zero values are not
// defaults: cmd sets all of them.
type Config struct {
	// Backlog is the length of each listening socket's queue of connections that
	// the kernel has completed and nobody has accepted.
	Backlog int
	// MaxListeners bounds the listening sockets of each family that are steered to.
	// With more service ports than that, some share a socket; their other limits
	// stay their own.
	MaxListeners int
	// Descriptors is how many descriptors connections and HoldBack share; 0 if
	// there are enough for both.
	Descriptors int

	// MaxConnections bounds the connections open at once, in all.
	MaxConnections int
	// MaxServiceConnections and MaxNamespaceConnections bound those of one
	// Service, all its ports together, and of one namespace.
	MaxServiceConnections   int
	MaxNamespaceConnections int
	// CountForwarded has those that the kernel forwards count, too (Server.Places).
	CountForwarded bool
	// MaxServiceDialing bounds the connections of one Service that wait for an
	// endpoint to answer.
	MaxServiceDialing int

	// KeepAlive is how long a connection is quiet before either side is probed;
	// 0 disables the probes.
	KeepAlive time.Duration
	// Congestion is the TCP congestion control of both sides' sockets; empty
	// means the system's default.
	Congestion string

	// Balancer holds the defaults of service ports' balancers.
	Balancer balancer.Options

	// MaxMessage bounds an SCTP message, in bytes, and so sets the sizes of sockets'
	// buffers. Streams bounds the streams of an association each way; the annotation
	// sluice.dev/sctp-streams overrides it.
	MaxMessage, Streams int
}

// protocols are those that a Server serves.
var protocols = []service.Protocol{service.TCP, service.SCTP}

// Loop is one event loop with the relays' workers on it.
type Loop struct {
	Poll     *poll.Loop
	Relay    *relay.Worker
	Messages *message.Worker // nil without SCTP
}

// Options are what a Server works with, beside its Config.
type Options struct {
	Config
	// Loops are the event loops; they may run already.
	Loops []Loop
	// Table has one shard for each loop. The caller has the shards flushed
	// (conntrack.Shard.OnPending) and refreshed.
	Table *conntrack.Table
	// Traits are the Redirector's.
	Traits redirect.Traits
	// Upstream decides how sockets to endpoints are made.
	Upstream *upstream.Rules
	// Drops knows what rules of this node drop; nil: nothing is known.
	Drops *drops.Watch
	// Refuses reports whether a client that policy accepts must not be served here; nil: none.
	Refuses func(client, vip netip.AddrPort, port *service.Port) bool
	// NeedEndpoints says that connections to a service port wait for endpoints; nil: nobody
	// is told. It is called on event loops, and must not wait.
	NeedEndpoints func(port *service.Port)
	// Clock replaces poll.Nanotime for grace periods in tests.
	Clock  func() int64
	Logger zerolog.Logger
}

// Server serves TCP, and SCTP by the sockets that SCTP opens: both share connection
// limits and policy. Its methods belong to one goroutine, except Stats, HoldBack and
// CanHoldBack.
type Server struct {
	options Options
	config  Config
	loops   []*poll.Loop
	workers []*worker
	clock   func() int64

	state     atomic.Pointer[state]
	open      atomic.Int64 // connections, from accept to end
	forwarded atomic.Int64 // those of them that the kernel forwards
	held      atomic.Int64 // those that await endpoints
	queued    atomic.Int64 // those that wait at a limit of their Service
	limit     atomic.Int64 // of open
	paused    atomic.Int64 // sockets that nobody accepts from for a while
	resuming  atomic.Bool  // workers have been told to go on with them
	stats     stats

	// The rest belongs to the configuring goroutine.
	pools     map[service.PortName]*pool
	removed   []service.PortName // service ports that went since the last Prune
	quotas    quotas
	listening map[service.PortName]*listening
	shared    []*listening // all of listening, each once
	stale     []*side      // sides whose filter does not say what ranges do
	bound     map[service.Destination]*boundSocket
	sctp      SCTP
	grace     grace
	inherited *handover.Sockets // of the process before, until Begin; nil if there is none
	waiting   []*socket         // that Begin has to accept from
	taken     int               // connections that Take has accepted; its goroutine's
	once      once.Log
}

// state is one configuration in force. It never changes; workers read it through
// one atomic pointer.
type state struct {
	table *policy.Table
	pools []*pool           // by service.PortID; nil where there is no port of protocols
	host  hostnet.Addresses // of this node
	past  []past            // configurations in their grace period, oldest first
}

// New returns a Server that serves nothing yet.
func New(o Options) *Server {
	s := &Server{
		options:   o,
		config:    o.Config,
		clock:     o.Clock,
		pools:     make(map[service.PortName]*pool),
		quotas:    newQuotas(),
		listening: make(map[service.PortName]*listening),
		bound:     make(map[service.Destination]*boundSocket),
		once:      once.Log{Logger: o.Logger},
	}
	if most := o.Traits.MaxListeners; most > 0 {
		s.config.MaxListeners = min(s.config.MaxListeners, most)
	}
	if s.clock == nil {
		s.clock = poll.Nanotime
	}
	s.sctp.server, s.sctp.bound = s, make(map[service.Destination]*sctpSocket)
	s.HoldBack(0)
	s.state.Store(&state{table: policy.Compile(nil, &service.Snapshot{}, policy.Config{})})
	for i, l := range o.Loops {
		s.loops = append(s.loops, l.Poll)
		s.workers = append(s.workers, newWorker(s, l, o.Upstream.NewDialer(l.Poll.Now, i, len(o.Loops)), o.Table.Shard(i)))
	}
	return s
}

// Apply puts a policy in force: new connections are decided by it when Apply
// returns, and the filters say what Listen and Unlisten asked for. withdrawn says
// that the policy before served destinations that this one does not, so that it is
// kept for the grace period.
func (s *Server) Apply(table *policy.Table, host hostnet.Addresses, withdrawn bool) {
	prev := s.state.Load()
	next := &state{table: table, host: host, past: keepPast(prev, withdrawn, s.clock())}
	s.quotas.sweep()
	next.pools = policy.Sync(table, prev.table, protocols, prev.pools, s.keep, s.remove)
	s.state.Store(next)
	s.updateFilters()
	s.wakeHeld()
	s.wakeQueued()
}

// Prune closes the listening sockets of service ports that went, and what has
// passed its grace period. Steering must not lead to them any more.
func (s *Server) Prune() {
	for _, name := range s.removed {
		if s.pools[name] == nil { // else it came back
			s.options.Table.Forget(name)
			s.unlisten(name)
		}
	}
	s.removed = nil
	s.endGrace()
}

// HoldBack says how many of Config.Descriptors are taken by others. The rest is for
// connections.
func (s *Server) HoldBack(descriptors int64) { s.limit.Store(s.limitBeside(descriptors)) }

// CanHoldBack returns why others may not take so many of Config.Descriptors, or nil:
// open connections are not closed for them, and must not be all that are possible then,
// as new ones would wait for their end.
func (s *Server) CanHoldBack(descriptors int64) error {
	limit, open := s.limitBeside(descriptors), s.open.Load()
	if s.config.Descriptors > 0 && open > limit-limit/64 {
		return fmt.Errorf("%d connections hold the descriptors", open)
	}
	return nil
}

// limitBeside returns how many connections, of two descriptors each, may be open beside
// others' descriptors.
func (s *Server) limitBeside(descriptors int64) int64 {
	limit := int64(s.config.MaxConnections)
	if s.config.Descriptors > 0 {
		limit = min(limit, max((int64(s.config.Descriptors)-descriptors)/2, 1))
	}
	return limit
}

// resumeBelow is the number of open connections below which accepting resumes. It
// leaves some room, so that accepting does not stop again after each connection.
func (s *Server) resumeBelow() int64 {
	limit := s.limit.Load()
	return limit - limit/64
}

// Stop ends accepting and all connections, and flushes their records. Steering
// should have been undone before, so that clients are refused and do not wait. The
// loops go on.
func (s *Server) Stop(ctx context.Context) error {
	for d := range s.bound {
		s.Unbind(d)
	}
	for d := range s.sctp.bound {
		s.sctp.Unbind(d) // unless End did
	}
	for _, c := range s.grace.closing {
		s.closeNow(c.socket)
	}
	s.grace = grace{}
	select {
	case <-poll.PostAll(s.loops, func(i int) { s.workers[i].stop() }):
	case <-ctx.Done():
		return fmt.Errorf("ending %d connections: %w", s.open.Load(), ctx.Err())
	}
	for _, l := range s.shared {
		for f := range l.sides {
			if side := &l.sides[f]; side.socket != nil {
				s.discard(side.socket)
				side.socket = nil
			}
		}
	}
	clear(s.listening)
	s.shared = nil
	return nil
}

// Balancer returns the balancer of a service port as of the last Apply, or nil.
func (s *Server) Balancer(name service.PortName) *balancer.Balancer {
	if p := s.pools[name]; p != nil {
		return p.balancer
	}
	return nil
}

// warn logs a problem of a service port once.
func (s *Server) warn(port *service.Port, problem error) {
	s.once.Warn("Service "+port.Name.Name.String(), problem)
}

// keep returns the pool of a new or changed service port.
func (s *Server) keep(port *service.Port) *pool {
	p := s.pools[port.Name]
	if p == nil {
		p = &pool{counters: s.options.Table.Counters(port.Name)}
		s.pools[port.Name] = p
		s.quotas.join(p, port.Name.Name)
	}
	if p.port != port {
		s.warn(port, p.configure(port, s.config.Balancer))
		if port.Name.Protocol == service.SCTP {
			s.sctp.configure(p)
		}
	}
	return p
}

// remove takes the pool of a service port that went.
func (s *Server) remove(p *pool) {
	delete(s.pools, p.port.Name)
	s.quotas.leave(p)
	s.removed = append(s.removed, p.port.Name)
}
