package route

import (
	"net/netip"
	"slices"

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
