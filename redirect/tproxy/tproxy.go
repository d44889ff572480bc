// Package tproxy steers by nftables: one table with a map from destination to
// listener port, filled over netlink, and routes that make the services'
// addresses local (facts F2, F3). No program such as nft or ip is needed.
//
// What it makes in the network namespace, and all that it ever touches:
//
//   - the table `inet sluice` (Options.Table). The number of its chains and
//     rules is constant; services are elements of its sets and map.
//   - the routes and rules of package route: a route in the kernel's table
//     local for each prefix of Plan.Local, one in the steer table for each
//     address of Plan.Foreign, and the default route of the reply table.
//   - three bits of packets' marks.
//
// A packet to a steered destination is handed to the listener before
// connection tracking sees it, or to the established socket if there is one
// (the kernel looks for that first). It does not matter whether it came in by
// an interface or from this node, whose own packets come in by lo (F3). A
// packet to another destination in Plan.Local belongs to an established
// connection that outlived its service port (A8.7), or is refused or dropped.
//
// Addresses of Plan.Foreign stay routed as they are (A3.13). A packet for one
// of their destinations, or of a connection of ours there, gets the steer mark,
// which gives it a local route; those of this node get it on their way out,
// which turns them round. All others pass. What a client that is not on this
// node had open there before, goes on too.
//
// Sockets that are bound to clients' own addresses get their answers by the
// reply mark (F7): a packet to a port of Options.ReplyPorts that belongs to a
// connected transparent socket. Whatever is sent between pods, or between the
// host and pods, directly, belongs to none.
//
// Sockets on this node's own addresses that pass connection tracking are
// transparent too, and have the socket mark: by that their packets are known, and
// the answers by the socket that they are for.
//
// TCP and UDP can be steered; SCTP can only be refused (F1).
package tproxy

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/watch"
	"github.com/sluice-proxy/sluice/service"
)

// Options are the names and numbers of what is made in the kernel. The zero
// value has the defaults.
type Options struct {
	// Table is the name of the nftables table; "sluice" if empty.
	Table string
	// NodeIPs are the addresses that connections from this node to services
	// get as their source (F8); see [route.Options].
	NodeIPs []netip.Addr
	// NetNS is a descriptor of the network namespace to work in; 0 is the one
	// that New is called in. It must stay open until Close.
	NetNS int
	// SteerMark, ReplyMark, SteerTable and ReplyTable are those of
	// [route.Options].
	SteerMark, ReplyMark   uint32
	SteerTable, ReplyTable int
	// SocketMark is that of sockets on the node's address that pass connection
	// tracking; [route.DefaultSocketMark] if zero.
	SocketMark uint32
	// Lookup says that a BPF program finds the sockets for what is in
	// Plan.Local (redirect/sklookup). The table then keeps that out of
	// connection tracking, and refuses it when the program is gone.
	Lookup bool
	// ReplyPorts, first and last, are the local ports of sockets that are bound
	// to clients' own addresses; [redirect.ReplyPorts] if zero. Only packets to
	// them are looked up among the sockets.
	ReplyPorts [2]uint16
	// NoReplies leaves clients' addresses alone: no answers to them are brought
	// back.
	NoReplies bool
}

// DefaultTable is the table's name if Options has none.
const DefaultTable = "sluice"

func (o Options) withDefaults() Options {
	if o.Table == "" {
		o.Table = DefaultTable
	}
	r := o.routing()
	o.SteerMark, o.ReplyMark, o.SteerTable, o.ReplyTable = r.SteerMark, r.ReplyMark, r.SteerTable, r.ReplyTable
	o.SocketMark = r.SocketMark
	if o.ReplyPorts == [2]uint16{} {
		o.ReplyPorts = redirect.ReplyPorts
	}
	return o
}

func (o Options) validate() error {
	if strings.ContainsAny(o.Table, " \t\n\"") || len(o.Table) > 100 {
		return fmt.Errorf("nftables table name %q", o.Table)
	}
	if err := redirect.CheckReplyPorts(o.ReplyPorts); err != nil {
		return err
	}
	return o.routing().Validate()
}

// routing are the options of the routes.
func (o Options) routing() route.Options {
	return route.Options{
		NodeIPs: o.NodeIPs, NetNS: o.NetNS,
		SteerMark: o.SteerMark, ReplyMark: o.ReplyMark,
		SocketMark: cmp.Or(o.SocketMark, route.DefaultSocketMark),
		SteerTable: o.SteerTable, ReplyTable: o.ReplyTable,
	}.WithDefaults()
}

// Redirector steers by nftables. Its methods are safe for concurrent use.
type Redirector struct {
	mu     sync.Mutex // guards everything below
	opts   Options
	filter *filter
	router *route.Router
	watch  *watch.Watcher  // has a guard of its own
	traits redirect.Traits // never changes
	// tracking is in use from the moment on that Verify notices it.
	tracking *redirect.Tracking
	strict   bool // sources are looked up with marks; see route.SourceChecks
	closed   bool

	plan    redirect.Plan // in force; empty before the first Apply
	replies bool          // answers to clients' addresses have routes
	sources redirect.Sources
	touched bool // there may be something of ours in the kernel
	applied bool // the table is that of the plan
	state   route.State
	routed  bool // the routes are those of state
}

var (
	_ redirect.Redirector = (*Redirector)(nil)
	_ redirect.Notifier   = (*Redirector)(nil)
)

// ErrClosed is the error of using a Redirector after Close.
var ErrClosed = errors.New("tproxy: closed")

// New gets ready to steer and changes nothing in the kernel. It tells what the
// kernel or the process lacks by a *redirect.MissingError, and that somebody else
// has a table of the same name by a *redirect.ClashError. What an earlier process left
// behind is taken over by the first Apply.
func New(opts Options) (*Redirector, error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return nil, err
	}
	f, err := openFilter(opts)
	if err != nil {
		return nil, err
	}
	err = f.probe()
	if err == nil {
		err = f.checkName()
	}
	if err != nil {
		f.close()
		return nil, err
	}
	r := &Redirector{opts: opts, filter: f}
	if err := r.open(); err != nil {
		r.release()
		return nil, err
	}
	return r, nil
}

// open opens what is beside the table.
func (r *Redirector) open() (err error) {
	opts := r.opts
	if r.router, err = route.Open(opts.routing()); err != nil {
		return err
	}
	checks, err := route.SourceChecks(opts.NetNS)
	if err != nil {
		return err
	}
	r.strict = len(checks) > 0
	if r.watch, err = watch.Open(watch.Options{Tables: []string{opts.Table}, NetNS: opts.NetNS}); err != nil {
		return err
	}
	r.tracking = redirect.NewTracking(opts.NetNS)
	r.tracking.Look()
	r.traits = redirect.Traits{Name: "tproxy/nftables"}
	if !opts.NoReplies {
		r.traits.Replies = r.replyTraits()
	}
	return nil
}

// replyTraits tell which sockets of ours get answers, and why others do not.
func (r *Redirector) replyTraits() redirect.Replies {
	if err := r.router.Check(route.State{MarkReplies: true}); err != nil {
		return redirect.Replies{Why: err.Error()}
	}
	replies := redirect.Replies{Diverted: true, FirstPort: r.opts.ReplyPorts[0], LastPort: r.opts.ReplyPorts[1]}
	if err := r.router.CheckSockets(); err != nil {
		replies.WhyTracked = err.Error()
		return replies
	}
	replies.Untracked, replies.Mark, replies.Tracking = true, r.opts.SocketMark, r.tracking
	return replies
}

// release gives the sockets back.
func (r *Redirector) release() {
	if r.watch != nil {
		r.watch.Close()
	}
	if r.router != nil {
		r.router.Close()
	}
	r.filter.close()
}

// Changed tells when Verify should be called; see [redirect.Notifier].
func (r *Redirector) Changed() <-chan struct{} { return r.watch.Changed() }

// Traits tell that one listener serves many destinations, and that answers to
// clients' own addresses come back.
func (r *Redirector) Traits() redirect.Traits { return r.traits }

// Apply puts the plan in force; see [redirect.Redirector]. An SCTP destination
// in Plan.Steer is an error (F1), as is a range in Plan.Local that takes in an
// address of this node; then nothing is changed. A *redirect.ClashError says that
// somebody else has a route for the same range, or uses a mark or table of
// ours; what that is needed for is left alone, and the rest is in force.
//
// The order of the steps keeps every destination in good hands: foreign
// addresses get their routes, which nothing uses before it is marked; the table
// learns what is new and keeps the ranges of both plans; then routes are added,
// then removed; then the table forgets the ranges that are gone.
func (r *Redirector) Apply(p redirect.Plan) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return ErrClosed
	}
	p.NodeSourceOnly = p.NodeSourceOnly || r.opts.NoReplies
	changes := redirect.Diff(&r.plan, &p)
	if err := validate(&changes, &p); err != nil {
		return err
	}
	return r.applyLocked(p, changes)
}

// validate adds the limits of this mode to those of any plan.
func validate(c *redirect.Changes, p *redirect.Plan) error {
	if err := c.Validate(p); err != nil {
		return err
	}
	for _, s := range c.Steer {
		if s.Destination.Protocol == service.SCTP {
			return fmt.Errorf("steer %s: the kernel's tproxy carries TCP and UDP only", redirect.Format(s.Destination))
		}
	}
	return nil
}

func (r *Redirector) applyLocked(p redirect.Plan, changes redirect.Changes) error {
	before, after := r.plan.Local, p.Local
	if !r.applied {
		// What a killed process left routed is not to leak before its route goes.
		left, err := r.router.LocalRoutes()
		if err != nil {
			return err
		}
		before = redirect.LocalOf(left...)
	}
	both, add, drop := redirect.Joined(before, after)
	if len(changes.AddLocal) > 0 {
		if err := r.router.CheckLocal(changes.AddLocal); err != nil {
			return err
		}
	}
	r.replies, r.sources = !p.NodeSourceOnly, p.Sources
	r.touched = true
	if len(changes.AddForeign) > 0 {
		// A packet must not be taken before it has somewhere to go.
		all := p.Foreign
		for _, a := range changes.DropForeign {
			all = all.With(a, struct{}{})
		}
		if err := r.routeLocked(r.routes(before, all)); err != nil {
			// It has not: leave those addresses alone, and do the rest.
			p = withoutForeign(p)
			return errors.Join(err, r.applyLocked(p, redirect.Diff(&r.plan, &p)))
		}
	}
	changes.AddLocal, changes.DropLocal = add, drop
	p.Local = both
	if err := r.filter.apply(&changes, &r.plan, &p); err != nil {
		return err
	}
	r.plan, r.applied = p, true
	if err := r.routeLocked(r.routes(after, p.Foreign)); err != nil {
		return err
	}
	p.Local = after
	changes = redirect.Diff(&r.plan, &p)
	if err := r.filter.apply(&changes, &r.plan, &p); err != nil {
		return err
	}
	r.plan = p
	return nil
}

// routeLocked makes the routes those of a state.
func (r *Redirector) routeLocked(s route.State) (err error) {
	if r.routed {
		err = r.router.Change(&r.state, &s)
	} else {
		_, err = r.router.Apply(s)
	}
	r.state, r.routed = s, err == nil
	return err
}

// withoutForeign leaves out what is on addresses that are not ours.
func withoutForeign(p redirect.Plan) redirect.Plan {
	for d := range p.Steer.Keys() {
		if p.Foreign.Has(d.Addr) {
			p.Steer = p.Steer.Without(d)
		}
	}
	p.Foreign, p.Lingering = redirect.Set[netip.Addr]{}, redirect.Set[service.Destination]{}
	return p
}

// routes are what the table of nftables rests on.
func (r *Redirector) routes(local redirect.Set[netip.Prefix], foreign redirect.Set[netip.Addr]) route.State {
	s := route.State{Local: local, Foreign: foreign, Sources: r.sources, MarkSteers: foreign.Len() > 0, MarkReplies: r.replies && r.traits.Replies.Diverted}
	if r.strict && s.MarkReplies {
		s.ReplyPorts = r.opts.ReplyPorts
	}
	return s
}

// Verify checks the table and the routes, and puts back what is
// missing; established connections live through it. As long as nobody changed
// any nftables table since the last look, it takes some hundred microseconds.
func (r *Redirector) Verify() (repaired bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false, ErrClosed
	}
	if !r.applied {
		return false, nil
	}
	r.tracking.Look()
	refilled, err := r.filter.verify(&r.plan)
	if err != nil {
		return refilled, err
	}
	if !r.strict {
		if r.strict, err = route.AllSourcesChecked(r.opts.NetNS); err != nil {
			return refilled, err
		}
	}
	r.state = r.routes(r.plan.Local, r.plan.Foreign)
	rerouted, err := r.router.Apply(r.state)
	r.routed = err == nil
	return refilled || rerouted, err
}

// Close takes everything of ours out of the kernel, the routes first, and
// gives the sockets back. Closing twice is the same as once.
func (r *Redirector) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	r.closed = true
	var errs []error
	if r.touched {
		_, err := r.router.Remove()
		errs = append(errs, err)
		_, err = r.filter.remove()
		errs = append(errs, err)
	}
	r.release()
	return errors.Join(errs...)
}

// Cleanup removes what a process that was killed left behind: everything that
// carries the names and numbers of opts. It gives a line for each thing that it
// removed. A running proxy's lock must be asked for first
// ([redirect.AcquireLock]): Cleanup does not look for one.
func Cleanup(opts Options) (removed []string, err error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return nil, err
	}
	rt, err := route.Open(opts.routing())
	if err != nil {
		return nil, err
	}
	defer rt.Close()
	removed, err = rt.Remove()
	if err != nil {
		return removed, err
	}
	f, err := openFilter(opts)
	if err != nil {
		// Where there is no nf_tables, there is no table of ours.
		if missing := new(redirect.MissingError); errors.As(err, &missing) && missing.Feature == FeatureNFTables {
			return removed, nil
		}
		return removed, err
	}
	defer f.close()
	had, err := f.remove()
	if had {
		removed = append(removed, "table inet "+opts.Table)
	}
	return removed, err
}
