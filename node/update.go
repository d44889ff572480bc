package node

import (
	"context"

	"github.com/sluice-proxy/sluice/policy"
)

// Update puts into force what can change without a restart. It returns when that is
// done; the error says that Run does not run. It is safe for concurrent use.
func (p *Proxy) Update(ctx context.Context, u Update) error {
	return p.onRun(ctx, func() {
		p.config.Policy = u.Policy
		p.node.podCIDRs = u.Policy.DetectLocal == policy.DetectNodeCIDR
		if p.config.Verbosity != u.Verbosity {
			p.config.Verbosity = u.Verbosity
			p.verbosity.setUsual(u.Verbosity)
		}
		if p.config.Tracking != u.Tracking {
			p.config.Tracking = u.Tracking
			p.setConntrack()
		}
		if p.cluster != nil && p.config.Source.MinSyncPeriod != u.MinSyncPeriod {
			p.config.Source.MinSyncPeriod = u.MinSyncPeriod
			p.cluster.SetMinSyncPeriod(u.MinSyncPeriod)
		}
		p.hostChanged(*p.host.Load()) // compiles the policy anew
	})
}
