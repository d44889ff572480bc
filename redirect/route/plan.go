package route

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// WithoutMarks gives the state of a plan for ways of steering that mark no
// packets: every destination on an address that is not ours to own has a policy
// routing rule, also one that refuses or lingers, as connections to it may be
// established; replies to clients' addresses come back by their ports (F11), if
// any are given.
func WithoutMarks(p *redirect.Plan, replyPorts [2]uint16) State {
	s := State{Local: redirect.Cover(p.Local), ReplyPorts: replyPorts}
	if len(p.Foreign) == 0 {
		return s
	}
	for a := range p.Foreign {
		s.Foreign = append(s.Foreign, a)
	}
	slices.SortFunc(s.Foreign, netip.Addr.Compare)
	add := func(d service.Destination) {
		if _, is := p.Foreign[d.Addr]; is {
			s.PortRules = append(s.PortRules, d)
		}
	}
	for d := range p.Steer {
		add(d)
	}
	for _, set := range []map[service.Destination]struct{}{p.Refuse, p.Silent, p.Lingering} {
		for d := range set {
			add(d)
		}
	}
	slices.SortFunc(s.PortRules, redirect.CompareDestinations)
	s.PortRules = slices.Compact(s.PortRules)
	return s
}

// Equal tells whether two states ask for the same, in the same order.
func (s *State) Equal(o *State) bool {
	return slices.Equal(s.Local, o.Local) && slices.Equal(s.Foreign, o.Foreign) &&
		slices.Equal(s.PortRules, o.PortRules) && s.ReplyPorts == o.ReplyPorts &&
		s.MarkSteers == o.MarkSteers && s.MarkReplies == o.MarkReplies
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
	return redirect.Replies{Diverted: true, FirstPort: ports[0], LastPort: ports[1]}
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
