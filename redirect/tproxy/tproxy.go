// Package tproxy steers with nftables: one table has a map from destinations to
// listener ports, filled over netlink, and routes make the Services' addresses local
// (F2, F3). It needs no programs such as nft or ip.
//
// In the network namespace it creates, and touches nothing else:
//
//   - the table `inet sluice` (Options.Table). The number of its chains and
//     rules is constant; Services are elements of its sets and map.
//   - the routes and rules of package route: a route in the kernel's table
//     local for each prefix of Plan.Local, one in the steer table for each
//     address of Plan.NonLocal, and the default route of the reply table.
//   - three bits of packet marks.
//
// A packet to a steered destination goes to the listener before connection tracking
// sees it, or to its established socket, which the kernel looks up first. The same
// applies to this node's own packets, which arrive on lo (F3). A packet to another
// destination in Plan.Local belongs to an established connection that outlived its
// service port (A8.7), or is refused or dropped.
//
// Addresses of Plan.NonLocal keep their routes (A3.13). A packet to one of their
// destinations, or of one of our connections there, gets the steer mark, which selects
// a local route. This node's own packets get the mark in the output hook, so that they
// come back on lo. All other packets pass. Connections that clients on other hosts
// opened there earlier continue.
//
// Sockets that are bound to clients' addresses receive their replies through the reply
// mark (F7): packets to a port of Options.ReplyPorts that belong to a connected
// transparent socket. Direct traffic between pods, or between the host and pods,
// belongs to no such socket. Beside a BPF program that finds sockets, the rules for
// them come with the first such socket; see [mode.Demand].
//
// Sockets on this node's own addresses that bypass connection tracking are
// transparent too, and have the socket mark. The mark identifies their packets; the
// receiving socket identifies the replies.
//
// With Options.Conntrack, connections to endpoints can be kept in connection tracking.
// Another program may then translate the addresses of their packets, and replies are
// looked for where that has been undone.
//
// TCP and UDP can be steered. SCTP passes to sockets that are bound to its destinations
// (F1).
package tproxy

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/mode"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/watch"
	"github.com/sluice-proxy/sluice/service"
)

// Options are the names and numbers of what is made in the kernel. The zero
// value has the defaults.
type Options struct {
	// Table is the name of the nftables table; "sluice" if empty.
	Table string
	// Routes are those of package route. Routes.NetNS is the network namespace to
	// work in. What sockets on the node's address send that pass connection
	// tracking has Routes.SocketMark, [route.DefaultSocketMark] if zero.
	Routes route.Options
	// Lookup says that a BPF program finds the sockets for what is in
	// Plan.Local (redirect/sklookup). The table then keeps that out of
	// connection tracking, and refuses it when the program is gone, unless the program
	// outlives the process (Redirector.Outlived). It has no more rules than the plan
	// and connection tracking need.
	Lookup bool
	// ReplyPorts, first and last, are the local ports of sockets that are bound
	// to clients' own addresses; [redirect.ReplyPorts] if zero. Only packets to
	// them are looked up among the sockets.
	ReplyPorts [2]uint16
	// NoReplies leaves clients' addresses alone: no answers to them are brought
	// back.
	NoReplies bool
	// Conntrack says whether connections to endpoints bypass connection tracking.
	Conntrack redirect.Conntrack
}

// DefaultTable is the table's name if Options has none.
const DefaultTable = "sluice"

func (o Options) withDefaults() Options {
	o.Table = cmp.Or(o.Table, DefaultTable)
	o.ReplyPorts = cmp.Or(o.ReplyPorts, redirect.ReplyPorts)
	o.Routes.SocketMark = cmp.Or(o.Routes.SocketMark, route.DefaultSocketMark)
	o.Routes = o.Routes.WithDefaults()
	return o
}

func (o Options) validate() error {
	if strings.ContainsAny(o.Table, " \t\n\"") || len(o.Table) > 100 {
		return fmt.Errorf("nftables table name %q", o.Table)
	}
	if err := redirect.CheckReplyPorts(o.ReplyPorts); err != nil {
		return err
	}
	return o.Routes.Validate()
}

// Redirector steers by nftables. Its methods are safe for concurrent use.
type Redirector struct {
	mode.Core
	opts     Options
	filter   *filter
	answers  redirect.Replies // never changes
	tracking *redirect.Tracking
	outlived atomic.Bool
	refusals refusals
}

var (
	_ redirect.Redirector = (*Redirector)(nil)
	_ redirect.Counter    = (*Redirector)(nil)
)

// New gets ready to steer and changes nothing in the kernel. A
// *redirect.MissingError says what the kernel or the process lacks, a
// *redirect.ClashError that another program has a table of the same name. What an earlier process left
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
	if err = f.probe(); err == nil {
		err = f.checkName()
	}
	var rt *route.Router
	if err == nil {
		rt, err = route.Open(opts.Routes)
	}
	if err != nil {
		f.close()
		return nil, err
	}
	r := &Redirector{opts: opts, filter: f}
	steps := mode.Steps{Steers: "the kernel's tproxy", Prepare: r.prepare, Apply: r.apply, Verify: r.verify, Remove: r.remove, Release: f.close}
	if err := r.Open(steps, rt, watch.Options{Tables: []string{opts.Table}, NetNS: opts.Routes.NetNS}); err != nil {
		return nil, err
	}
	r.tracking = redirect.NewTracking(opts.Routes.NetNS, opts.Conntrack, func() (string, error) {
		return firewall.StateRule(opts.Routes.NetNS, opts.Table)
	})
	r.look()
	if !opts.NoReplies {
		r.answers = rt.RepliesByMark(opts.ReplyPorts, r.tracking)
	}
	if opts.Lookup && r.answers.Diverted {
		r.Demand = mode.NewDemand(&r.Core, r.answers, func(p redirect.Plan) error { return r.apply(p, &redirect.Changes{}) })
		r.answers.Clients = r.Demand
	}
	return r, nil
}

// Traits tell that one listener serves many destinations, and that answers to
// clients' own addresses come back.
func (r *Redirector) Traits() redirect.Traits {
	return redirect.Traits{Name: "tproxy/nftables", Replies: r.answers}
}

// Outlived says whether the program of Options.Lookup outlives the process; at first it
// does not. The next Apply or Verify heeds it.
func (r *Redirector) Outlived(outlived bool) { r.outlived.Store(outlived) }

func (r *Redirector) prepare(p *redirect.Plan) {
	p.NodeSourceOnly = p.NodeSourceOnly || r.opts.NoReplies
}

// apply first routes non-local addresses, which affects only marked packets. Then it
// puts the plan into the table with the ranges of both plans, adds routes, removes
// routes, and then removes the ranges that are gone from the table.
func (r *Redirector) apply(p redirect.Plan, changes *redirect.Changes) error {
	before, err := r.Routed()
	if err != nil {
		return err
	}
	if len(changes.NonLocal.Add) > 0 {
		// A packet must not be taken before it has somewhere to go.
		all := p
		all.Local = before
		for _, a := range changes.NonLocal.Drop {
			all.NonLocal = all.NonLocal.With(a, struct{}{})
		}
		if err := r.Router.Put(route.Marked(&all, r.answers)); err != nil {
			// It has not: leave those addresses alone, and do the rest.
			p = withoutNonLocal(p)
			rest := redirect.Diff(&r.Plan, &p)
			return errors.Join(err, r.apply(p, &rest))
		}
	}
	both := p
	both.Local = redirect.Joined(before, p.Local)
	if err := r.fill(both); err != nil {
		return err
	}
	if err := r.Router.Put(route.Marked(&p, r.answers)); err != nil {
		return err
	}
	return r.fill(p)
}

// look finds out what rules are needed for beside the plan.
func (r *Redirector) look() {
	r.filter.tracked, r.filter.outlived = r.tracking.Look(), r.outlived.Load()
	_, r.filter.kept = r.tracking.Kept()
}

// fill makes the table that of a plan.
func (r *Redirector) fill(p redirect.Plan) error {
	r.filter.outlived = r.outlived.Load()
	if err := r.filter.apply(&r.Plan, &p); err != nil {
		return err
	}
	r.Set(p)
	return nil
}

// withoutNonLocal removes non-local addresses and their destinations from a plan.
func withoutNonLocal(p redirect.Plan) redirect.Plan {
	for d := range p.Steer.Keys() {
		if p.NonLocal.Has(d.Addr) {
			p.Steer = p.Steer.Without(d)
		}
	}
	p.NonLocal, p.Lingering = redirect.Set[netip.Addr]{}, redirect.Set[service.Destination]{}
	return p
}

// verify takes some hundred microseconds as long as nobody changed any nftables
// table since the last look.
func (r *Redirector) verify() (repaired bool, err error) {
	r.look()
	refilled, err := r.filter.verify(&r.Plan)
	if err != nil {
		return refilled, err
	}
	rerouted, err := r.Router.Apply(route.Marked(&r.Plan, r.answers))
	return refilled || rerouted, err
}

func (r *Redirector) remove() error {
	_, err := r.filter.remove()
	return err
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
	if removed, err = route.Cleanup(opts.Routes); err != nil {
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
