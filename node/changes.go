package node

import (
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// changes keeps when each service port changed last: its Service, its endpoints, or what this
// node decides by. A start is a change of all of them. It is safe for concurrent use.
type changes struct {
	mu sync.Mutex
	at []time.Time // by service.PortID
}

// note keeps now as the time of each service port that differs between prev and t. prev is nil at
// the start.
func (c *changes) note(prev, t *policy.Table, now time.Time) {
	if prev == nil {
		prev = policy.Compile(nil, &service.Snapshot{}, policy.Config{})
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	at := make([]time.Time, len(t.Snapshot().Ports))
	copy(at, c.at)
	for id := range t.Changed(prev) {
		if int(id) < len(at) {
			at[id] = now
		}
	}
	c.at = at
}

// of returns when a service port changed last.
func (c *changes) of(p *service.Port) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if int(p.ID) < len(c.at) {
		return c.at[p.ID]
	}
	return time.Time{} // it is gone
}
