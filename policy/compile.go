package policy

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Table is a Snapshot made ready for decisions. It never changes and may be
// read from any goroutine.
type Table struct {
	snap *service.Snapshot
	node *node
	// index has what Resolve reads.
	index *service.Index[decision]
	// numbers are the ports that services have on addresses of their own. Node
	// ports are hardly ever among them, which spares a look for such an address.
	numbers *numbers
	// chunks hold the service ports by service.PortID. The next Table copies
	// only those that changed.
	chunks []*chunk
}

const chunkSize = 64

type chunk struct {
	ports [chunkSize]compiled
	// What NoLocalEndpoints counts in it, by service.Family, and whether
	// externalLocal leaves clients' addresses as they are.
	noLocal [2]struct{ internal, external int }
	keeps   bool
	health  []*service.Port // those with a HealthCheckNodePort
}

// compiled is one service port as this node sees it.
type compiled struct {
	port          *service.Port // nil where the Snapshot has none
	internalLocal bool
	externalLocal bool
	exists        [2]bool // by service.Family, as are the next two
	usable        [2]bool // some endpoint anywhere could serve (A2.6)
	families      [2]family
}

type family struct {
	cluster  []service.Endpoint
	local    []service.Endpoint
	firewall *firewall // nil if everybody may come in
}

// serves tells whether what was compiled serves for a port as it is now; keys
// says that what topology keys depend on changed.
func (c *compiled) serves(p *service.Port, keys bool) bool {
	return c.port == p && !(keys && hasKeys(p))
}

// firewall is what loadBalancerSourceRanges say.
type firewall struct {
	guests ranges
	// fromNode says that the ranges let the node's own connections in (A3.11).
	fromNode bool
}

func newFirewall(sourceRanges []netip.Prefix, primary []netip.Addr) *firewall {
	if len(sourceRanges) == 0 {
		return nil
	}
	return &firewall{
		guests:   newRanges(slices.Clone(sourceRanges)),
		fromNode: slices.ContainsFunc(primary, func(a netip.Addr) bool { return contains(sourceRanges, a) }),
	}
}

// Compile makes the Table of a Snapshot. What prev holds of the ports that did
// not change is used again, as long as the node's name, zone and primary
// addresses did not change either; prev may be nil. Which addresses pods and the
// node have may change at any time without compiling a port again.
func Compile(prev *Table, snap *service.Snapshot, cfg Config) *Table {
	t := &Table{snap: snap, node: newNode(snap, &cfg)}
	t.chunks = make([]*chunk, (len(snap.Ports)+chunkSize-1)/chunkSize)
	if prev != nil && !prev.node.compilesAs(t.node) {
		prev = nil
	}
	var old []*service.Port
	keys := false // what topology keys depend on changed
	if prev != nil {
		old = prev.snap.Ports
		copy(t.chunks, prev.chunks)
		keys = prev.node.others != t.node.others
	}
	for i := range t.chunks {
		from, to := i*chunkSize, min((i+1)*chunkSize, len(snap.Ports))
		ports := snap.Ports[from:to]
		if to > len(old) || !slices.Equal(ports, old[from:to]) || keys && slices.ContainsFunc(ports, hasKeys) {
			t.chunks[i] = compileChunk(t.chunks[i], ports, t.node, keys)
		}
	}
	t.reindex(prev, keys)
	return t
}

func hasKeys(p *service.Port) bool { return p != nil && len(p.TopologyKeys) > 0 }

// compileChunk makes a chunk of the one before, which may be nil. With keys,
// ports that have topology keys are compiled again.
func compileChunk(prev *chunk, ports []*service.Port, n *node, keys bool) *chunk {
	next := &chunk{}
	for i, p := range ports {
		switch {
		case p == nil:
		case prev != nil && prev.ports[i].serves(p, keys):
			next.ports[i] = prev.ports[i]
		default:
			next.ports[i] = compilePort(p, n)
		}
	}
	next.count()
	return next
}

func compilePort(p *service.Port, n *node) compiled {
	c := compiled{port: p, internalLocal: p.InternalLocal, externalLocal: p.ExternalLocal}
	for f := range p.Families {
		v := &p.Families[f]
		if !v.Exists {
			continue
		}
		l := categorize(p, v, n)
		c.exists[f], c.usable[f] = true, l.any
		c.families[f] = family{cluster: l.cluster, local: l.local, firewall: newFirewall(v.SourceRanges, n.primary)}
	}
	return c
}

// Snapshot gives what the Table was made of.
func (t *Table) Snapshot() *service.Snapshot { return t.snap }

// port gives what was compiled of a service port that the Snapshot has.
func (t *Table) port(id service.PortID) *compiled {
	return &t.chunks[id/chunkSize].ports[id%chunkSize]
}
