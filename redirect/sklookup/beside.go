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
	// What is left for the program.
	ownSteer             redirect.Builder[service.Destination, redirect.Target]
	ownRefuse, ownSilent redirect.Builder[service.Destination, struct{}]
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

// split parts a plan into what the program is to know, which is nothing of
// foreign addresses, and what is to stand beside it. Netfilter asks the program too
// when it looks for a packet's socket: it would take packets of connections that go
// past us for packets to our listener.
func (b *beside) split(p redirect.Plan) (own, side redirect.Plan) {
	b.follow(&p)
	own, side = p, p
	own.Steer, own.Refuse, own.Silent = b.ownSteer.Map(), b.ownRefuse.Map(), b.ownSilent.Map()
	own.Foreign, own.Lingering = redirect.Set[netip.Addr]{}, redirect.Set[service.Destination]{}
	side.Steer, side.Refuse, side.Silent = b.steer.Map(), b.refuse.Map(), b.silent.Map()
	side.ClusterIPs = redirect.Set[netip.Addr]{}
	return own, side
}

// follow keeps what a plan says of destinations on foreign addresses, and on
// others.
func (b *beside) follow(p *redirect.Plan) {
	c := redirect.Diff(&b.plan, p)
	if c.Rehomes(&b.plan, p) {
		*b = beside{Redirector: b.Redirector}
		c = redirect.Diff(&b.plan, p)
	}
	b.plan = *p
	for d := range c.Touched {
		foreign := p.Foreign.Has(d.Addr)
		steer, otherSteer := &b.ownSteer, &b.steer
		if foreign {
			steer, otherSteer = otherSteer, steer
		}
		otherSteer.Remove(d)
		if t, is := p.Steer.Get(d); is {
			steer.Set(d, t)
		} else {
			steer.Remove(d)
		}
		keep(&b.refuse, d, foreign && p.Refuse.Has(d))
		keep(&b.silent, d, foreign && p.Silent.Has(d))
		keep(&b.ownRefuse, d, !foreign && p.Refuse.Has(d))
		keep(&b.ownSilent, d, !foreign && p.Silent.Has(d))
	}
}

func keep(set *redirect.Builder[service.Destination, struct{}], d service.Destination, in bool) {
	if in {
		set.Set(d, struct{}{})
	} else {
		set.Remove(d)
	}
}
