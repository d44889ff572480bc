// Package bind steers with routes alone: they make the Services' addresses local
// (F2), and the listener binds a socket to each destination (Traits.BindEach). The
// kernel needs neither netfilter nor BPF, so it works in sandboxes.
//
// In the network namespace it creates routes and policy routing rules, and touches
// nothing else; see package route. There are rules only if a plan has non-local
// addresses, or if replies to clients' addresses must come back
// (Options.ReplyPorts).
//
// The kernel refuses packets to a destination without a socket. The listener binds a
// socket that filters all packets (F5) to a destination that drops.
//
// Limitations: a server of the host that listens on all addresses is reachable at
// each Service's address, and prevents a Service from using its port (F4). Unused
// addresses of the service ranges refuse instead of dropping (A3.12). At non-local
// addresses, an IPv4 destination that should refuse drops, because the kernel sends no
// reset from an address that is not local; and a destination that only established
// connections still use (Plan.Lingering) is still delivered to this node.
package bind

import (
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/mode"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/watch"
)

// Name is what Traits say.
const Name = "bind"

// Options are the numbers of what is made in the kernel. The zero value has the
// defaults.
type Options struct {
	// Routes are those of package route.
	Routes route.Options
	// ReplyPorts, first and last, are the ports of sockets that are bound to
	// clients' addresses (F11): answers to them are brought back by a policy
	// routing rule. Zero: answers are not brought back.
	ReplyPorts [2]uint16
}

// Redirector steers by routes. Its methods are safe for concurrent use.
type Redirector struct {
	mode.Core
	answers  redirect.Replies // never changes
	unmarked route.Unmarked
}

var _ redirect.Redirector = (*Redirector)(nil)

// New gets ready to steer and changes nothing in the kernel. What an earlier
// process left behind is taken over by the first Apply.
func New(opts Options) (*Redirector, error) {
	rt, err := route.Open(opts.Routes)
	if err != nil {
		return nil, err
	}
	r := &Redirector{answers: rt.RepliesByPort(opts.ReplyPorts)}
	if err := r.Open(mode.Steps{Apply: r.apply, Verify: rt.Verify}, rt, watch.Options{NetNS: opts.Routes.NetNS}); err != nil {
		return nil, err
	}
	return r, nil
}

// Traits ask for a socket at each destination, and report whether replies to
// clients' addresses come back.
func (r *Redirector) Traits() redirect.Traits {
	return redirect.Traits{Name: Name, BindEach: true, Replies: r.answers}
}

func (r *Redirector) apply(p redirect.Plan, c *redirect.Changes) error {
	state := r.unmarked.State(&r.Plan, &p, c, r.answers)
	r.Set(p)
	return r.Router.Put(state)
}
