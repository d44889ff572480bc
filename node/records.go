package node

import (
	"context"
	"time"
)

// remind writes records of open connections to the access log until ctx ends.
func (p *Proxy) remind(ctx context.Context) {
	interval := p.config.RecordInterval
	tick := time.NewTicker(max(interval/8, 250*time.Millisecond))
	defer tick.Stop()
	post := p.onLoops()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if err := p.conntrack.Remind(ctx, post, interval); err != nil {
			return // the proxy stops
		}
	}
}
