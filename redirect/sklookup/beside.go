package sklookup

import (
	"net/netip"
	"strings"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// beside is another mode, which does what sk_lookup cannot.
type beside struct {
	Beside
	plan redirect.Plan // the last one, whole
	side parts         // of it, on non-local addresses
	own  parts         // what is left for the program
}

// parts are what a plan says of some destinations.
type parts struct {
	steer          redirect.Builder[service.Destination, redirect.Target]
	refuse, silent redirect.Builder[service.Destination, struct{}]
}

// set has the parts say of a destination what a plan says, or nothing.
func (x *parts) set(d service.Destination, p *redirect.Plan, in bool) {
	if t, is := p.Steer.Get(d); is && in {
		x.steer.Set(d, t)
	} else {
		x.steer.Remove(d)
	}
	x.refuse.Put(d, in && p.Refuse.Has(d))
	x.silent.Put(d, in && p.Silent.Has(d))
}

// of returns a plan that says this of destinations, and else what another one says.
func (x *parts) of(p redirect.Plan) redirect.Plan {
	p.Steer, p.Refuse, p.Silent = x.steer.Map(), x.refuse.Map(), x.silent.Map()
	return p
}

// traits are its own, with the program in the name: "sklookup/nftables".
func (b *beside) traits() redirect.Traits {
	t := b.Beside.Traits()
	t.Name = Name + "/" + t.Name[strings.LastIndexByte(t.Name, '/')+1:]
	t.MaxListeners = 0
	return t
}

// split removes non-local addresses from a plan, and keeps them for apply. The
// program must not know them: netfilter runs it too when it looks for a packet's
// socket, and would take packets of connections that bypass us for our listener's.
func (b *beside) split(p *redirect.Plan) {
	c := redirect.Diff(&b.plan, p)
	if c.Rehomes(&b.plan, p) {
		b.plan, b.side, b.own = redirect.Plan{}, parts{}, parts{} // not Beside: others read it meanwhile
		c = redirect.Diff(&b.plan, p)
	}
	b.plan = *p
	for d := range c.Touched {
		foreign := p.NonLocal.Has(d.Addr)
		b.side.set(d, p, foreign)
		b.own.set(d, p, !foreign)
	}
	*p = b.own.of(*p)
	p.NonLocal, p.Lingering = redirect.Set[netip.Addr]{}, redirect.Set[service.Destination]{}
}

// apply puts the rest of the last plan in force.
func (b *beside) apply() error {
	p := b.side.of(b.plan)
	p.ClusterIPs = redirect.Set[netip.Addr]{}
	return b.Beside.Apply(p)
}
