package policy

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Table is a compiled Snapshot, ready for decisions. It never changes and is safe
// for concurrent use.
type Table struct {
	snap *service.Snapshot
	node *node
	// index holds the decisions that Resolve reads.
	index *service.Index[decision]
	// ownPorts are the ports that services use on their own addresses. Node
	// ports are rarely among them, so Resolve skips a lookup for most node ports.
	ownPorts *portSet
	// chunks hold the service ports by service.PortID. The next Table replaces
	// only changed chunks.
	chunks []*chunk
}

const chunkSize = 64

type chunk struct {
	ports [chunkSize]compiled
	// noLocal is this chunk's part of NoLocalEndpoints, by service.Family.
	noLocal [2]struct{ internal, external int }
	keeps   bool            // some port preserves the client's address by external policy Local
	health  []*service.Port // ports with a HealthCheckNodePort
}

// compiled is one service port as this node sees it.
type compiled struct {
	port          *service.Port // nil if the Snapshot has none
	internalLocal bool
	externalLocal bool
	families      [2]family // by service.Family
}

// family is a service port in one family.
type family struct {
	exists bool
	usable bool // an endpoint on any node can serve (A2.6)
	// The endpoints by traffic policy; nil if the port does not use the policy.
	cluster, local []service.Endpoint
	firewall       *firewall // nil without source ranges
}

// current reports whether c is still valid for p. keys means that the labels that
// topology keys refer to have changed.
func (c *compiled) current(p *service.Port, keys bool) bool {
	return c.port == p && !(keys && hasKeys(p))
}

// firewall holds the loadBalancerSourceRanges of a port.
type firewall struct {
	allowed ranges
	// fromNode is set if the ranges contain the node's primary address and so
	// allow the node's own connections (A3.11).
	fromNode bool
}

func newFirewall(sourceRanges []netip.Prefix, primary []netip.Addr) *firewall {
	if len(sourceRanges) == 0 {
		return nil
	}
	return &firewall{
		allowed:  newRanges(slices.Clone(sourceRanges)),
		fromNode: slices.ContainsFunc(primary, func(a netip.Addr) bool { return contains(sourceRanges, a) }),
	}
}

// Compile builds the Table of a Snapshot. It reuses prev for unchanged ports,
// unless the node's name, zone or primary addresses changed. A change of pod
// ranges or of the node's other addresses compiles no port again. prev may be nil.
func Compile(prev *Table, snap *service.Snapshot, cfg Config) *Table {
	t := &Table{snap: snap, node: newNode(snap, &cfg)}
	t.chunks = make([]*chunk, (len(snap.Ports)+chunkSize-1)/chunkSize)
	if prev != nil && !prev.node.compilesAs(t.node) {
		prev = nil
	}
	var old []*service.Port
	keys := false // labels that topology keys refer to changed
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

// compileChunk builds a chunk and reuses the unchanged ports of prev, which may be
// nil. With keys, it compiles ports with topology keys again.
func compileChunk(prev *chunk, ports []*service.Port, n *node, keys bool) *chunk {
	next := &chunk{}
	for i, p := range ports {
		switch {
		case p == nil:
		case prev != nil && prev.ports[i].current(p, keys):
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
		if v := &p.Families[f]; v.Exists {
			c.families[f] = categorize(p, v, n)
			c.families[f].firewall = newFirewall(v.SourceRanges, n.primary)
		}
	}
	return c
}

// Snapshot returns the Snapshot that the Table was compiled from.
func (t *Table) Snapshot() *service.Snapshot { return t.snap }

// port returns the compiled form of a service port of the Snapshot.
func (t *Table) port(id service.PortID) *compiled {
	return &t.chunks[id/chunkSize].ports[id%chunkSize]
}
