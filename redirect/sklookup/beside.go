package sklookup

import (
	"net/netip"
	"strings"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// beside is the way of steering that does what a look-up of sockets cannot.
type beside struct {
	redirect.Redirector
	steer          part[redirect.Target]
	refuse, silent part[struct{}]
}

// traits are its own, with the program in the name: "sklookup/nftables".
func (b *beside) traits() redirect.Traits {
	t := b.Redirector.Traits()
	t.Name = Name + "/" + t.Name[strings.LastIndexByte(t.Name, '/')+1:]
	t.MaxLanes = 0
	return t
}

// changed tells when it should verify, if it notices.
func (b *beside) changed() <-chan struct{} {
	if n, ok := b.Redirector.(redirect.Notifier); ok {
		return n.Changed()
	}
	return nil
}

// apply puts in force what a plan has beside the destinations that the program
// knows.
func (b *beside) apply(p redirect.Plan) error {
	p.Steer = b.steer.of(p.Steer, p.Foreign)
	p.Refuse = b.refuse.of(p.Refuse, p.Foreign)
	p.Silent = b.silent.of(p.Silent, p.Foreign)
	p.ClusterIPs = nil
	return b.Redirector.Apply(p)
}

// part remembers what it made of a map, so that the same ones give the same
// one, which saves comparing it.
type part[V any] struct {
	whole   map[service.Destination]V
	foreign map[netip.Addr]struct{}
	made    map[service.Destination]V
}

// of gives what a map has on foreign addresses; nil if there is none of them.
func (c *part[V]) of(whole map[service.Destination]V, foreign map[netip.Addr]struct{}) map[service.Destination]V {
	if len(foreign) == 0 {
		*c = part[V]{}
		return nil
	}
	if redirect.SameMap(whole, c.whole) && redirect.SameMap(foreign, c.foreign) {
		return c.made
	}
	made := make(map[service.Destination]V)
	for d, v := range whole {
		if _, is := foreign[d.Addr]; is {
			made[d] = v
		}
	}
	*c = part[V]{whole, foreign, made}
	return made
}
