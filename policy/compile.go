package policy

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Table is a Snapshot made ready for decisions. It never changes and may be
// read from any goroutine.
type Table struct {
	snap  *service.Snapshot
	node  *node
	ports []*compiled // by service.PortID
}

// compiled is one service port with its lists by family.
type compiled struct {
	port  *service.Port
	lists [2]lists
	// fromNode says, by family, that the source ranges let the node's own
	// connections in (A3.11).
	fromNode [2]bool
}

// Compile makes the Table of a Snapshot. What prev holds of the ports that did
// not change is used again, as long as the node and cfg did not change either;
// prev may be nil.
func Compile(prev *Table, snap *service.Snapshot, cfg Config) *Table {
	t := &Table{snap: snap, node: newNode(snap, &cfg), ports: make([]*compiled, len(snap.Ports))}
	var old []*service.Port
	if prev != nil && prev.node.equal(t.node) {
		t.node = prev.node
		old = prev.snap.Ports
		copy(t.ports, prev.ports)
	}
	for i, p := range snap.Ports {
		switch {
		case i < len(old) && old[i] == p:
		case p == nil:
			t.ports[i] = nil
		default:
			t.ports[i] = compilePort(p, t.node)
		}
	}
	return t
}

func compilePort(p *service.Port, n *node) *compiled {
	c := &compiled{port: p}
	for f := range p.Families {
		v := &p.Families[f]
		if !v.Exists {
			continue
		}
		c.lists[f] = categorize(p, v, n)
		c.fromNode[f] = slices.ContainsFunc(n.primary, func(a netip.Addr) bool {
			return contains(v.SourceRanges, a)
		})
	}
	return c
}

// Snapshot gives what the Table was made of.
func (t *Table) Snapshot() *service.Snapshot { return t.snap }
