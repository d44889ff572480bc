package conntrack

import (
	"context"
	"math"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// pastFormat says what the bytes of a MovedPast mean, with the numbers of ends, errors and their
// like. Each change needs another number: see TestPastFormat.
const pastFormat = 3

// movedBytes bounds the records of a MovedPast, and its names, so that it fits into a message.
const movedBytes = 20 << 10

// MovedPast are records of a Past on their way to the process that takes over.
type MovedPast struct {
	Format    int
	Data      []byte             `json:",omitempty"`
	Ports     []service.PortName `json:",omitempty"`
	Endpoints []MovedEndpoint    `json:",omitempty"`
	Node      string             `json:",omitempty"`
	Lost      uint64             `json:",omitempty"`
	Since     int64              `json:",omitempty"` // PastView.Since in Unix ns, of the last one
}

// Move gives all records that it has not given before, the oldest first. It stops at the first
// error of give, which may not keep what it gets.
func (p *Past) Move(give func(*MovedPast) error) error {
	p.mu.Lock()
	p.sealLocked()
	var blocks []*block
	for _, b := range p.blocks {
		if !b.moved {
			blocks = append(blocks, b)
		}
		b.moved = true
	}
	since := p.since
	p.mu.Unlock()
	part := newBlock()
	giveOne := func() error {
		m := MovedPast{Format: pastFormat, Data: part.data, Ports: part.ports, Node: part.node, Lost: part.lost}
		for _, e := range part.endpoints {
			m.Endpoints = append(m.Endpoints, MovedEndpoint{Addr: e.addr, Pod: e.pod, Node: e.node, Zone: e.zone})
		}
		err := give(&m)
		part.reset()
		return err
	}
	for _, b := range blocks {
		part.lost = b.lost
		err := b.each(context.Background(), math.MinInt64, func(r *Record) error {
			part.add(r)
			if len(part.data) >= movedBytes || part.names >= movedBytes {
				return giveOne()
			}
			return nil
		})
		if err == nil && (part.count > 0 || part.lost > 0) {
			err = giveOne()
		}
		if err != nil {
			return err
		}
	}
	return give(&MovedPast{Format: pastFormat, Since: since})
}

// Carry keeps what another process has kept. What it cannot read, it passes over: that process may
// be of another version.
func (p *Past) Carry(m *MovedPast) {
	if m.Format != pastFormat {
		return
	}
	b := &block{data: m.Data, ports: m.Ports, node: m.Node, count: 1, newest: math.MaxInt64, lost: m.Lost}
	for i := range m.Ports {
		b.names += portBytes(&m.Ports[i])
	}
	for _, e := range m.Endpoints {
		n := named{e.Addr, e.Pod, e.Node, e.Zone}
		b.endpoints = append(b.endpoints, n)
		b.names += n.bytes()
	}
	count, newest := 0, int64(math.MinInt64)
	if b.each(context.Background(), math.MinInt64, func(r *Record) error {
		count, newest = count+1, max(newest, r.Wall+r.Duration)
		return nil
	}) != nil {
		return
	}
	b.count, b.newest = count, newest
	p.mu.Lock()
	defer p.mu.Unlock()
	if count > 0 || b.lost > 0 {
		at, _ := slices.BinarySearchFunc(p.blocks, newest, func(b *block, newest int64) int {
			if b.newest > newest {
				return 1
			}
			return -1
		})
		p.blocks = slices.Insert(p.blocks, at, b)
		p.held += b.size()
		p.trimLocked()
	}
	if m.Since > 0 {
		p.since = max(min(p.since, m.Since), p.trimmed)
	}
}
