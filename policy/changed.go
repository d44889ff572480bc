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
