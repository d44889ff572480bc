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
// A destination without a socket refuses, because the kernel does so; one that
// is to be silent has a socket that filters everything (F5), which is the
// listener's to make.
//
// What it cannot do: a server of the host's that listens on all addresses is
// reachable at each service's address, and keeps a service from its port (F4);
// and addresses of the service ranges that no service has refuse, where they
// should be silent (A3.12). On addresses that are not ours to own, an IPv4
// destination that is to refuse is silent, as the kernel sends no reset from an
// address that is not local; and a destination that only established
// connections still use (Plan.Lingering) does not go past us.
package bind

import (
	"errors"
	"sync"

	"github.com/sluice-proxy/sluice/redirect"
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
	mu      sync.Mutex // guards everything below
	opts    Options
	router  *route.Router
	watch   *watch.Watcher
	answers redirect.Replies // never changes
	closed  bool

	plan     redirect.Plan // in force; empty before the first Apply
	unmarked route.Unmarked
	state    route.State
	routed   bool // the routes are those of state
	touched  bool // there may be something of ours in the kernel
}

var (
	_ redirect.Redirector = (*Redirector)(nil)
	_ redirect.Notifier   = (*Redirector)(nil)
)

// ErrClosed is the error of using a Redirector after Close.
var ErrClosed = errors.New("bind: closed")

// New gets ready to steer and changes nothing in the kernel. What an earlier
// process left behind is taken over by the first Apply.
func New(opts Options) (*Redirector, error) {
	rt, err := route.Open(opts.Routes)
	if err != nil {
		return nil, err
	}
	w, err := watch.Open(watch.Options{NetNS: opts.Routes.NetNS})
	if err != nil {
		rt.Close()
		return nil, err
	}
	r := &Redirector{opts: opts, router: rt, watch: w, answers: rt.RepliesByPort(opts.ReplyPorts)}
	if !r.answers.Diverted {
		r.opts.ReplyPorts = [2]uint16{}
	}
	return r, nil
}

// Changed tells when Verify should be called; see [redirect.Notifier].
func (r *Redirector) Changed() <-chan struct{} { return r.watch.Changed() }

// Traits ask for a socket at each destination, and tell whether replies to
// clients' addresses come back.
func (r *Redirector) Traits() redirect.Traits {
	return redirect.Traits{Name: Name, BindEach: true, Replies: r.answers}
}

// Apply puts the plan's routes in force; see [redirect.Redirector]. A range in
// Plan.Local that takes in an address of this node is an error, and then
// nothing is changed. A *redirect.ClashError says that somebody else has a
// route or a rule that is in the way; the rest is in force then.
func (r *Redirector) Apply(p redirect.Plan) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return ErrClosed
	}
	changes := redirect.Diff(&r.plan, &p)
	if err := changes.Validate(&p); err != nil {
		return err
	}
	if len(changes.AddLocal) > 0 {
		if err := r.router.CheckLocal(changes.AddLocal); err != nil {
			return err
		}
	}
	state := r.unmarked.State(&p, r.replyPorts(&p))
	r.plan, r.touched = p, true
	var err error
	if r.routed {
		err = r.router.Change(&r.state, &state)
	} else {
		_, err = r.router.Apply(state)
	}
	r.state, r.routed = state, err == nil
	return err
}

// replyPorts are the ports whose packets have to be brought back.
func (r *Redirector) replyPorts(p *redirect.Plan) [2]uint16 {
	if p.NodeSourceOnly {
		return [2]uint16{}
	}
	return r.opts.ReplyPorts
}

// Verify checks the routes and rules, and puts back what is missing.
func (r *Redirector) Verify() (repaired bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false, ErrClosed
	}
	if !r.touched {
		return false, nil
	}
	repaired, err = r.router.Apply(r.state)
	r.routed = err == nil
	return repaired, err
}

// Close takes the routes and rules out of the kernel. Closing twice is the same
// as once.
func (r *Redirector) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	r.closed = true
	var err error
	if r.touched {
		_, err = r.router.Remove()
	}
	r.watch.Close()
	r.router.Close()
	return err
}

// Cleanup removes what a process that was killed left behind: its routes and
// rules. It gives a line for each thing that it removed. A running proxy's lock
// must be asked for first ([redirect.AcquireLock]): Cleanup does not look for
// one.
func Cleanup(opts Options) (removed []string, err error) {
	rt, err := route.Open(opts.Routes)
	if err != nil {
		return nil, err
	}
	defer rt.Close()
	return rt.Remove()
}
