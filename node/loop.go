package node

import (
	"context"
	"fmt"
	"maps"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/admin"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
	"github.com/sluice-proxy/sluice/source/manifests"
)

// Run serves until ctx ends, and reopens the access log at each hangup. beside runs with
// it, and ends it by an error. Run returns nil after an orderly stop. It is called once,
// and sets GOMAXPROCS and the collector's share of memory for the process.
func (p *Proxy) Run(ctx context.Context, hangups <-chan os.Signal, beside ...func(context.Context) error) error {
	outer := ctx
	defer p.rest(outer)
	defer p.close()
	ctx, cancel := p.untilHandedOver(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()

	procs := poll.Procs(len(p.loops))
	if p.flows != nil {
		procs++
	}
	runtime.GOMAXPROCS(procs)
	failed := make(chan error, len(p.loops)+5+len(beside))
	start := func(f func() error) {
		running.Go(func() {
			if err := f(); err != nil {
				failed <- err
			}
		})
	}
	for _, l := range p.allLoops() {
		go func() {
			if err := l.Run(); err != nil {
				failed <- err
			}
		}()
	}
	p.serveRest = func() {
		if p.offer != nil {
			running.Go(func() { p.serveOffer(ctx) })
		}
		if p.admin != nil {
			start(func() error { return p.admin.Serve(ctx) })
		}
		if p.page != nil {
			running.Go(func() { p.servePage(ctx) })
		}
		if p.names != nil && p.names.server != nil {
			start(func() error { return p.names.serve(ctx) })
		}
		if p.flows != nil {
			running.Go(p.startFlows)
		}
	}
	if p.before == nil {
		p.serveRest()
	}
	if p.config.MetricsAddress != "" {
		running.Go(func() { p.serveMetrics(ctx) })
	}
	changes := make(chan service.Change)
	start(func() error {
		return p.source.Run(ctx, func(c service.Change) {
			p.sync.Queued(time.Now())
			sendTo(ctx, changes, c)
		})
	})
	hosts := make(chan hostnet.State)
	start(func() error {
		return p.hostWatcher.Run(ctx, func(s hostnet.State) { sendTo(ctx, hosts, s) })
	})
	go p.events.Run(ctx)
	running.Go(func() { p.tellRefusals(ctx) })
	for _, f := range beside {
		start(func() error { return f(ctx) })
	}
	// Connections outlive a take-over, and then a signal to end; p.stop ends them.
	logging, endLogging := context.WithCancel(context.WithoutCancel(outer))
	go p.reopenAccessLog(logging, hangups)
	if p.config.RecordInterval > 0 {
		go p.remind(logging)
	}

	defer p.stop()
	defer endLogging()
	p.maintained = time.Now()
	maintenance := time.NewTimer(0)
	defer maintenance.Stop()
	for {
		// Counted from the last one: whatever happens often must not put it off.
		maintenance.Reset(time.Until(p.maintained.Add(p.nextMaintenance())))
		select {
		case c := <-changes:
			p.apply(c)
		case f := <-p.requests:
			f()
			if p.successor != nil {
				p.closeRest()
				cancel()
				return p.linger(outer)
			}
		case c := <-p.replaced:
			p.waiting = c
			return nil
		case s := <-hosts:
			p.hostChanged(s)
		case <-maintenance.C:
			p.maintain()
		case err := <-p.flows.hasBegun():
			if err := p.flowsBegun(err); err != nil {
				return err
			}
		case <-p.flows.changed():
			if p.table != nil { // else the first configuration finds out
				p.enforce(p.store.Snapshot())
			}
		case now := <-p.departed.timer.C:
			if due := p.departed.take(now); len(due) > 0 {
				running.Go(func() { p.endDeparted(ctx, due) })
			}
		case now := <-p.rebalancer.timer.C:
			if shares := p.rebalancer.next(now, p.log); len(shares) > 0 {
				running.Go(func() { p.closeIdle(ctx, shares) })
			}
		case <-p.before.hasMoved():
			p.departed.restart(time.Now())
		case <-p.node.timer.C:
			p.node.tell()
		case <-p.steer.Changed():
			p.maintain()
		case err := <-failed:
			return err
		case err := <-p.fatal:
			return err
		case <-ctx.Done():
			e := p.log.Info().Int64("connections", p.stream.Stats().Open)
			if p.flows != nil {
				e = e.Int64("flows", p.flows.server.Stats().Open)
			}
			e.Msg("stopping")
			p.config.Notify(daemon.SdNotifyStopping)
			return nil
		}
	}
}

// sendTo sends a value, unless ctx ends first.
func sendTo[T any](ctx context.Context, to chan<- T, value T) {
	select {
	case to <- value:
	case <-ctx.Done():
	}
}

// apply applies a change of the configuration.
func (p *Proxy) apply(c service.Change) {
	publish := p.names.apply(c)
	snap := p.store.Apply(c)
	publish(snap)
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
func (p *Proxy) enforce(snap *service.Snapshot, triggers ...time.Time) {
	if p.left {
		return // Run ends
	}
	begin := time.Now()
	p.node.update(snap)
	if p.rank != nil {
		p.rank.Set(p.config.Policy.NodeName, snap.Node.PodCIDRs, p.policy.ClusterCIDRs)
	}
	p.table = policy.Compile(p.table, snap, p.policy)
	p.health.Queued()
	taking, drained := p.takesOver(), p.policy.Drained
	if taking {
		if err := p.takeSockets(); err != nil {
			p.failTakeOver(err)
			return
		}
	}
	err := p.manager.Apply(p.table)
	if taking {
		if err == nil {
			err = p.tookOver()
		}
		if err != nil {
			p.failTakeOver(err)
			return
		}
		if !maps.Equal(drained, p.policy.Drained) {
			p.enforce(snap, triggers...)
			return
		}
	}
	p.health.Update(p.table)
	p.countNoLocal()
	p.departed.update(snap, begin)
	p.rebalancer.update(p.table, p.conntrack, begin)
	if err != nil {
		p.notInForce(err)
		return
	}
	p.inForce()
	p.sync.Applied(begin, time.Now(), triggers)
	p.log.Debug().Dur("took", time.Since(begin)).Int("service_ports", servicePorts(snap)).Msg("configuration in force")
}

// failTakeOver ends Run.
func (p *Proxy) failTakeOver(err error) {
	p.leave()
	select {
	case p.fatal <- fmt.Errorf("take over: %w; the running sluice serves on", err):
	default: // it ends already
	}
}

// inForce records that the last configuration is completely in force.
func (p *Proxy) inForce() {
	if p.config.Applied != nil {
		defer p.config.Applied(p.table.Snapshot())
	}
	p.health.Applied()
	p.trouble.Over()
	p.wrong.Store(nil)
	p.applied.Store(time.Now().UnixNano())
	p.tellReady()
}

// tellReady says once that Sluice serves: the configuration is completely in force, with the
// data path that it is to have.
func (p *Proxy) tellReady() {
	if p.toldReady || p.applied.Load() == 0 || p.flows.settling() {
		return
	}
	p.toldReady = true
	go p.settleMemory()
	event := p.log.Info().Str("version", p.config.Version).Str("node", p.config.Policy.NodeName).Str("redirect", p.steer.Traits().Name).Stringer("datapath", p.dataPath.Load().path)
	if p.manifests != nil {
		found := p.manifests.Stats()
		event = event.Int("files", found.Files).Int("objects_passed_over", sum(found.PassedOver))
	}
	event.Int("service_ports", servicePorts(p.table.Snapshot())).Msg("ready")
	p.config.Notify(daemon.SdNotifyReady)
	p.events.Send(kubernetes.Event{Reason: "Starting", Action: "StartKubeProxy", Note: "sluice " + p.config.Version + " serves the Services of this node"})
}

// notInForce records that a part of it is not. It logs the same error once only, as
// the retries would fill the log.
func (p *Proxy) notInForce(err error) {
	p.failures.Add(1)
	text := err.Error()
	p.wrong.Store(&text)
	if !p.trouble.New(text) {
		return
	}
	p.log.Error().Err(err).Msg("the kernel's tables are not as they should be; trying again")
}

// countNoLocal counts the service ports that this node drops (A3.16).
func (p *Proxy) countNoLocal() {
	var n admin.NoLocalEndpoints
	for f := range n {
		n[f].Internal, n[f].External = p.table.NoLocalEndpoints(service.Family(f))
	}
	p.noLocal.Store(&n)
}

// reportProblems logs each problem of a snapshot once, and again when it returns. If
// a namespace has too many in a minute, the others are logged with a later change.
func (p *Proxy) reportProblems(snap *service.Snapshot) {
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
		LogProblem(p.log, p.manifests, problem)
		p.sendProblem(problem)
		if last {
			p.log.Warn().Str("object", subject).Msgf("had %d problems in a minute: further ones are logged with a later change; sluice_config_problems counts them all", once.PerMinute)
		}
	}
	p.reported = current
}

// LogProblem logs a problem of an object, with its file and line if it is of a
// manifest. from may be nil.
func LogProblem(log zerolog.Logger, from *manifests.Watcher, problem service.Problem) {
	if from != nil {
		if where := from.Where(problem.Object); where != "" {
			log.Warn().Msgf("%s: %s: %s", where, problem.Object, problem.Text)
			return
		}
	}
	log.Warn().Str("object", problem.Object).Msg(problem.Text)
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

func (p *Proxy) maintain() {
	defer func() { p.maintained = time.Now() }()
	if p.left {
		return // Run ends
	}
	if p.trackingLater {
		p.setConntrack()
	}
	complete := p.manager.Complete()
	repaired, err := p.manager.Maintain()
	if err != nil {
		p.notInForce(err)
		return
	}
	if !complete || p.trouble.Lasts() {
		p.inForce()
	}
	p.tellTracking()
	if repaired {
		p.repairs.Add(1)
		p.log.Warn().Msg("somebody had changed our part of the kernel's tables; it is restored")
	}
}

// nextMaintenance is shorter while something is not in force.
func (p *Proxy) nextMaintenance() time.Duration {
	if p.trouble.Lasts() {
		return min(retryTrouble, p.manager.NextMaintenance())
	}
	return p.manager.NextMaintenance()
}

// retryTrouble is the pause before a failed repair is retried.
const retryTrouble = 500 * time.Millisecond

// reopenAccessLog reopens the access log at each hangup, until ctx ends. It has its
// own goroutine, as opening and writing a file may block.
func (p *Proxy) reopenAccessLog(ctx context.Context, hangups <-chan os.Signal) {
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
			p.log.Error().Err(err).Msg("cannot reopen the access log; the old file stays in use")
		}
	}
}

// stop ends what run has started, in an order in which no client has to wait: first
// SCTP, whose ABORTs need the routes, then steering, then connections, then the records
// are written.
func (p *Proxy) stop() {
	dropped := p.conntrack.Stats().Dropped
	if b := p.before; b != nil && b.serving {
		b.conn.StopTaking()
		<-b.left // what has come is among the connections that end below
	}
	if p.takesOver() && !p.left { // it ends before it has its configuration
		p.leave()
	}
	p.within(stopPatience, "associations are cut without an ABORT", p.stream.SCTP().End)
	if !p.left {
		if err := p.steer.Close(); err != nil {
			p.log.Error().Err(err).Msg("steering is not undone; sluice cleanup does it")
		}
		if p.flows != nil {
			p.within(flowsPatience, "forwarded connections are cut without a reset or a record", p.flows.stop)
		}
	}
	p.within(stopPatience, "connections are cut without a record", p.manager.Stop)
	p.within(stopPatience, "records are lost", p.conntrack.Close)
	if n := p.conntrack.Stats().Dropped - dropped; n > 0 {
		p.log.Error().Uint64("records_lost", n).Msg("the access log was too slow for the last records")
	}
}

// within ends a part, and says in the log what it means if that takes too long.
func (p *Proxy) within(patience time.Duration, otherwise string, stop func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := stop(ctx); err != nil {
		p.log.Error().Err(err).Msg(otherwise)
	}
}

// closeRest closes what openRest has opened, the health checks, and the lock.
func (p *Proxy) closeRest() {
	if p.health != nil {
		p.health.Close()
	}
	if p.admin != nil {
		p.admin.Close()
	}
	if p.page != nil {
		p.page.Close()
	}
	p.names.close()
	if p.offer != nil {
		p.offer.Close()
	}
	if p.lock != nil && p.left {
		_ = p.lock.Release() // the next process has it too
	}
}

// close releases what New has opened.
func (p *Proxy) close() {
	p.closeRest()
	if p.health != nil {
		p.health.Wait()
	}
	if p.hostWatcher != nil {
		p.hostWatcher.Close()
	}
	if p.past != nil {
		p.past.Close()
	}
	for _, l := range p.loops {
		l.Poll.Stop()
		l.Relay.Close()
	}
	if p.flows != nil {
		p.flows.close()
	}
	if p.accessLog != nil {
		if err := p.accessLog.Close(); err != nil {
			p.log.Error().Err(err).Msg("access log")
		}
	}
	if p.lock != nil {
		_ = p.lock.Release() // the process ends, and the lock with it
	}
	if p.successor != nil {
		p.moves = false
		_, _ = p.tellPorts(p.successor), p.tellPast() // of connections that stayed here; it may be gone
	}
	for _, c := range []*handover.Conn{p.waiting, p.successor} {
		if c != nil {
			_ = c.Close()
		}
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
