package policy

import (
	"iter"
	"net/netip"

	"github.com/sluice-proxy/sluice/service"
)

// decision holds everything about a destination that does not depend on the
// client. In a large cluster, each lookup misses the processor's caches, and one
// miss costs as much as the rest of Resolve. So the index stores decisions by
// value, and a decision and its key fill exactly one cache line.
type decision struct {
	// candidates follow the traffic policy of the kind, for clients that do not
	// bypass it (A3.6).
	candidates []service.Endpoint
	id         service.PortID
	kind       service.AddressKind
	traits     traits
	// inlineCount is how many source ranges inline holds.
	inlineCount uint8
	inline      [3]span4
}

// traits are flags of a decision.
type traits uint8

const (
	usable  traits = 1 << iota // an endpoint on any node can serve (A2.6)
	local                      // the traffic policy is Local (A2.2)
	limited                    // there are source ranges (A3.10)
	// overflow means that inline does not hold all allowed clients, so that
	// Resolve must also check the port's firewall.
	overflow
	holds // connections wait while there are no endpoints
)

func (d *decision) is(t traits) bool { return d.traits&t != 0 }

// decide returns the decision for a service port's destinations of one kind and
// family.
func decide(c *compiled, fam service.Family, kind service.AddressKind) decision {
	f := &c.families[fam]
	d := decision{id: c.port.ID, kind: kind, candidates: f.cluster}
	if f.usable {
		d.traits |= usable
	}
	if c.port.Hold > 0 {
		d.traits |= holds
	}
	if kind == service.ClusterIP && c.internalLocal || kind != service.ClusterIP && c.externalLocal {
		d.traits |= local
		d.candidates = f.local
	}
	if w := f.firewall; w != nil && kind == service.LoadBalancer {
		d.traits |= limited
		d.inlineCount = uint8(copy(d.inline[:], w.allowed.four))
		if len(w.allowed.four) > len(d.inline) || len(w.allowed.six) > 0 || w.fromNode {
			d.traits |= overflow
		}
	}
	return d
}

// allowsInline reports whether an inline source range contains the client.
func (d *decision) allowsInline(client netip.Addr) bool {
	if d.inlineCount == 0 || !client.Is4() {
		return false
	}
	n := number(client)
	for _, s := range d.inline[:d.inlineCount] {
		if s.first <= n && n <= s.last {
			return true
		}
	}
	return false
}

// reindex derives index and ownPorts from those of prev, which must have been
// compiled for the same node. With keys, ports with topology keys count as
// changed. prev may be nil.
func (t *Table) reindex(prev *Table, keys bool) {
	if prev == nil {
		prev = &Table{index: &service.Index[decision]{}, ownPorts: &portSet{}}
	}
	t.ownPorts = prev.ownPorts
	edit := service.EditIndex(prev.index)
	// Remove old destinations first: an address may move between ports.
	for was, is := range t.differences(prev, keys) {
		if was.port != nil && was.port != is.port {
			was.removeFrom(edit)
		}
	}
	for _, is := range t.differences(prev, keys) {
		if is.port != nil {
			is.addTo(edit)
			t.ownPorts = t.ownPorts.with(is.port.Port)
		}
	}
	t.index = edit.Index()
}

// differences yields the old and new form of each service port that was compiled
// again since prev.
func (t *Table) differences(prev *Table, keys bool) iter.Seq2[*compiled, *compiled] {
	return func(yield func(*compiled, *compiled) bool) {
		for i := range max(len(prev.chunks), len(t.chunks)) {
			was, is := prev.chunk(i), t.chunk(i)
			if was == is {
				continue
			}
			for j := range is.ports {
				before, now := &was.ports[j], &is.ports[j]
				if !before.current(now.port, keys) && !yield(before, now) {
					return
				}
			}
		}
	}
}

// addTo adds the decisions of all destinations of a service port.
func (c *compiled) addTo(e *service.IndexEdit[decision]) {
	for d, kind := range c.port.Destinations {
		e.Put(d, decide(c, service.FamilyOf(d.Addr), kind))
	}
	for f := range c.families {
		if c.families[f].exists && c.port.NodePort != 0 {
			e.PutNodePort(service.Family(f), c.port.Name.Protocol, c.port.NodePort, decide(c, service.Family(f), service.NodePort))
		}
	}
}

// removeFrom removes the decisions that addTo added.
func (c *compiled) removeFrom(e *service.IndexEdit[decision]) {
	for d := range c.port.Destinations {
		e.Remove(d)
	}
	for f := range c.families {
		if c.families[f].exists && c.port.NodePort != 0 {
			e.RemoveNodePort(service.Family(f), c.port.Name.Protocol, c.port.NodePort)
		}
	}
}

// portSet is an immutable set of ports.
type portSet [1 << 16 / 64]uint64

func (n *portSet) has(port uint16) bool { return n[port/64]>>(port%64)&1 != 0 }

// with returns the set with port added.
func (n *portSet) with(port uint16) *portSet {
	if n.has(port) {
		return n
	}
	next := *n
	next[port/64] |= 1 << (port % 64)
	return &next
}
