package route

import (
	"cmp"
	"fmt"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// Unmarked gives the states of plans for ways of steering that mark no packets:
// every destination on an address that is not ours to own has a policy routing
// rule, also one that refuses or lingers, as connections to it may be
// established; replies to clients' addresses come back by their ports (F11), if
// any are given. The zero value is ready for use, and for one goroutine.
type Unmarked struct {
	plan  redirect.Plan
	rules redirect.Builder[service.Destination, struct{}]
}

// State gives the state of the next plan.
func (u *Unmarked) State(p *redirect.Plan, replyPorts [2]uint16) State {
	c := redirect.Diff(&u.plan, p)
	if c.Rehomes(&u.plan, p) {
		*u = Unmarked{}
		c = redirect.Diff(&u.plan, p)
	}
	u.plan = *p
	for d := range c.Touched {
		if p.Foreign.Has(d.Addr) && (p.Names(d) || p.Lingering.Has(d)) {
			u.rules.Set(d, struct{}{})
		} else {
			u.rules.Remove(d)
		}
	}
	return State{Local: p.Local, Foreign: p.Foreign, PortRules: u.rules.Map(), ReplyPorts: replyPorts, Sources: p.Sources}
}

// Equal tells whether two states ask for the same.
func (s *State) Equal(o *State) bool {
	return s.Local.Equal(o.Local) && s.Foreign.Equal(o.Foreign) && s.PortRules.Equal(o.PortRules) && s.ReplyPorts == o.ReplyPorts &&
		s.MarkSteers == o.MarkSteers && s.Sources == o.Sources && s.MarkReplies == o.MarkReplies
}

// RepliesByPort tells whether answers to clients' own addresses can be brought
// back by a range of ports, first and last (F11), and if not, why. Nothing of
// the node's may use them by itself. Zero ports are never brought back.
func (r *Router) RepliesByPort(ports [2]uint16) redirect.Replies {
	if ports == [2]uint16{} {
		return redirect.Replies{}
	}
	if err := r.checkPorts(ports); err != nil {
		return redirect.Replies{Why: err.Error()}
	}
	r.clients.setPorts(ports)
	return redirect.Replies{Diverted: true, FirstPort: ports[0], LastPort: ports[1], Clients: &r.clients}
}

func (r *Router) checkPorts(ports [2]uint16) error {
	return cmp.Or(
		sys.InNetNS(r.opts.NetNS, func() error {
			first, last, err := sys.LocalPortRange()
			if err == nil && ports[0] <= last && first <= ports[1] {
				err = fmt.Errorf("ports %d-%d, which are for connections with clients' own addresses, are also among those that this node gives to connections of its own (net.ipv4.ip_local_port_range is %d-%d): narrow one of the two",
					ports[0], ports[1], first, last)
			}
			return err
		}),
		r.Check(State{ReplyPorts: ports}),
	)
}
