package policy

import (
	"iter"

	"github.com/sluice-proxy/sluice/service"
)

// Changed gives the numbers of the service ports whose decisions may differ
// from those of an earlier Table, those that are gone included. Where the two
// share what they were compiled to, as they do after a Compile with the one as
// the other's predecessor, it takes a moment however many there are.
func (t *Table) Changed(prev *Table) iter.Seq[service.PortID] {
	return func(yield func(service.PortID) bool) {
		same := prev.node.equal(t.node)
		for i := range max(len(t.chunks), len(prev.chunks)) {
			var old, now *chunk
			if i < len(prev.chunks) {
				old = prev.chunks[i]
			}
			if i < len(t.chunks) {
				now = t.chunks[i]
			}
			if same && old == now {
				continue
			}
			for j := range chunkSize {
				var was, is *service.Port
				if old != nil {
					was = old[j].port
				}
				if now != nil {
					is = now[j].port
				}
				switch {
				case was == nil && is == nil, same && was == is && !hasKeys(is):
				case !yield(service.PortID(i*chunkSize + j)):
					return
				}
			}
		}
	}
}
