package node

import (
	"encoding/json"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
)

// affinityState is the kind of a handover.State with movedPins.
const affinityState = "affinity"

// movedPins are clients of a service port that session affinity remembers.
type movedPins struct {
	Port service.PortName
	Pins []balancer.Pin // Used is the time since the last use
}

const (
	pinsBatch     = 500     // in a message
	mostMovedPins = 1 << 18 // in all, some 25 MB
)

// balancerOf returns the balancer of a service port, or nil.
func (p *Proxy) balancerOf(name service.PortName) *balancer.Balancer {
	if name.Protocol == service.UDP {
		return p.datagram.Balancer(name)
	}
	return p.stream.Balancer(name)
}

// tellAffinity gives the next process the clients that have come at since or later, monotonic ns.
// It returns the time from which on others are left.
func (p *Proxy) tellAffinity(c *handover.Conn, since int64) (now int64, err error) {
	now = poll.Nanotime()
	if p.table == nil {
		return now, nil // it has no configuration yet, and so no clients
	}
	left := mostMovedPins
	for _, port := range p.table.Snapshot().Ports {
		if port == nil {
			continue
		}
		b := p.balancerOf(port.Name)
		if b == nil {
			continue
		}
		list := b.Pinned(since, now)
		list = list[len(list)-min(len(list), left):]
		left -= len(list)
		for i := range list {
			list[i].Used = now - list[i].Used
		}
		for len(list) > 0 {
			n := min(len(list), pinsBatch)
			if err := c.Tell(affinityState, movedPins{port.Name, list[:n]}); err != nil {
				return now, err
			}
			list = list[n:]
		}
	}
	return now, nil
}

// learn uses what the running process told. What cannot be read is passed over: that process may
// be of another version.
func (p *Proxy) learn(states []handover.State) {
	now := poll.Nanotime()
	for _, s := range states {
		var m movedPins
		if s.Kind != affinityState || json.Unmarshal(s.Data, &m) != nil {
			continue
		}
		b := p.balancerOf(m.Port)
		if b == nil {
			continue // not served here
		}
		for i := range m.Pins {
			m.Pins[i].Used = now - m.Pins[i].Used
		}
		b.Restore(m.Pins, now)
	}
}
