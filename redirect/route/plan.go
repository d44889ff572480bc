package route

import (
	"cmp"
	"fmt"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// Unmarked gives the states of plans for modes that mark no packets: every
// destination on an address that is not ours to own has a policy routing rule, also
// one that refuses or lingers, as connections to it may be established; replies to
// clients' addresses come back by their ports (F11), if the mode brings them back
// at all. The zero value is ready for use, and for one goroutine.
type Unmarked struct {
	rules redirect.Builder[service.Destination, struct{}]
}

// State returns the state of a plan that follows another one.
func (u *Unmarked) State(from, to *redirect.Plan, c *redirect.Changes, answers redirect.Replies) State {
	if c.Rehomes(from, to) {
		*u = Unmarked{}
		all := redirect.Whole(to)
		c = &all
	}
	for d := range c.Touched {
		u.rules.Put(d, to.NonLocal.Has(d.Addr) && (to.Names(d) || to.Lingering.Has(d)))
	}
	s := State{Local: to.Local, NonLocal: to.NonLocal, PortRules: u.rules.Map(), Sources: to.Sources}
	if answers.Diverted && !to.NodeSourceOnly {
		s.ReplyPorts = [2]uint16{answers.FirstPort, answers.LastPort}
	}
	return s
}

// Marked returns the state of a plan for modes that mark packets.
func Marked(p *redirect.Plan, answers redirect.Replies) State {
	s := State{Local: p.Local, NonLocal: p.NonLocal, Sources: p.Sources, MarkSteers: p.NonLocal.Len() > 0}
	if answers.Diverted && !p.NodeSourceOnly {
		s.MarkReplies, s.ReplyPorts = true, [2]uint16{answers.FirstPort, answers.LastPort}
	}
	return s
}

// RepliesByMark reports whether answers to clients' own addresses, which are looked
// for among packets to a range of ports, can be brought back by their mark (F7),
// and whether sockets on the node's address can pass connection tracking by theirs.
// If not, it says why.
func (r *Router) RepliesByMark(ports [2]uint16, tracking *redirect.Tracking) redirect.Replies {
	if err := r.Check(State{MarkReplies: true, ReplyPorts: ports}); err != nil {
		return redirect.Replies{Why: err.Error()}
	}
	replies := redirect.Replies{Diverted: true, FirstPort: ports[0], LastPort: ports[1], Tracking: tracking}
	if err := r.CheckSockets(); err != nil {
		replies.WhyTracked = err.Error()
		return replies
	}
	replies.Untracked, replies.Mark = true, r.opts.SocketMark
	return replies
}

// Equal reports whether two states ask for the same.
func (s *State) Equal(o *State) bool {
	return s.Local.Equal(o.Local) && s.NonLocal.Equal(o.NonLocal) && s.PortRules.Equal(o.PortRules) && s.ReplyPorts == o.ReplyPorts &&
		s.MarkSteers == o.MarkSteers && s.Sources == o.Sources && s.MarkReplies == o.MarkReplies
}

// RepliesByPort reports whether answers to clients' own addresses can be brought
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
