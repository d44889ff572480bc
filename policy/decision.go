package policy

import (
	"iter"
	"net/netip"

	"github.com/sluice-proxy/sluice/service"
)

// decision is what is decided of a destination before a client is known. In a
// big cluster, what a connection's verdict needs is in no cache of the
// processor, and each piece of memory that leads to another costs as much as
// all the rest of Resolve. So a decision lies in the index itself, and together
// with its key it is one cache line long.
type decision struct {
	// candidates are by the traffic policy of the kind, for clients that do not
	// pass it by (A3.6).
	candidates []service.Endpoint
	id         service.PortID
	kind       service.AddressKind
	traits     traits
	// few counts the source ranges in room.
	few  uint8
	room [3]span4
}

// traits are what else is decided of a destination.
type traits uint8

const (
	usable  traits = 1 << iota // some endpoint anywhere could serve (A2.6)
	local                      // the traffic policy is Local (A2.2)
	limited                    // there are source ranges (A3.10)
	// more says that room does not tell of all that the source ranges let in.
	more
)

func (d *decision) is(t traits) bool { return d.traits&t != 0 }

// decide makes the decision about the destinations of a kind and family that
// lead to a service port.
func decide(c *compiled, fam service.Family, kind service.AddressKind) decision {
	f := &c.families[fam]
	d := decision{id: c.port.ID, kind: kind, candidates: f.cluster}
	if c.usable[fam] {
		d.traits |= usable
	}
	if kind == service.ClusterIP && c.internalLocal || kind != service.ClusterIP && c.externalLocal {
		d.traits |= local
		d.candidates = f.local
	}
	if w := f.firewall; w != nil && kind == service.LoadBalancer {
		d.traits |= limited
		d.few = uint8(copy(d.room[:], w.guests.four))
		if len(w.guests.four) > len(d.room) || len(w.guests.six) > 0 || w.fromNode {
			d.traits |= more
		}
	}
	return d
}

// welcomes tells whether room lets a client in.
func (d *decision) welcomes(client netip.Addr) bool {
	if d.few == 0 || !client.Is4() {
		return false
	}
	n := number(client)
	for _, s := range d.room[:d.few] {
		if s.first <= n && n <= s.last {
			return true
		}
	}
	return false
}

// reindex makes index and numbers of those of prev, which must have been
// compiled for the same node, and of what changed since. With keys, ports that
// have topology keys did. prev may be nil.
func (t *Table) reindex(prev *Table, keys bool) {
	if prev == nil {
		prev = &Table{index: &service.Index[decision]{}, numbers: &numbers{}}
	}
	t.numbers = prev.numbers
	edit := service.EditIndex(prev.index)
	// All that was goes first, as an address may go from one port to another.
	for was, is := range t.differences(prev, keys) {
		if was.port != nil && was.port != is.port {
			was.leave(edit)
		}
	}
	for _, is := range t.differences(prev, keys) {
		if is.port != nil {
			is.enter(edit)
			t.numbers = t.numbers.with(is.port.Port)
		}
	}
	t.index = edit.Index()
}

// differences gives the service ports that were compiled anew since prev, as
// they were and as they are.
func (t *Table) differences(prev *Table, keys bool) iter.Seq2[*compiled, *compiled] {
	return func(yield func(*compiled, *compiled) bool) {
		for i := range max(len(prev.chunks), len(t.chunks)) {
			was, is := prev.chunk(i), t.chunk(i)
			if was == is {
				continue
			}
			for j := range is.ports {
				before, now := &was.ports[j], &is.ports[j]
				if !before.serves(now.port, keys) && !yield(before, now) {
					return
				}
			}
		}
	}
}

// enter puts in what is decided of all that leads to a service port.
func (c *compiled) enter(e *service.IndexEdit[decision]) {
	for d, kind := range c.port.Destinations {
		e.Put(d, decide(c, service.FamilyOf(d.Addr), kind))
	}
	for f, exists := range c.exists {
		if exists && c.port.NodePort != 0 {
			e.PutNodePort(service.Family(f), c.port.Name.Protocol, c.port.NodePort, decide(c, service.Family(f), service.NodePort))
		}
	}
}

// leave takes out what enter put in.
func (c *compiled) leave(e *service.IndexEdit[decision]) {
	for d := range c.port.Destinations {
		e.Remove(d)
	}
	for f, exists := range c.exists {
		if exists && c.port.NodePort != 0 {
			e.RemoveNodePort(service.Family(f), c.port.Name.Protocol, c.port.NodePort)
		}
	}
}

// numbers is a set of ports. It never changes.
type numbers [1 << 16 / 64]uint64

func (n *numbers) has(port uint16) bool { return n[port/64]>>(port%64)&1 != 0 }

// with gives the set with one more in it.
func (n *numbers) with(port uint16) *numbers {
	if n.has(port) {
		return n
	}
	next := *n
	next[port/64] |= 1 << (port % 64)
	return &next
}
