package dns

import (
	"maps"
	"net/netip"
	"strings"

	"github.com/sluice-proxy/sluice/service"
)

// Names are the names of the Services at one moment. They never change, and are safe for
// concurrent use.
type Names struct {
	spaces  map[string]map[string]*entry // by namespace and Service
	reverse [reverseShards]map[netip.Addr][]owner
}

// reverseShards bounds what a change copies of the reverse names.
const reverseShards = 256

// entry is what has the name of a Service. It never changes.
type entry struct {
	*described
	// Of headless Services:
	hosts map[netip.Addr]*host
	ready [2][]service.Endpoint // by service.Family, sorted
}

// pick returns the ready endpoints that match.
func (e *entry) pick(match func(*service.Endpoint) bool) (found []service.Endpoint) {
	for _, list := range e.ready {
		for i := range list {
			if match(&list[i]) {
				found = append(found, list[i])
			}
		}
	}
	return found
}

// host is an endpoint of a headless Service.
type host struct {
	service.Endpoint
	name  string // the hostname; "" if the slices have none
	ports []port
}

var dashes = strings.NewReplacer(".", "-", ":", "-")

// label returns the name of an endpoint below its Service's: its hostname, or its
// address with dashes, as CoreDNS names it.
func (h *host) label() string {
	if h.name != "" {
		return h.name
	}
	return dashes.Replace(h.Addr.Addr().String())
}

// owner is who has an address: a Service, or an endpoint of it.
type owner struct {
	service.Name
	host string // "" for the Service itself
}

func (o owner) text() string { return o.Name.String() + "/" + o.host }

func newNames() *Names { return &Names{spaces: make(map[string]map[string]*entry)} }

func shard(a netip.Addr) int {
	b := a.As16()
	return int(b[15])
}

// owners returns who has an address, in order of names.
func (n *Names) owners(a netip.Addr) []owner { return n.reverse[shard(a)][a] }

// namesEdit derives Names from others, which do not change.
type namesEdit struct {
	base, next *Names
	ownSpaces  map[string]bool
	ownReverse [reverseShards]bool
}

func (n *Names) edit() *namesEdit { return &namesEdit{base: n} }

// names returns the result; without changes, the Names that the edit started with.
func (e *namesEdit) names() *Names {
	if e.next == nil {
		return e.base
	}
	return e.next
}

// set makes an entry, nil for none, that of a Service.
func (e *namesEdit) set(name service.Name, to *entry) {
	if e.next == nil {
		e.next = &Names{spaces: maps.Clone(e.base.spaces), reverse: e.base.reverse}
		e.ownSpaces = make(map[string]bool)
	}
	space := e.next.spaces[name.Namespace]
	if !e.ownSpaces[name.Namespace] {
		if space = maps.Clone(space); space == nil {
			space = make(map[string]*entry)
		}
		e.next.spaces[name.Namespace], e.ownSpaces[name.Namespace] = space, true
	}
	for a, o := range space[name.Name].reversed(name) {
		e.setOwners(a, without(e.next.owners(a), o))
	}
	if to == nil {
		if delete(space, name.Name); len(space) == 0 {
			delete(e.next.spaces, name.Namespace)
			delete(e.ownSpaces, name.Namespace)
		}
		return
	}
	space[name.Name] = to
	for a, o := range to.reversed(name) {
		e.setOwners(a, with(e.next.owners(a), o))
	}
}

// with returns a copy of a list in order of names, with another owner.
func with(list []owner, o owner) []owner {
	i := 0
	for i < len(list) && list[i].text() < o.text() {
		i++
	}
	next := make([]owner, len(list)+1)
	copy(next, list[:i])
	next[i] = o
	copy(next[i+1:], list[i:])
	return next
}

// without returns a copy of a list that lacks an owner.
func without(list []owner, o owner) []owner {
	next := make([]owner, 0, len(list))
	for _, p := range list {
		if p != o {
			next = append(next, p)
		}
	}
	return next
}

func (e *namesEdit) setOwners(a netip.Addr, list []owner) {
	i := shard(a)
	if !e.ownReverse[i] {
		if e.next.reverse[i] = maps.Clone(e.next.reverse[i]); e.next.reverse[i] == nil {
			e.next.reverse[i] = make(map[netip.Addr][]owner)
		}
		e.ownReverse[i] = true
	}
	if len(list) == 0 {
		delete(e.next.reverse[i], a)
		return
	}
	e.next.reverse[i][a] = list
}

// reversed yields the addresses that have a reverse name: cluster IPs, and ready endpoints.
// e may be nil.
func (e *entry) reversed(name service.Name) map[netip.Addr]owner {
	all := make(map[netip.Addr]owner)
	if e == nil {
		return all
	}
	for _, a := range e.clusterIPs {
		all[a] = owner{name, ""}
	}
	for _, list := range e.ready {
		for i := range list {
			a := list[i].Addr.Addr()
			all[a] = owner{name, e.hosts[a].label()}
		}
	}
	return all
}
