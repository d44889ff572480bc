package node

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/admin"
	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/flow"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/health"
	"github.com/sluice-proxy/sluice/host/drops"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/listener"
	"github.com/sluice-proxy/sluice/message"
	"github.com/sluice-proxy/sluice/redirect/choose"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/stream"
	"github.com/sluice-proxy/sluice/upstream"
)

// New creates everything that can fail before it changes anything in the kernel. If it
// fails, it closes what it has opened. The error is kubernetes.ErrNoCluster if config
// names no source and the process is not in a pod.
func New(config Config, log zerolog.Logger) (*Proxy, error) {
	if config.Flags == nil {
		config.Flags = func() map[string]string { return nil }
	}
	if config.Notify == nil {
		config.Notify = func(string) bool { return false }
	}
	config.Store.Annotation = checkAnnotation
	p := &Proxy{
		config:     config,
		log:        log,
		store:      service.NewStore(config.Store),
		departed:   newDeparted(),
		rebalancer: newRebalancer(config.Balancer),
		reported:   make(map[service.Problem]bool),
		fatal:      make(chan error, 1),
		requests:   make(chan func()),
		handing:    make(chan struct{}, 1),
		replaced:   make(chan *handover.Conn, 1),
	}
	p.verbosity = newLogVerbosity(config.Verbosity)
	p.metricsConns.Max = metricsConnections
	if err := p.openSource(); err != nil {
		return nil, err
	}
	p.node = newNodeDoubt(&p.config, p.log, p.cluster != nil)
	if err := p.open(); err != nil {
		p.close()
		return nil, err
	}
	if p.manifests != nil && p.before != nil && p.before.conn.Running().Keeps {
		p.manifests.Inherit(p.askKept)
	}
	return p, nil
}

func (p *Proxy) open() error {
	o := &p.config
	limits, err := o.limits()
	if err != nil {
		return err
	}
	if err := sys.CheckCongestion(o.Stream.Congestion); err != nil {
		return fmt.Errorf("--congestion-control %s: %w; sysctl net.ipv4.tcp_available_congestion_control lists what the kernel has", o.Stream.Congestion, err)
	}
	if err := p.begin(); err != nil {
		return err
	}
	p.logSquatters()
	if err := p.openHost(); err != nil {
		return err
	}
	if err := p.openSteering(); err != nil {
		return err
	}
	p.openDrains()
	p.setConntrack()
	p.logTracking()
	if err := p.openAccessLog(); err != nil {
		return err
	}
	if err := p.makeLoops(); err != nil {
		return err
	}
	if err := p.makeServers(limits); err != nil {
		return err
	}
	p.started, p.maxConnections = time.Now(), limits.stream.MaxConnections
	if len(o.DNS.Addresses) > 0 {
		p.names = newNames()
	}
	if err := p.observe(); err != nil {
		return err
	}
	if p.before == nil {
		if err := p.openRest(); err != nil {
			return err
		}
	}
	if o.MetricsAddress != "" {
		p.sync = admin.NewSync()
		p.pages = admin.Pages{Metrics: p.registry(), Mode: o.ProxyMode, Flags: o.Flags, Config: o.KubeProxy, Version: o.Version, Profiling: o.Profiling}
		if p.metrics, err = admin.Listen(o.MetricsAddress, p.ports.Listen); err != nil && (o.HardFail || p.cluster == nil) {
			return err
		}
	}
	p.health = health.New(health.Options{Address: o.HealthzAddress, Logger: p.log, Event: p.sendHealth, Sockets: p.manager, Listen: p.ports.Listen})
	p.log.Debug().
		Int("workers", len(p.loops)).
		Int("max_connections", limits.stream.MaxConnections).
		Int("max_connections_per_service", limits.stream.MaxServiceConnections).
		Int("max_connections_per_namespace", limits.stream.MaxNamespaceConnections).
		Int("max_dialing_per_service", limits.stream.MaxServiceDialing).
		Int("max_listeners", limits.listeners).
		Int("max_claims", limits.claims).
		Int("max_udp_sessions", limits.datagram.MaxSessions).
		Msg("limits")
	return nil
}

// openSteering chooses the mode, and asks a running process for its place.
func (p *Proxy) openSteering() error {
	modes := p.config.Steering
	modes.Routes.SplitLate = !p.config.relaysAll() // few of its connections need a rule
	if p.before != nil {
		running := p.before.conn.Running()
		if modes.Running = running.Mode; running.Flows && !p.config.relaysAll() {
			if err := flow.Try(); err != nil {
				return fmt.Errorf(withoutFlows, err)
			}
		}
	}
	choice, err := choose.Open(modes)
	if err != nil {
		return err
	}
	p.steer, p.steerChoice, p.mode = choice.Redirector, choice.String(), choice.Name
	if choice.NoReplies != nil {
		p.mode = ""
	}
	if p.before != nil {
		again, err := p.greet()
		if _, isRefused := errors.AsType[*handover.RefusedError](err); err != nil && !isRefused && p.isAlone() {
			p.log.Warn().Err(err).Msg("the running sluice has ended before it could hand over")
			_ = p.before.conn.Close()
			again, err = true, p.beginAlone()
		}
		if err != nil || again {
			p.steer.Leave()
			p.steer = nil
		}
		if err != nil {
			return err
		}
		if again {
			return p.openSteering()
		}
	}
	p.log.Info().Dur("took", choice.Took).Msg(p.steerChoice)
	return nil
}

// openRest opens what only one process can have: the admin socket, the page, the DNS server,
// and the offer to hand over.
func (p *Proxy) openRest() error {
	p.openOffer()
	return errors.Join(p.openLive(), p.openDNS())
}

// logSquatters logs which processes hold the name of the lock without the right to steer.
func (p *Proxy) logSquatters() {
	if p.lock == nil {
		return // the running process has logged them
	}
	const most = 3
	for _, h := range p.lock.Squatters[:min(len(p.lock.Squatters), most)] {
		p.log.Warn().Int("pid", h.PID).Uint32("uid", h.UID).Msg("a process without CAP_NET_ADMIN has a socket with the name of the proxy's lock; it is passed over")
	}
}

func (p *Proxy) openAccessLog() (err error) {
	o := &p.config
	if o.AccessLog.Path == Off {
		return nil
	}
	options := o.AccessLog
	options.Logger, options.Beside = p.log, p.before != nil
	p.accessLog, err = conntrack.OpenLog(options)
	return err
}

// mostHeld bounds the bytes of SCTP messages that wait for a slow receiver, in all.
const mostHeld = 64 << 20

// makeLoops creates the event loops, and what moves bytes and keeps records on them.
func (p *Proxy) makeLoops() error {
	o := &p.config
	// A nil *Log would be a Sink that is not nil.
	var sink conntrack.Sink
	if p.accessLog != nil {
		sink = p.accessLog
	}
	shards := o.Workers
	if !o.relaysAll() {
		shards++ // the last one is of kernel flows
	}
	p.conntrack = conntrack.NewTable(conntrack.Options{Shards: shards, Sink: sink, Opens: o.RecordOpens, TCP: o.RecordTCP})
	p.setNode()
	relaying := o.Relay
	relaying.EndpointLiveness, relaying.GoneAfter = stream.Liveness(o.Stream.KeepAlive), 2*o.Stream.KeepAlive
	p.relay = relay.New(relaying)
	p.messages = message.New(message.Config{
		MaxMessage:   o.Stream.MaxMessage,
		MaxHeld:      max(mostHeld, 8*int64(o.Stream.MaxMessage)),
		IdleTimeout:  o.Relay.IdleTimeout,
		CloseTimeout: o.Relay.HalfClosedTimeout,
	})
	for range o.Workers {
		loop, err := poll.New()
		if err != nil {
			return err
		}
		p.loops = append(p.loops, stream.Loop{Poll: loop, Relay: p.relay.NewWorker(loop), Messages: p.messages.NewWorker(loop)})
	}
	return nil
}

// makeServers creates the data paths, and the listener that opens sockets in them.
func (p *Proxy) makeServers(limits limits) error {
	o := &p.config
	loops := p.allLoops()
	defaults := o.Balancer
	if p.cluster != nil {
		p.rank = &balancer.Rank{}
		defaults.Rank = p.rank
	}
	limits.stream.Balancer, limits.datagram.Balancer = defaults, defaults
	rules := upstream.New(p.steer.Traits(), func(a, b netip.Addr) bool { return p.host.Load().SameLink(a, b) }, p.log)
	refuses := func(client, vip netip.AddrPort, port *service.Port) bool {
		return p.flows != nil && p.flows.server.Refuses(client, vip, port)
	}
	p.drops = drops.New(func(err error) {
		p.log.Info().Err(err).Msg("handshakes that a rule of this node drops are recorded as timeouts")
	})
	p.stream = stream.New(stream.Options{
		Config:  limits.stream,
		Refuses: refuses,
		Loops:   p.loops,

		NeedEndpoints: p.needEndpoints,

		Table:    p.conntrack,
		Traits:   p.steer.Traits(),
		Upstream: rules,
		Drops:    p.drops,
		Logger:   p.log,
	})
	p.datagram = datagram.New(datagram.Options{
		Config:   limits.datagram,
		Refuses:  refuses,
		Follow:   p.followSession,
		Crowded:  p.makeRoom,
		Loops:    loops,
		Table:    p.conntrack,
		Traits:   p.steer.Traits(),
		Upstream: rules,
		Logger:   p.log,
	})
	sctp := p.stream.SCTP()
	protocols := map[service.Protocol]listener.Protocol{
		service.TCP:  {Ports: p.stream, Listeners: p.stream, SocketsPerPort: 1, KeepsConnections: true},
		service.UDP:  {Ports: p.datagram, Listeners: p.datagram, SocketsPerPort: p.datagram.SocketsPerPort()}, // sessions end with their destination (A8.2)
		service.SCTP: {Ports: sctp, Available: sctp.Available, SocketsPerPort: 1, KeepsConnections: true},
	}
	var kernel []listener.Flows
	if why := p.openFlows(limits.datagram.Log, protocols); why == nil {
		kernel = p.flows.paths
	} else if err := p.relayAll(why); err != nil {
		return err
	}
	p.manager = listener.New(listener.Options{
		Protocols:     protocols,
		DataPaths:     []listener.DataPath{p.stream, p.datagram},
		Flows:         kernel,
		MaxBound:      limits.claims,
		Descriptors:   p.stream,
		ServiceCIDRs:  o.Policy.ServiceCIDRs,
		HostAddresses: func() []netip.Addr { return p.host.Load().Addresses },
		Loops:         p.allLoops(),
		Table:         p.conntrack,
		Redirector:    p.steer,
		Logger:        p.log,
		Report:        p.sendPort,
	})
	return nil
}
