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
	plan           redirect.Plan // the last one, whole
	steer          redirect.Builder[service.Destination, redirect.Target]
	refuse, silent redirect.Builder[service.Destination, struct{}]
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
	b.follow(&p)
	p.Steer, p.Refuse, p.Silent = b.steer.Map(), b.refuse.Map(), b.silent.Map()
	p.ClusterIPs = redirect.Set[netip.Addr]{}
	return b.Redirector.Apply(p)
}

// follow keeps what a plan says of destinations on foreign addresses.
func (b *beside) follow(p *redirect.Plan) {
	c := redirect.Diff(&b.plan, p)
	if c.Rehomes(&b.plan, p) {
		*b = beside{Redirector: b.Redirector}
		c = redirect.Diff(&b.plan, p)
	}
	b.plan = *p
	for d := range c.Touched {
		foreign := p.Foreign.Has(d.Addr)
		if t, is := p.Steer.Get(d); is && foreign {
			b.steer.Set(d, t)
		} else {
			b.steer.Remove(d)
		}
		keep(&b.refuse, d, foreign && p.Refuse.Has(d))
		keep(&b.silent, d, foreign && p.Silent.Has(d))
	}
}

func keep(set *redirect.Builder[service.Destination, struct{}], d service.Destination, in bool) {
	if in {
		set.Set(d, struct{}{})
	} else {
		set.Remove(d)
	}
}
