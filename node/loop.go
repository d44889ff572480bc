package node

import (
	"context"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
)

// tasks are the goroutines beside Run's, and what they send it.
type tasks struct {
	group   sync.WaitGroup
	failed  chan error // ends Run
	changes chan service.Change
	hosts   chan hostnet.State
}

// start runs f, whose error ends Run.
func (t *tasks) start(f func() error) {
	t.group.Go(func() {
		if err := f(); err != nil {
			t.failed <- err
		}
	})
}

// Run serves until ctx ends, and reopens the access log at each hangup. beside runs with
// it, and ends it by an error. Run returns nil after an orderly stop. It is called once,
// and sets GOMAXPROCS and the collector's share of memory for the process.
func (p *Proxy) Run(ctx context.Context, hangups <-chan os.Signal, beside ...func(context.Context) error) error {
	outer := ctx
	defer p.rest(outer)
	defer p.close()
	ctx, cancel := p.untilHandedOver(ctx)
	t := &tasks{failed: make(chan error, len(p.loops)+5+len(beside)), changes: make(chan service.Change), hosts: make(chan hostnet.State)}
	defer t.group.Wait()
	defer cancel()
	p.start(ctx, t)
	for _, f := range beside {
		t.start(func() error { return f(ctx) })
	}
	// Connections outlive a take-over, and then a signal to end; p.stop ends them.
	logging, endLogging := context.WithCancel(context.WithoutCancel(outer))
	go p.reopenAccessLog(logging, hangups)
	if p.config.RecordInterval > 0 {
		go p.remind(logging)
	}
	defer p.stop()
	defer endLogging()
	err := p.serve(ctx, t)
	if p.successor != nil {
		p.closeRest()
		cancel()
		return p.linger(outer)
	}
	return err
}

// start begins what runs beside Run's goroutine.
func (p *Proxy) start(ctx context.Context, t *tasks) {
	procs := poll.Procs(len(p.loops))
	if p.flows != nil {
		procs++
	}
	runtime.GOMAXPROCS(procs)
	for _, l := range p.allLoops() {
		go func() {
			if err := l.Run(); err != nil {
				t.failed <- err
			}
		}()
	}
	p.serveRest = func() {
		if p.offer != nil {
			t.group.Go(func() { p.serveOffer(ctx) })
		}
		if p.admin != nil {
			t.start(func() error { return p.admin.Serve(ctx) })
		}
		if p.page != nil {
			t.group.Go(func() { p.servePage(ctx) })
		}
		if p.names != nil && p.names.server != nil {
			t.start(func() error { return p.names.serve(ctx) })
		}
		if p.flows != nil {
			t.group.Go(p.startFlows)
		}
	}
	if p.before == nil {
		p.serveRest()
	}
	if p.config.MetricsAddress != "" {
		t.group.Go(func() { p.serveMetrics(ctx) })
	}
	t.start(func() error {
		return p.source.Run(ctx, func(c service.Change) {
			p.sync.Queued(time.Now())
			sendTo(ctx, t.changes, c)
		})
	})
	t.start(func() error {
		return p.hostWatcher.Run(ctx, func(s hostnet.State) { sendTo(ctx, t.hosts, s) })
	})
	go p.events.Run(ctx)
	t.group.Go(func() { p.reportRefusals(ctx) })
}

// serve keeps the configuration in force, until ctx ends, another process has taken over, or
// something fails.
func (p *Proxy) serve(ctx context.Context, t *tasks) error {
	p.maintained = time.Now()
	maintenance := time.NewTimer(0)
	defer maintenance.Stop()
	for p.successor == nil {
		// Counted from the last one: whatever happens often must not put it off.
		maintenance.Reset(time.Until(p.maintained.Add(p.nextMaintenance())))
		select {
		case c := <-t.changes:
			p.apply(c)
		case f := <-p.requests:
			f()
		case c := <-p.replaced:
			p.waiting = c
			return nil
		case s := <-t.hosts:
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
				t.group.Go(func() { p.endDeparted(ctx, due) })
			}
		case now := <-p.rebalancer.timer.C:
			if shares := p.rebalancer.next(now, p.log); len(shares) > 0 {
				t.group.Go(func() { p.closeIdle(ctx, shares) })
			}
		case <-p.before.hasMoved():
			p.departed.restart(time.Now())
		case <-p.node.timer.C:
			p.node.remind()
		case <-p.steer.Changed():
			p.maintain()
		case err := <-t.failed:
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
	return nil
}

// sendTo sends a value, unless ctx ends first.
func sendTo[T any](ctx context.Context, to chan<- T, value T) {
	select {
	case to <- value:
	case <-ctx.Done():
	}
}

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
