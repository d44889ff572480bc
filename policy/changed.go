package policy

import (
	"iter"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Changed yields the IDs of the service ports whose Destinations, Steering or
// Admission may differ between prev and t, including removed ones. If t was
// compiled with prev as its predecessor, Changed skips the chunks that both share,
// so its cost depends on the changes rather than on the number of ports.
func (t *Table) Changed(prev *Table) iter.Seq[service.PortID] {
	same := prev.node.compilesAs(t.node)
	bypass := true // the same clients bypass policy Local
	for f := range t.node.self {
		was, is := prev.node, t.node
		same = same && slices.Equal(was.portList[f], is.portList[f]) && slices.Equal(was.self[f].list, is.self[f].list)
		bypass = bypass && slices.Equal(was.bypass[f], is.bypass[f])
	}
	unchanged := func(p *service.Port) bool {
		return same && !hasKeys(p) && (bypass || !p.ExternalLocal)
	}
	return func(yield func(service.PortID) bool) {
		for i := range max(len(t.chunks), len(prev.chunks)) {
			old, now := prev.chunk(i), t.chunk(i)
			if same && bypass && old == now {
				continue
			}
			for j := range chunkSize {
				was, is := old.ports[j].port, now.ports[j].port
				if was == is && (is == nil || unchanged(is)) {
					continue
				}
				if !yield(service.PortID(i*chunkSize + j)) {
					return
				}
			}
		}
	}
}

// chunk returns the i-th chunk, or an empty one.
func (t *Table) chunk(i int) *chunk {
	if i < len(t.chunks) && t.chunks[i] != nil {
		return t.chunks[i]
	}
	return &noPorts
}

var noPorts chunk

// Sync brings up to date what the service ports of some protocols have, by service.PortID, from
// old, as of prev. keep returns what a new or changed port has, and gone takes what no port
// has any more.
func Sync[V comparable](t, prev *Table, protocols []service.Protocol, old []V, keep func(*service.Port) V, gone func(V)) []V {
	var none V
	ids := slices.Collect(t.Changed(prev))
	ports := t.snap.Ports
	next := make([]V, len(ports))
	copy(next, old)
	kept := make(map[V]struct{}, len(ids))
	for _, id := range ids {
		if int(id) >= len(ports) {
			continue
		}
		if next[id] = none; ports[id] != nil && slices.Contains(protocols, ports[id].Name.Protocol) {
			next[id] = keep(ports[id])
			kept[next[id]] = struct{}{}
		}
	}
	for _, id := range ids {
		if int(id) >= len(old) || old[id] == none {
			continue
		}
		if _, is := kept[old[id]]; !is {
			gone(old[id])
		}
	}
	return next
}
