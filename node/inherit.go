package node

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/service"
)

// The kinds of a handover.State.
const (
	affinityState = "affinity" // movedPins
	learntState   = "learnt"   // a list of movedLearnt
	idsState      = "ids"      // conntrack.Table.NextID
	pastState     = "past"     // conntrack.MovedPast
	historyState  = "history"  // live.MovedHistory
	portsState    = "ports"    // a list of conntrack.MovedTotals, which the next process adds
	totalsState   = "totals"   // admin.Carried's, which replace earlier ones
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
// It returns the since of the next call.
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

// idsSpace is how many connections a process may accept while it hands over. The next one skips that
// many numbers.
const idsSpace = 1_000_000

// tellPast gives the next process the records of ended connections. It moves connections meanwhile.
func (p *Proxy) tellPast() error {
	if p.past == nil {
		return nil
	}
	moved := time.Now()
	return p.past.Move(func(m *conntrack.MovedPast) error {
		if time.Since(moved) > movePause {
			p.move()
			moved = time.Now()
		}
		return p.successor.Tell(pastState, m)
	})
}

// tellHistory gives the next process the rates of the last minutes.
func (p *Proxy) tellHistory() error {
	if p.history == nil {
		return nil
	}
	return p.history.Move(func(m *live.MovedHistory) error { return p.successor.Tell(historyState, m) })
}

// learnPast is learn for what comes beside connections. It is safe for concurrent use.
func (p *Proxy) learnPast(states []handover.State) {
	p.learnTotals(states)
	for _, s := range states {
		switch s.Kind {
		case pastState:
			var m conntrack.MovedPast
			if p.past != nil && json.Unmarshal(s.Data, &m) == nil {
				p.past.Carry(&m)
			}
		case historyState:
			var m live.MovedHistory
			if p.history == nil || json.Unmarshal(s.Data, &m) != nil {
				continue
			}
			if err := p.history.Carry(&m); err != nil {
				p.log.Warn().Err(err).Msg("the history begins anew")
			}
		}
	}
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
		case idsState:
			var next uint64
			if json.Unmarshal(s.Data, &next) == nil {
				p.conntrack.BeginIDs(next)
			}
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
