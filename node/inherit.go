package node

import (
	"encoding/json"
	"slices"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
)

// The kinds of a handover.State.
const (
	affinityState = "affinity" // movedPins
	learntState   = "learnt"   // a list of movedLearnt
	portsState    = "ports"    // a list of conntrack.MovedTotals, which the next process adds
	totalsState   = "totals"   // admin.Carried's, in the place of those told before
)

// movedPins are clients of a service port that session affinity remembers.
type movedPins struct {
	Port service.PortName
	Pins []balancer.Pin // Used is the time since the last use
}

// movedLearnt is what the balancer of a service port has learnt.
type movedLearnt struct {
	Port   service.PortName
	Learnt balancer.Learnt
}

// learntBatch bounds the endpoints and lists of service ports in a message, and the service ports.
const learntBatch = 200

// totalsBatch bounds the service ports in a message.
const totalsBatch = 50

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

// tellLearnt gives the next process what balancers have learnt of endpoints.
func (p *Proxy) tellLearnt(c *handover.Conn) (err error) {
	if p.table == nil {
		return nil
	}
	now, size := poll.Nanotime(), 0
	var batch []movedLearnt
	tell := func() {
		if err == nil && len(batch) > 0 {
			err = c.Tell(learntState, batch)
		}
		batch, size = nil, 0
	}
	for _, port := range p.table.Snapshot().Ports {
		if port == nil {
			continue
		}
		b := p.balancerOf(port.Name)
		if b == nil {
			continue
		}
		for l := b.Learnt(now); len(l.Turns)+len(l.Endpoints) > 0; {
			n := min(len(l.Endpoints), learntBatch-size)
			batch = append(batch, movedLearnt{port.Name, balancer.Learnt{Turns: l.Turns, Endpoints: l.Endpoints[:n]}})
			size += n + 1
			l.Turns, l.Endpoints = nil, l.Endpoints[n:]
			if size >= learntBatch {
				tell()
			}
		}
	}
	tell()
	return err
}

// tellTotals gives the next process the totals of metrics, as of now.
func (p *Proxy) tellTotals(c *handover.Conn) error {
	if err := p.tellPorts(c); err != nil {
		return err
	}
	return c.Tell(totalsState, p.totals.Totals())
}

// tellPorts gives the next process what service ports have counted since the last time.
func (p *Proxy) tellPorts(c *handover.Conn) error {
	for list := range slices.Chunk(p.conntrack.MovedTotals(), totalsBatch) {
		if err := c.Tell(portsState, list); err != nil {
			return err
		}
	}
	return nil
}

// learnTotals is learn for totals. It is safe for concurrent use.
func (p *Proxy) learnTotals(states []handover.State) {
	for _, s := range states {
		switch s.Kind {
		case portsState:
			var list []conntrack.MovedTotals
			if json.Unmarshal(s.Data, &list) == nil {
				p.conntrack.Carry(list)
			}
		case totalsState:
			var totals map[string]float64
			if json.Unmarshal(s.Data, &totals) == nil {
				p.totals.Carry(totals)
			}
		}
	}
}

// learn uses what the running process told. What cannot be read is passed over: that process may
// be of another version.
func (p *Proxy) learn(states []handover.State) {
	now := poll.Nanotime()
	p.learnTotals(states)
	for _, s := range states {
		switch s.Kind {
		case affinityState:
			var m movedPins
			if json.Unmarshal(s.Data, &m) != nil {
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
		case learntState:
			var list []movedLearnt
			if json.Unmarshal(s.Data, &list) != nil {
				continue
			}
			for i := range list {
				if b := p.balancerOf(list[i].Port); b != nil {
					b.Learn(&list[i].Learnt, now)
				}
			}
		}
	}
}
