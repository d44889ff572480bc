// Package iptables steers by iptables: TPROXY rules that look into ipsets, and
// routes that make the services' addresses local (facts F1, F2, F3). It is for
// kernels without nf_tables, and for nodes whose every rule has to be in
// iptables. It works with the legacy programs and with those that speak to
// nf_tables (iptables-nft), for IPv4 and IPv6.
//
// What it makes in the network namespace, and all that it ever touches:
//
//   - chains SLUICE-… (Options.Name) in the tables raw, mangle and filter, and
//     one rule at the head of each built-in chain that is needed, which leads
//     there.
//   - ipsets sluice-…, where the kernel and the node have ipset.
//   - routes and policy rules, by package redirect/route.
//
// Rules are written as one text for each family and given to one
// iptables-restore. With ipset, their number depends on nothing but the number
// of listeners ([maxLanes] at most), and a change of the plan is one ipset
// restore with what changes, unless a list appears that no rule is about. Without
// ipset there is a rule for each destination: packets to services' addresses then
// pass them one after the other, and each change writes all of them anew, so that
// some hundred services are its limit.
//
// The programs are called as programs: libraries for iptables, such as
// coreos/go-iptables, call the same programs, once for each rule.
//
// A packet to a steered destination is kept from connection tracking in the
// table raw, handed to its listener in the table mangle, and passes the table
// filter, where what is addressed to services but nobody's is refused or
// dropped: iptables rejects nowhere earlier.
package iptables

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/service"
)

// Options are the names and numbers of what is made in the kernel. The zero
// value has the defaults.
type Options struct {
	// Name begins the names of all chains (in capitals) and ipsets; "sluice"
	// if empty, at most 12 letters, digits and underscores. A hyphen counts as
	// an underscore: it separates names from what follows.
	Name string
	// Route are the addresses, marks and tables of routing, and the network
	// namespace to work in. What sockets on the node's address send that pass
	// connection tracking has Route.SocketMark, [route.DefaultSocketMark] if zero.
	Route route.Options
	// Variant is the kind of iptables programs to use; if empty, the first of
	// those that the node has that works, the default of the node first.
	Variant Variant
	// ReplyPorts, first and last, are the local ports of sockets that are bound
	// to clients' addresses; [redirect.ReplyPorts] if zero. Only packets to
	// them are looked up among the sockets.
	ReplyPorts [2]uint16
	// NoReplies leaves out what brings answers to clients' own addresses back:
	// no socket is bound to them.
	NoReplies bool
	// NoSets does without ipset, as if the node had none.
	NoSets bool

	nodePorts [2]uint16 // see redirect.NodePorts
}

// Name is this way of steering's; the log says the variant too.
const Name = "tproxy/iptables"

// DefaultName is the name if Options has none.
const DefaultName = "sluice"

// maxLanes is what Traits ask for: with ipset, every packet that opens a
// connection to a service meets one look-up for each listener and protocol.
const maxLanes = 16

func (o Options) withDefaults() Options {
	if o.Name == "" {
		o.Name = DefaultName
	}
	o.Name = strings.ReplaceAll(o.Name, "-", "_")
	if o.ReplyPorts == [2]uint16{} {
		o.ReplyPorts = redirect.ReplyPorts
	}
	o.Route.SocketMark = cmp.Or(o.Route.SocketMark, route.DefaultSocketMark)
	o.nodePorts = redirect.NodePorts(o.Route.NetNS)
	return o
}

func (o Options) validate() error {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
	if len(o.Name) > 12 || strings.Trim(o.Name, letters) != "" {
		return fmt.Errorf("name of chains and ipsets %q: at most 12 letters, digits and underscores are possible", o.Name)
	}
	if !slices.Contains([]Variant{"", NFT, Legacy}, o.Variant) {
		return fmt.Errorf("iptables variant %q: there are %s and %s", o.Variant, NFT, Legacy)
	}
	return redirect.CheckReplyPorts(o.ReplyPorts)
}

// Redirector steers by iptables. Its methods are safe for concurrent use.
type Redirector struct {
	mu      sync.Mutex // guards everything below
	opts    Options
	tools   *tools
	tables  [versions]*tables // nil for a family that the kernel does not have
	sets    *sets             // nil without ipset
	router  *route.Router
	watcher *watcher // nil where nothing is steered, but cleaned up
	traits  redirect.Traits
	closed  bool

	tracking *redirect.Tracking

	plan    redirect.Plan // in force
	ruled   *contents     // the lists that the rules are about; nil if that is not known
	state   route.State
	routed  bool // the routes are those of state
	touched bool // there may be something of ours in the kernel
	applied bool // a plan was applied
}

var _ redirect.Redirector = (*Redirector)(nil)

// ErrClosed is the error of using a Redirector after Close.
var ErrClosed = errors.New("iptables: closed")

// New gets ready to steer and changes nothing in the kernel but in a scratch
// network namespace, where it tries what it needs. What is missing is told by a
// *MissingError. What an earlier process left behind is taken over by the first
// Apply.
func New(opts Options) (*Redirector, error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return nil, err
	}
	opts.Route = opts.Route.WithDefaults()
	ns, err := openNamespace(opts.Route.NetNS)
	if err != nil {
		return nil, err
	}
	t, err := choose(ns, opts)
	if err != nil {
		ns.close()
		return nil, err
	}
	opts.Variant = t.variant
	opts.Route.NetNS = ns.fd()
	router, err := route.Open(opts.Route)
	if err != nil {
		ns.close()
		return nil, err
	}
	r := newRedirector(opts, t, router)
	if r.watcher, err = openWatcher(t); err != nil {
		router.Close()
		ns.close()
		return nil, err
	}
	r.setTraits()
	return r, nil
}

func newRedirector(opts Options, t *tools, router *route.Router) *Redirector {
	r := &Redirector{opts: opts, tools: t, router: router, tracking: redirect.NewTracking(opts.Route.NetNS)}
	for v := range versions {
		if t.ns.hasFamily(v) {
			r.tables[v] = &tables{tools: t, v: v, name: opts.Name, opts: opts}
		}
	}
	if t.ipset != "" {
		r.sets = newSets(t, opts.Name)
	}
	return r
}

// setTraits tells that one listener serves many destinations, how many listeners
// there may be, and that answers to clients' own addresses come back. On the way
// out rules cannot ask for the socket of a packet, so that those on the node's
// address have a mark, unless it would lead their packets astray.
func (r *Redirector) setTraits() {
	r.traits.Name = Name + "-" + string(r.opts.Variant)
	if r.sets != nil {
		r.traits.MaxLanes = maxLanes
	}
	if r.opts.NoReplies {
		return
	}
	r.traits.Replies = redirect.Replies{Diverted: true, FirstPort: r.opts.ReplyPorts[0], LastPort: r.opts.ReplyPorts[1]}
	if err := r.router.CheckSockets(); err != nil {
		r.traits.Replies.WhyTracked = err.Error()
		return
	}
	r.traits.PastMark = r.opts.Route.SocketMark
	r.traits.Replies.Untracked, r.traits.Replies.Mark, r.traits.Replies.Tracking = true, r.opts.Route.SocketMark, r.tracking
	r.tracking.Look()
}

// Traits tell what can be done with it.
func (r *Redirector) Traits() redirect.Traits { return r.traits }

// Apply puts the plan in force; see [redirect.Redirector]. An SCTP destination
// in Plan.Steer is an error (F1); then nothing is changed.
//
// The order of the steps keeps every destination in good hands: sets and rules
// first learn what is new and keep the ranges of both plans; then routes
// change; then what is gone is forgotten. A destination that is in two sets for
// a moment is refused or silent at once, and steered only when it is neither.
func (r *Redirector) Apply(p redirect.Plan) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return ErrClosed
	}
	changes := redirect.Diff(&r.plan, &p)
	if err := validate(&changes, &p); err != nil {
		return err
	}
	r.touched = true
	return r.applyLocked(&p)
}

// validate adds the limits of this mode to those of any plan.
func validate(c *redirect.Changes, p *redirect.Plan) error {
	if err := c.Validate(p); err != nil {
		return err
	}
	for _, s := range c.Steer {
		if s.Destination.Protocol == service.SCTP {
			return fmt.Errorf("steer %s: the kernel's TPROXY carries TCP and UDP only", redirect.Format(s.Destination))
		}
	}
	return nil
}

// applyLocked puts first the ranges of both plans in force, and those that a
// process left that was killed: they are guarded for as long as they are routed.
func (r *Redirector) applyLocked(p *redirect.Plan) error {
	before := r.plan.Local
	if !r.applied {
		left, err := r.router.LocalRoutes()
		if err != nil {
			return err
		}
		before = redirect.LocalOf(left...)
	}
	if !before.Equal(p.Local) {
		if err := r.router.CheckLocal(redirect.Ranges(p.Local)); err != nil {
			return err
		}
	}
	both := *p
	both.Local, _, _ = redirect.Joined(before, p.Local)
	next := r.routing(p)
	still := both.Local.Equal(p.Local) && r.routed && r.state.Equal(&next)
	drop, err := r.putLocked(&both, still)
	if err != nil {
		r.forgetLocked()
		return err
	}
	r.plan, r.applied = both, true
	routes := r.routeLocked(next)
	if routes != nil {
		p = &both // ranges that may be routed yet are guarded
	}
	if err := r.dropLocked(drop, p); err != nil {
		r.forgetLocked()
		return errors.Join(routes, err)
	}
	r.plan = *p
	return routes
}

// putLocked puts in force what is new in a plan, and gives what is left to be
// removed from the sets. Where the routes are still right, and the rules, it is
// removed at once: all of it is one call of ipset then, or none.
func (r *Redirector) putLocked(p *redirect.Plan, still bool) (drop []edit, err error) {
	if r.sets == nil {
		return nil, r.eachTables(func(t *tables) error { return t.apply(r.contents(p), false) })
	}
	var e edits
	if c := redirect.Diff(&r.plan, p); r.sets.sizes != nil && !c.Rehomes(&r.plan, p) {
		e = editsOf(&c, &r.plan, p)
	} else if e, err = r.sets.compare(r.contents(p)); err != nil {
		return nil, err
	}
	named := r.sets.sizes.after(&e).outline()
	named.ways = r.ways(p)
	if r.ruled != nil && r.ruled.covers(named) {
		named = r.ruled
	}
	if still && named == r.ruled {
		return nil, r.sets.put(e)
	}
	if err := r.sets.put(edits{add: e.add}); err != nil {
		return nil, err
	}
	if named != r.ruled {
		if err := r.eachTables(func(t *tables) error { return t.apply(named, true) }); err != nil {
			return nil, err
		}
		r.ruled = named
	}
	return e.drop, nil
}

// dropLocked removes what is gone once nothing leads there any more: some
// elements, the ranges that the plan in force has and another one has not, and
// sets that no rule names.
func (r *Redirector) dropLocked(drop []edit, p *redirect.Plan) error {
	c := redirect.Diff(&r.plan, p)
	if r.sets == nil {
		if c.Empty() {
			return nil
		}
		return r.eachTables(func(t *tables) error { return t.apply(r.contents(p), false) })
	}
	e := editsOf(&c, &r.plan, p) // it adds the parts of a range that was whole
	e.drop = append(drop, e.drop...)
	if err := r.sets.put(e); err != nil {
		return err
	}
	return r.sets.destroy(r.ruled)
}

// contents gives the lists of a plan, and what else rules are about.
func (r *Redirector) contents(p *redirect.Plan) *contents {
	c := contentsOf(p)
	c.ways = r.ways(p)
	return c
}

// ways tells which sockets rules have to look for.
func (r *Redirector) ways(p *redirect.Plan) ways {
	return ways{replies: !p.NodeSourceOnly && !r.opts.NoReplies, untracked: r.traits.Replies.Untracked && r.tracking.InUse()}
}

// forgetLocked has the next Apply look at everything.
func (r *Redirector) forgetLocked() {
	r.ruled = nil
	if r.sets != nil {
		r.sets.sizes = nil
	}
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

// eachTables calls f for the tables of each family that the kernel has.
func (r *Redirector) eachTables(f func(*tables) error) error {
	for _, t := range r.tables {
		if t == nil {
			continue
		}
		if err := f(t); err != nil {
			return err
		}
	}
	return nil
}

// routing says what a plan asks of routes and policy rules.
func (r *Redirector) routing(p *redirect.Plan) route.State {
	return route.State{Local: p.Local, Foreign: p.Foreign, Sources: p.Sources, MarkReplies: !r.opts.NoReplies && !p.NodeSourceOnly, MarkSteers: p.Foreign.Len() > 0}
}

// Verify checks chains, sets and routes, and puts back what is missing;
// established connections live through it. It calls one program for each family
// and one for the sets: about ten milliseconds, and now and then more, when it
// reads all elements of the sets.
func (r *Redirector) Verify() (repaired bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false, ErrClosed
	}
	if !r.applied {
		return false, nil
	}
	if err := r.lookLocked(); err != nil {
		return false, err
	}
	if repaired, err = r.verifyLocked(); err != nil {
		r.forgetLocked()
		return repaired, err
	}
	r.state = r.routing(&r.plan)
	rerouted, err := r.router.Apply(r.state)
	r.routed = err == nil
	return repaired || rerouted, err
}

// lookLocked writes the rules for sockets that pass connection tracking once there
// is any.
func (r *Redirector) lookLocked() error {
	if before := r.tracking.InUse(); r.tracking.Look() == before {
		return nil
	}
	if r.sets == nil {
		return r.eachTables(func(t *tables) error { return t.apply(r.contents(&r.plan), false) })
	}
	if r.ruled == nil {
		return nil // Verify writes all of them
	}
	named := *r.ruled
	named.ways = r.ways(&r.plan)
	if err := r.eachTables(func(t *tables) error { return t.apply(&named, true) }); err != nil {
		r.forgetLocked()
		return err
	}
	r.ruled = &named
	return nil
}

func (r *Redirector) verifyLocked() (repaired bool, err error) {
	var want *contents
	if r.sets == nil {
		want = r.contents(&r.plan)
	} else {
		if repaired, err = r.verifySetsLocked(); err != nil {
			return repaired, err
		}
		if r.ruled == nil {
			r.ruled = r.sets.sizes.outline()
			r.ruled.ways = r.ways(&r.plan)
		}
		want = r.ruled
	}
	err = r.eachTables(func(t *tables) error {
		again, err := t.verify(want, r.sets != nil)
		repaired = repaired || again
		return err
	})
	if err != nil || r.sets == nil {
		return repaired, err
	}
	return repaired, r.sets.destroy(want)
}

func (r *Redirector) verifySetsLocked() (repaired bool, err error) {
	known := r.sets.sizes != nil
	same, err := r.sets.look(&r.plan)
	if same || err != nil {
		return false, err
	}
	e, err := r.sets.compare(r.contents(&r.plan))
	if err != nil {
		return false, err
	}
	return known || len(e.add)+len(e.drop) > 0, r.sets.put(e)
}

// Close takes everything of ours out of the kernel, the routes first. Closing
// twice is the same as once.
func (r *Redirector) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	r.closed = true
	var err error
	if r.touched {
		err = r.removeLocked()
	}
	r.watcher.close()
	r.router.Close()
	r.tools.ns.close()
	return err
}

// removeLocked goes on after an error.
func (r *Redirector) removeLocked() error {
	_, routes := r.router.Remove()
	_, rules := r.removeTables()
	var elements error
	if r.sets != nil {
		_, elements = r.sets.remove()
	}
	return errors.Join(routes, rules, elements)
}

func (r *Redirector) removeTables() (removed []string, err error) {
	var errs []error
	_ = r.eachTables(func(t *tables) error {
		lines, err := t.remove()
		removed = append(removed, lines...)
		errs = append(errs, err)
		return nil
	})
	return removed, errors.Join(errs...)
}

// Cleanup removes what a process that was killed left behind, whichever kind of
// iptables it used: everything that carries the names and numbers of opts. It
// gives a line for each thing that it removed; where there are no iptables
// programs there is nothing to remove but routes. A running proxy's lock must
// be asked for first ([redirect.AcquireLock]): Cleanup does not look for one.
func Cleanup(opts Options) (removed []string, err error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return nil, err
	}
	ns, err := openNamespace(opts.Route.NetNS)
	if err != nil {
		return nil, err
	}
	defer ns.close()
	opts.Route.NetNS = ns.fd()
	router, err := route.Open(opts.Route)
	if err != nil {
		return nil, err
	}
	defer router.Close()
	removed, err = router.Remove()
	if err != nil {
		return removed, err
	}
	// The sets go last, when no rule of either variant names them.
	var all *Redirector
	for _, t := range installed(ns) {
		all = newRedirector(opts, t, router)
		lines, err := all.removeTables()
		removed = append(removed, lines...)
		if err != nil {
			return removed, err
		}
	}
	if all != nil && all.sets != nil {
		lines, err := all.sets.remove()
		return append(removed, lines...), err
	}
	return removed, nil
}
