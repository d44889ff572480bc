package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/admin"
	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/health"
	"github.com/sluice-proxy/sluice/internal/hostnet"
	"github.com/sluice-proxy/sluice/internal/httpport"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/listener"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/choose"
	"github.com/sluice-proxy/sluice/redirect/watch"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
	"github.com/sluice-proxy/sluice/source/manifests"
	"github.com/sluice-proxy/sluice/stream"
	"github.com/sluice-proxy/sluice/upstream"
)

// stopPatience bounds how long a stop waits for the loops and for the access
// log to take the last records.
const stopPatience = 5 * time.Second

// proxy is the whole of sluice run, wired together. Its rooms, in the order in
// which a change travels: source, store, policy, listeners, steering.
type proxy struct {
	options *runOptions
	log     zerolog.Logger

	source    source
	manifests *manifests.Watcher // the source, if it is a directory
	cluster   *kubernetes.Source // the source, if it is a cluster
	events    *kubernetes.Events // nil without a cluster
	store     *service.Store
	policy    policy.Config
	table     *policy.Table // the last one compiled; run's goroutine's
	manager   *listener.Manager
	stream    *stream.Server   // serves TCP
	datagram  *datagram.Server // serves UDP
	steer     redirect.Redirector
	lock      *redirect.Lock

	hostWatcher *hostnet.Watcher
	host        atomic.Pointer[hostnet.State] // what policy says of this node's addresses and pods

	loops     []stream.Loop
	relay     *relay.Relay
	conntrack *conntrack.Table
	accessLog *conntrack.Log // nil when it is off
	metrics   *admin.Server  // nil without an address
	sync      *admin.Sync    // the same
	pages     admin.Pages    // what metrics shows

	metricsConns httpport.Group // of metrics
	fatal        chan error     // what --bind-address-hard-fail makes of a port that is taken
	health       *health.Server

	applied  atomic.Int64  // Unix time in ns of the last configuration that is wholly in force
	failures atomic.Uint64 // configurations that could not be applied wholly
	repairs  atomic.Uint64 // times that kernel state was restored
	noLocal  atomic.Pointer[admin.NoLocalEndpoints]
	reported map[service.Problem]bool
	lines    once.Lines   // about problems, for each namespace
	trouble  once.Trouble // what notInForce said
}

// newProxy creates everything that can fail before it changes anything in the
// kernel. If it fails, it closes what it has opened.
func newProxy(o *runOptions, log zerolog.Logger) (*proxy, error) {
	p := &proxy{
		options:  o,
		log:      log,
		store:    service.NewStore(o.store()),
		reported: make(map[service.Problem]bool),
		fatal:    make(chan error, 1),
	}
	p.metricsConns.Max = metricsConnections
	o.logIgnored(p.log)
	if o.serviceProxyName != "" && len(o.serviceCIDRs) > 0 {
		p.log.Warn().Msg("--service-cidr is not used with --service-proxy-name: the ranges are the other proxy's, and the cluster IPs of our own Services are ours")
	}
	o.adjustOOMScore(p.log)
	if err := p.openSource(); err != nil {
		return nil, err
	}
	if err := p.open(); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *proxy) open() error {
	o := p.options
	limits, err := o.limits()
	if err != nil {
		return err
	}
	if err := sys.CheckCongestion(o.congestion); err != nil {
		return fmt.Errorf("--congestion-control %s: %w; sysctl net.ipv4.tcp_available_congestion_control lists what the kernel has", o.congestion, err)
	}
	if p.lock, err = redirect.AcquireLock(o.steering.table); err != nil {
		var locked *redirect.LockedError
		if errors.As(err, &locked) {
			return fmt.Errorf("another sluice serves this node: %w; stop it first, or give this one a network namespace of its own", err)
		}
		return err
	}
	p.logSquatters()
	if err := p.openHost(); err != nil {
		return err
	}
	choice, err := choose.Open(o.steering.choose(o.nodeIPs))
	if err != nil {
		return err
	}
	p.steer = choice.Redirector
	p.tellForwardPolicies()
	p.log.Info().Dur("took", choice.Took).Msg(choice.String())
	if err := p.openAccessLog(); err != nil {
		return err
	}
	if err := p.makeLoops(limits); err != nil {
		return err
	}
	if o.metricsAddress != "" {
		p.sync = admin.NewSync()
		p.pages = admin.Pages{Metrics: p.registry(), Mode: o.proxyModeText(), Flags: o.values, Version: version, Profiling: o.profiling, Connections: &p.metricsConns}
		if o.kubeProxy != nil {
			p.pages.Config = o.kubeProxy
		}
		if p.metrics, err = admin.Listen(o.metricsAddress, p.pages); err != nil && (o.hardFail || p.cluster == nil) {
			return err
		}
	}
	p.health = health.New(health.Options{Address: o.healthzAddress, Logger: p.log, Event: p.sendHealth, Sockets: p.manager})
	p.log.Debug().
		Int("workers", len(p.loops)).
		Int("max_connections", limits.connections).
		Int("max_connections_per_service", limits.serviceConnections).
		Int("max_connections_per_namespace", limits.namespaceConnections).
		Int("max_dialing_per_service", limits.serviceDialing).
		Int("max_listeners", limits.listeners).
		Int("max_claims", limits.claims).
		Int("max_udp_sessions", limits.sessions).
		Msg("limits")
	return nil
}

// logSquatters names who has the name of the lock and may not steer.
func (p *proxy) logSquatters() {
	const most = 3
	for i, h := range p.lock.Squatters {
		if i == most {
			break
		}
		p.log.Warn().Int("pid", h.PID).Uint32("uid", h.UID).Msg("a process without CAP_NET_ADMIN has a socket with the name of the proxy's lock; it is passed over")
	}
}

func (p *proxy) openAccessLog() (err error) {
	o := p.options
	if o.accessLog == "off" {
		return nil
	}
	format, err := conntrack.ParseFormat(o.accessLogFormat.value)
	if err != nil {
		return err
	}
	p.accessLog, err = conntrack.OpenLog(conntrack.LogOptions{Path: o.accessLog, Format: format, Logger: p.log})
	return err
}

// makeLoops creates the event loops and what uses them: relay, table of connections,
// listeners.
func (p *proxy) makeLoops(limits limits) error {
	o := p.options
	// A nil *Log would be a Sink that is not nil.
	var sink conntrack.Sink
	if p.accessLog != nil {
		sink = p.accessLog
	}
	p.conntrack = conntrack.NewTable(conntrack.Options{Shards: o.workers, Sink: sink})
	p.relay = relay.New(relay.Config{
		Splice:            o.splice.value == "auto",
		IdleTimeout:       o.idleTimeout,
		HalfClosedTimeout: o.halfClosedTimeout,
		MaxPipes:          o.maxPipes,
		MaxBulk:           o.maxBulk,
		EndpointLiveness:  stream.Liveness(o.keepAlive),
		GoneAfter:         2 * o.keepAlive,
	})
	var loops []*poll.Loop
	for range o.workers {
		loop, err := poll.New()
		if err != nil {
			return err
		}
		p.loops = append(p.loops, stream.Loop{Poll: loop, Relay: p.relay.NewWorker(loop)})
		loops = append(loops, loop)
	}
	algorithm, err := balancer.Parse(o.balancer.value)
	if err != nil {
		return fmt.Errorf("--balancer: %w", err)
	}
	logging, err := datagram.ParseLogging(o.accessLogUDP.value)
	if err != nil {
		return fmt.Errorf("--access-log-udp: %w", err)
	}
	plan := balancer.DefaultPlan()
	plan.Timeouts = o.dialTimeouts
	defaults := balancer.Options{Algorithm: algorithm, Plan: plan, MaxPins: o.maxAffinityClients}
	maxListeners := max(limits.listeners/2, 1)
	rules := upstream.New(p.steer.Traits(), func(a, b netip.Addr) bool { return p.host.Load().SameLink(a, b) }, p.log)
	p.stream = stream.New(stream.Options{
		Config: stream.Config{
			Backlog:                 o.listenBacklog,
			MaxListeners:            maxListeners,
			Descriptors:             limits.descriptors,
			MaxConnections:          limits.connections,
			MaxServiceConnections:   limits.serviceConnections,
			MaxNamespaceConnections: limits.namespaceConnections,
			MaxServiceDialing:       limits.serviceDialing,
			KeepAlive:               o.keepAlive,
			Congestion:              o.congestion,
			Balancer:                defaults,
		},
		Loops:    p.loops,
		Table:    p.conntrack,
		Traits:   p.steer.Traits(),
		Upstream: rules,
		Logger:   p.log,
	})
	p.datagram = datagram.New(datagram.Options{
		Config: datagram.Config{
			MaxSessions:        limits.sessions,
			MaxServiceSessions: limits.serviceSessions,
			MaxListeners:       maxListeners,
			Timeout:            o.udpTimeout,
			StreamTimeout:      o.udpStreamTimeout,
			Balancer:           defaults,
			Log:                logging,
		},
		Loops:    loops,
		Table:    p.conntrack,
		Traits:   p.steer.Traits(),
		Upstream: rules,
		Logger:   p.log,
	})
	p.manager = listener.New(listener.Options{
		Transports:    map[service.Protocol]listener.Transport{service.TCP: p.stream, service.UDP: p.datagram},
		MaxBound:      limits.claims,
		Descriptors:   p.stream,
		ServiceCIDRs:  o.serviceRanges(),
		HostAddresses: func() []netip.Addr { return p.host.Load().Addresses },
		Loops:         loops,
		Table:         p.conntrack,
		Redirector:    p.steer,
		Logger:        p.log,
		Report:        p.sendPort,
	})
	return nil
}

// run serves until ctx ends, and reopens the access log at each hangup. It returns
// nil after an orderly stop.
func (p *proxy) run(ctx context.Context, hangups <-chan os.Signal) error {
	defer p.close()
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()

	runtime.GOMAXPROCS(poll.Procs(len(p.loops)))
	failed := make(chan error, len(p.loops)+3)
	start := func(f func() error) {
		running.Add(1)
		go func() {
			defer running.Done()
			if err := f(); err != nil {
				failed <- err
			}
		}()
	}
	for _, l := range p.loops {
		go func() {
			if err := l.Poll.Run(); err != nil {
				failed <- err
			}
		}()
	}
	if p.options.metricsAddress != "" {
		start(func() error { return p.serveMetrics(ctx) })
	}
	changes := make(chan service.Change)
	start(func() error {
		return p.source.Run(ctx, func(c service.Change) {
			p.sync.Queued(time.Now())
			select {
			case changes <- c:
			case <-ctx.Done():
			}
		})
	})
	hosts := make(chan hostnet.State)
	start(func() error {
		return p.hostWatcher.Run(ctx, func(s hostnet.State) {
			select {
			case hosts <- s:
			case <-ctx.Done():
			}
		})
	})
	go p.events.Run(ctx)
	if p.options.configFile != "" {
		start(func() error { return watchConfig(ctx, p.options.configFile) })
	}
	go p.reopenAccessLog(ctx, hangups)

	defer p.stop()
	maintenance := time.NewTimer(p.manager.NextMaintenance())
	defer maintenance.Stop()
	changed, stopWatching := p.watch()
	defer stopWatching()
	for {
		select {
		case c := <-changes:
			p.apply(c)
			maintenance.Reset(p.manager.NextMaintenance())
		case s := <-hosts:
			p.hostChanged(s)
			maintenance.Reset(p.manager.NextMaintenance())
		case <-maintenance.C:
			p.maintain()
			maintenance.Reset(p.nextMaintenance())
		case <-changed:
			p.maintain()
			maintenance.Reset(p.nextMaintenance())
		case err := <-failed:
			return err
		case err := <-p.fatal:
			return err
		case <-ctx.Done():
			p.log.Info().Int64("connections", p.stream.Stats().Open).Msg("stopping")
			return nil
		}
	}
}

// apply applies a change of the configuration.
func (p *proxy) apply(c service.Change) {
	snap := p.store.Apply(c)
	if p.table == nil {
		letGo(c)
	}
	if p.table != nil && p.table.Snapshot() == snap {
		return // nothing that matters (A1.17)
	}
	p.reportProblems(snap)
	p.enforce(snap, c.Triggers...)
}

// enforce applies a snapshot with the node's current state. triggers are the times
// at which its changes happened, as far as known.
func (p *proxy) enforce(snap *service.Snapshot, triggers ...time.Time) {
	begin := time.Now()
	p.table = policy.Compile(p.table, snap, p.policy)
	p.health.Queued()
	err := p.manager.Apply(p.table)
	p.health.Update(p.table)
	p.countNoLocal()
	if err != nil {
		p.notInForce(err)
		return
	}
	p.inForce()
	p.sync.Applied(begin, time.Now(), triggers)
	p.log.Debug().Dur("took", time.Since(begin)).Int("service_ports", servicePorts(snap)).Msg("configuration in force")
}

// inForce records that the last configuration is completely in force.
func (p *proxy) inForce() {
	p.health.Applied()
	p.trouble.Over()
	if p.applied.Swap(time.Now().UnixNano()) != 0 {
		return
	}
	go settleMemory()
	event := p.log.Info().Str("version", version).Str("node", p.options.hostname).Str("redirect", p.steer.Traits().Name)
	if p.manifests != nil {
		found := p.manifests.Stats()
		event = event.Int("files", found.Files).Int("objects_passed_over", sum(found.PassedOver))
	}
	event.Int("service_ports", servicePorts(p.table.Snapshot())).Msg("ready")
	p.events.Send(kubernetes.Event{Reason: "Starting", Action: "StartKubeProxy", Note: "sluice " + version + " serves the Services of this node"})
}

// notInForce records that a part of it is not. It logs the same error once only, as
// the retries would fill the log.
func (p *proxy) notInForce(err error) {
	p.failures.Add(1)
	if !p.trouble.New(err.Error()) {
		return
	}
	p.log.Error().Err(err).Msg("the kernel's tables are not as they should be; trying again")
}

// countNoLocal counts the service ports that this node drops (A3.16).
func (p *proxy) countNoLocal() {
	var n admin.NoLocalEndpoints
	for f := range n {
		n[f].Internal, n[f].External = p.table.NoLocalEndpoints(service.Family(f))
	}
	p.noLocal.Store(&n)
}

// reportProblems logs each problem of a snapshot once, and again when it returns. If
// a namespace has too many in a minute, the others are logged with a later change.
func (p *proxy) reportProblems(snap *service.Snapshot) {
	current := make(map[service.Problem]bool, len(snap.Problems))
	now := time.Now()
	for _, problem := range snap.Problems {
		if p.reported[problem] {
			current[problem] = true
			continue
		}
		subject := namespaceOf(problem.Object)
		last, ok := p.lines.Take(subject, now)
		if !ok {
			continue
		}
		current[problem] = true
		p.log.Warn().Str("object", problem.Object).Msg(problem.Text)
		p.sendProblem(problem)
		if last {
			p.log.Warn().Str("object", subject).Msgf("had %d problems in a minute: further ones are logged with a later change; sluice_config_problems counts them all", once.PerMinute)
		}
	}
	p.reported = current
}

// namespaceOf returns the namespace of an object, such as "Namespace default" for
// "Service default/web", or the object itself if it has none.
func namespaceOf(object string) string {
	_, name, _ := strings.Cut(object, " ")
	if namespace, _, ok := strings.Cut(name, "/"); ok {
		return "Namespace " + namespace
	}
	return object
}

func (p *proxy) maintain() {
	complete := p.manager.Complete()
	repaired, err := p.manager.Maintain()
	if err != nil {
		p.notInForce(err)
		return
	}
	if !complete || p.trouble.Lasts() {
		p.inForce()
	}
	if repaired {
		p.repairs.Add(1)
		p.log.Warn().Msg("somebody had changed our part of the kernel's tables; it is restored")
	}
}

// watch returns a channel for changes to the kernel's tables: that of the steering
// mode, or else of a watcher of the routes that all modes use.
func (p *proxy) watch() (changed <-chan struct{}, stop func()) {
	if n, ok := p.steer.(redirect.Notifier); ok {
		return n.Changed(), func() {}
	}
	w, err := watch.Open(watch.Options{})
	if err != nil {
		p.log.Warn().Err(err).Msg("changes to routes are noticed late, within seconds")
		return nil, func() {}
	}
	return w.Changed(), w.Close
}

// nextMaintenance is shorter while something is not in force.
func (p *proxy) nextMaintenance() time.Duration {
	if p.trouble.Lasts() {
		return min(retryTrouble, p.manager.NextMaintenance())
	}
	return p.manager.NextMaintenance()
}

// retryTrouble is the pause before a failed repair is retried.
const retryTrouble = 500 * time.Millisecond

// reopenAccessLog reopens the access log at each hangup, until ctx ends. It has its
// own goroutine, as opening and writing a file may block.
func (p *proxy) reopenAccessLog(ctx context.Context, hangups <-chan os.Signal) {
	for {
		select {
		case <-hangups:
		case <-ctx.Done():
			return
		}
		if p.accessLog == nil {
			continue
		}
		if err := p.accessLog.Reopen(); err != nil {
			p.log.Error().Err(err).Msg("the access log goes on where it was")
		}
	}
}

// stop ends what run has started, in an order in which no client has to wait: first
// steering, then connections, then the records are written.
func (p *proxy) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), stopPatience)
	defer cancel()
	if err := p.steer.Close(); err != nil {
		p.log.Error().Err(err).Msg("steering is not undone; sluice cleanup does it")
	}
	if err := p.manager.Stop(ctx); err != nil {
		p.log.Error().Err(err).Msg("connections are cut without a record")
	}
	if err := p.conntrack.Close(ctx); err != nil {
		p.log.Error().Err(err).Msg("records are lost")
	}
}

// close releases what newProxy has opened.
func (p *proxy) close() {
	if p.health != nil {
		p.health.Close()
	}
	if p.hostWatcher != nil {
		p.hostWatcher.Close()
	}
	for _, l := range p.loops {
		l.Poll.Stop()
		l.Relay.Close()
	}
	if p.accessLog != nil {
		if err := p.accessLog.Close(); err != nil {
			p.log.Error().Err(err).Msg("access log")
		}
	}
	if p.lock != nil {
		_ = p.lock.Release() // the process ends, and the lock with it
	}
}

func servicePorts(s *service.Snapshot) int {
	n := 0
	for _, port := range s.Ports {
		if port != nil {
			n++
		}
	}
	return n
}
