package listener

import (
	"fmt"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
)

// balancerAnnotation names the balancer of a service, without the prefix
// sluice.dev/.
const balancerAnnotation = "balancer"

// newPool makes the pool of a service port. problem is what could not be
// taken over from its annotations, or nil.
func newPool(p *service.Port, cfg *Config, counters *conntrack.Counters) (created *pool, problem error) {
	opts, problem := balancerOptions(p, cfg)
	return &pool{
		port:     p,
		balancer: balancer.New(opts),
		counters: counters,
	}, problem
}

// configure takes a changed port over.
func (p *pool) configure(port *service.Port, cfg *Config) (problem error) {
	opts, problem := balancerOptions(port, cfg)
	p.port = port
	p.balancer.Configure(opts)
	return problem
}

// balancerOptions gives what the balancer of a port is made with. A balancer
// that is not known is a problem of the service and leaves it with the default.
func balancerOptions(p *service.Port, cfg *Config) (opts balancer.Options, problem error) {
	opts = balancer.Options{
		Algorithm:       cfg.Algorithm,
		AffinityTimeout: p.AffinityTimeout,
		MaxPins:         cfg.MaxPins,
		Plan:            cfg.Plan,
	}
	if name, ok := p.Annotations[balancerAnnotation]; ok {
		algorithm, err := balancer.Parse(name)
		if err != nil {
			return opts, fmt.Errorf("annotation sluice.dev/%s: %w; it gets %s", balancerAnnotation, err, opts.Algorithm)
		}
		opts.Algorithm = algorithm
	}
	return opts, nil
}

// syncPools gives service ports their pools, and gives back those that have no
// port any more.
func (m *Manager) syncPools(ids []service.PortID, prev, next *state) (gone []*pool) {
	m.quotas.sweep()
	ports := next.table.Snapshot().Ports
	next.pools = make([]*pool, len(ports))
	copy(next.pools, prev.pools)
	for _, id := range ids {
		if int(id) >= len(ports) {
			continue
		}
		next.pools[id] = nil
		port := ports[id]
		if port == nil || port.Name.Protocol != service.TCP {
			continue
		}
		p := m.pools[port.Name]
		switch {
		case p == nil:
			var problem error
			p, problem = newPool(port, &m.config, m.table.Counters(port.Name))
			m.quotas.join(p)
			m.warn(port, problem)
			m.pools[port.Name] = p
		case p.port != port:
			m.warn(port, p.configure(port, &m.config))
		}
		next.pools[id] = p
	}
	for _, id := range ids {
		if int(id) >= len(prev.pools) || prev.pools[id] == nil {
			continue
		}
		p := prev.pools[id]
		if now := p.port.ID; int(now) >= len(next.pools) || next.pools[now] != p {
			delete(m.pools, p.port.Name)
			m.quotas.leave(p)
			gone = append(gone, p)
		}
	}
	return gone
}
