package node

import (
	"context"
	"math"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// rebalancer closes idle connections to the fuller endpoints of Services with the annotation
// sluice.dev/rebalance, after endpoints came: clients that keep connections open come back to
// the new ones. It belongs to Run's goroutine.
type rebalancer struct {
	seen     *service.Snapshot // the last one
	ports    map[service.PortName]*rebalance
	timer    *time.Timer
	ticks    bool             // the timer runs
	busy     *atomic.Bool     // connections are being closed
	defaults balancer.Options // of service ports
}

const (
	// rebalanceStep is how often some connections are closed, and rebalancePart which part of
	// them, at least one: all that must move have moved after some 20 s.
	rebalanceStep = time.Second
	rebalancePart = 20
	// rebalanceSlack is which part of an even share an endpoint may have beyond it.
	rebalanceSlack = 20
	// rebalanceTime bounds the time for connections to become idle.
	rebalanceTime = 10 * time.Minute
)

// rebalance is a service port with the annotation.
type rebalance struct {
	port      *service.Port
	endpoints [2][]service.Endpoint // between which connections are balanced, by service.Family
	loads     *balancer.Loads
	algorithm balancer.Algorithm // whose weights make shares

	// Since endpoints came; zero if all is even again.
	began  time.Time
	came   int64        // the same as monotonic ns: older connections may be closed
	open   [2]int       // connections then
	closed atomic.Int64 // connections since then
}

func newRebalancer(defaults balancer.Options) *rebalancer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return &rebalancer{seen: &service.Snapshot{}, ports: make(map[service.PortName]*rebalance), timer: t, busy: new(atomic.Bool), defaults: defaults}
}

// update notes which endpoints came with a policy.
func (b *rebalancer) update(table *policy.Table, connections *conntrack.Table, now time.Time) {
	snap := table.Snapshot()
	for i, is := range snap.Ports {
		if is == nil || is == b.seen.Port(i) {
			continue
		}
		options, _ := b.defaults.For(is) // others report the problem
		if is.Rebalance == 0 || !options.Algorithm.SpreadsClients() {
			delete(b.ports, is.Name)
			continue
		}
		p, known := b.ports[is.Name]
		if !known {
			p = &rebalance{loads: connections.Counters(is.Name).Loads()}
			b.ports[is.Name] = p
		}
		p.port, p.algorithm = is, options.Algorithm
		for f := range p.endpoints {
			if came := p.follow(f, table.Balanced(is.ID, service.Family(f))); came && known {
				p.start(f, now)
			}
		}
	}
	for i, was := range b.seen.Ports {
		if was == nil || was == snap.Port(i) {
			continue
		}
		if p := b.ports[was.Name]; p != nil && p.port == was {
			delete(b.ports, was.Name)
		}
	}
	b.seen = snap
	if !b.ticks { // else changes in quick succession would put the next step off for ever
		b.schedule()
	}
}

// follow takes the endpoints of a family, and reports whether some came.
func (p *rebalance) follow(f int, endpoints []service.Endpoint) (came bool) {
	before := make(map[netip.AddrPort]struct{}, len(p.endpoints[f]))
	for i := range p.endpoints[f] {
		before[p.endpoints[f][i].Addr] = struct{}{}
	}
	p.endpoints[f] = endpoints
	return slices.ContainsFunc(endpoints, func(e service.Endpoint) bool { _, was := before[e.Addr]; return !was })
}

// start begins to even out the connections, after endpoints of a family came.
func (p *rebalance) start(f int, now time.Time) {
	p.began, p.came, p.open[f] = now, poll.Nanotime(), p.total(f)
	p.closed.Store(0)
}

// total returns how many connections the endpoints of a family have.
func (p *rebalance) total(f int) (n int) {
	for i := range p.endpoints[f] {
		n += p.loads.Of(p.endpoints[f][i].Addr).Open()
	}
	return n
}

func (b *rebalancer) schedule() {
	b.ticks = false
	for _, p := range b.ports {
		if !p.began.IsZero() {
			b.ticks = true
			b.timer.Reset(rebalanceStep)
			return
		}
	}
}

// share is what may be closed of one service port in a step.
type share struct {
	of      *rebalance
	quiet   time.Duration
	came    int64
	surplus map[netip.AddrPort]int // beyond an even share, or one by weights
	most    int
}

// next returns what closeIdle may close now. Closed connections whose clients have not come back
// count as if they had: else, all would be closed in the end.
func (b *rebalancer) next(now time.Time, log zerolog.Logger) map[service.PortName]*share {
	defer b.schedule()
	if b.busy.Load() {
		return nil
	}
	shares := make(map[service.PortName]*share)
	for name, p := range b.ports {
		if p.began.IsZero() {
			continue
		}
		s := &share{of: p, quiet: p.port.Rebalance, came: p.came, surplus: make(map[netip.AddrPort]int)}
		away := false // clients have not come back
		for f, list := range p.endpoints {
			open := p.total(f)
			all := max(p.open[f], open)
			away = away || all-open > all/rebalanceSlack
			weights := 0
			for i := range list {
				weights += p.algorithm.WeightOf(&list[i])
			}
			for i := range list {
				even := (all*p.algorithm.WeightOf(&list[i]) + weights - 1) / weights
				if n := p.loads.Of(list[i].Addr).Open() - even; n > even/rebalanceSlack {
					s.surplus[list[i].Addr] = n
				}
			}
			if all > 0 {
				s.most += max(all/rebalancePart, 1)
			}
		}
		if (len(s.surplus) > 0 || away) && now.Sub(p.began) < rebalanceTime {
			if len(s.surplus) > 0 {
				shares[name] = s
			}
			continue
		}
		p.began = time.Time{}
		if n := p.closed.Load(); n > 0 {
			log.Info().Str("object", "Service "+name.Name.String()).Int64("connections", n).Msg("idle connections were closed after endpoints came (sluice.dev/rebalance)")
		}
	}
	b.busy.Store(len(shares) > 0)
	return shares
}

// takes reports whether to close a connection, on its event loop.
func (s *share) takes(r *conntrack.Record) bool {
	owner, is := r.Owner.(conntrack.Idler)
	if !is || s.most == 0 || r.Start >= s.came || s.surplus[r.Endpoint.Addr] == 0 || !owner.IdleFor(s.quiet) {
		return false
	}
	s.most--
	s.surplus[r.Endpoint.Addr]--
	s.of.closed.Add(1)
	return true
}

// closeIdle closes what the shares say.
func (p *Proxy) closeIdle(ctx context.Context, shares map[service.PortName]*share) {
	defer p.rebalancer.busy.Store(false)
	_, err := p.conntrack.EndWhere(ctx, p.onLoops(), math.MaxInt, conntrack.Rebalanced, func(r *conntrack.Record) bool {
		if !r.Connected || r.Port == nil || r.Protocol != service.TCP {
			return false
		}
		s := shares[r.Port.Name]
		return s != nil && s.takes(r)
	})
	if err != nil && ctx.Err() == nil {
		p.log.Warn().Err(err).Msg("idle connections are not closed for new endpoints")
	}
}
