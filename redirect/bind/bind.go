// Package bind steers by routes alone: they make the services' addresses local
// (F2), and the listener binds a socket to each destination itself
// (Traits.BindEach). It needs neither netfilter nor BPF of the kernel, so that it
// works in sandboxes.
//
// What it makes in the network namespace, and all that it ever touches, are
// routes and policy routing rules; see package route. There is no rule unless a
// plan has addresses that are not ours to own, or replies to clients' addresses
// are to come back (Options.ReplyPorts).
//
// The kernel refuses packets to a destination without a socket. The listener gives a
// destination that drops a socket that filters everything (F5).
//
// What it cannot do: a server of the host that listens on all addresses is
// reachable at each service's address, and keeps a service from its port (F4).
// Addresses of the service ranges that no service has refuse, where they should
// drop (A3.12). At non-local addresses, an IPv4 destination that should refuse
// drops, as the kernel sends no reset from an
// address that is not local; and a destination that only established
// connections still use (Plan.Lingering) does not go past us.
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

var (
	_ redirect.Redirector = (*Redirector)(nil)
	_ redirect.Notifier   = (*Redirector)(nil)
)

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

// Traits ask for a socket at each destination, and tell whether replies to
// clients' addresses come back.
func (r *Redirector) Traits() redirect.Traits {
	return redirect.Traits{Name: Name, BindEach: true, Replies: r.answers}
}

func (r *Redirector) apply(p redirect.Plan, c *redirect.Changes) error {
	state := r.unmarked.State(&r.Plan, &p, c, r.answers)
	r.Set(p)
	return r.Router.Put(state)
}
