package policy

import (
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// Sync brings up to date what the service ports of a protocol have, by service.PortID, from
// old, as of prev. keep returns what a new or changed port has, and gone takes what no port
// has any more.
func Sync[V comparable](t, prev *Table, p service.Protocol, old []V, keep func(*service.Port) V, gone func(V)) []V {
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
		if next[id] = none; ports[id] != nil && ports[id].Name.Protocol == p {
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
