// Package iptables steers with iptables: TPROXY rules that look up ipsets, and
// routes that make the Services' addresses local (F1, F2, F3). It is for kernels
// without nf_tables, and for nodes on which all rules must be in iptables. It works
// with the legacy programs and with those for nf_tables (iptables-nft), for IPv4 and
// IPv6.
//
// In the network namespace it creates, and touches nothing else:
//
//   - chains SLUICE-… (Options.Name) in the tables raw, mangle and filter, and
//     one rule at the head of each built-in chain that is needed, which jumps there.
//   - ipsets sluice-…, if the kernel and the node have ipset.
//   - routes and policy rules, by package redirect/route.
//
// One iptables-restore writes the rules of a family as one text. With ipset, the
// number of rules depends only on the number of listeners (at most [maxListeners]). A
// change of the plan is one ipset restore of the difference, unless it needs a list
// without rules. Without ipset, each destination has a rule: packets to Services pass
// these rules one after the other, and each change rewrites all of them, so that this
// works for some hundred Services only.
//
// The programs are called without a library: see docs/decisions.md.
//
// A packet to a steered destination bypasses connection tracking in the table raw,
// and goes to its listener in the table mangle. The table filter refuses or drops
// packets to Services' addresses that nothing accepted: iptables cannot reject in an
// earlier table.
package iptables

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/mode"
	"github.com/sluice-proxy/sluice/redirect/route"
)

// Options are the names and numbers of what is made in the kernel. The zero
// value has the defaults.
type Options struct {
	// Name begins the names of all chains (in capitals) and ipsets; "sluice"
	// if empty, at most 12 letters, digits and underscores. A hyphen counts as
	// an underscore: it separates names from what follows.
	Name string
	// Routes are the addresses, marks and tables of routing, and the network
	// namespace to work in. What sockets on the node's address send that pass
	// connection tracking has Routes.SocketMark, [route.DefaultSocketMark] if zero.
	Routes route.Options
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
	// Conntrack says whether connections to endpoints bypass connection tracking.
	Conntrack redirect.Conntrack

	nodePorts [2]uint16 // see redirect.NodePorts
	device    string    // by which kernel flows answer clients on the node
}

// Name is this mode's; the log says the variant too.
const Name = "tproxy/iptables"

// DefaultName is the name if Options has none.
const DefaultName = "sluice"

// maxListeners is what Traits ask for: with ipset, every packet that opens a
// connection to a service meets one look-up for each listener and protocol.
const maxListeners = 16

func (o Options) withDefaults() Options {
	if o.device == "" {
		o.device = kernel.OwnDevice(o.Name)
	}
	o.Name = strings.ReplaceAll(cmp.Or(o.Name, DefaultName), "-", "_")
	o.ReplyPorts = cmp.Or(o.ReplyPorts, redirect.ReplyPorts)
	o.Routes.SocketMark = cmp.Or(o.Routes.SocketMark, route.DefaultSocketMark)
	o.Routes = o.Routes.WithDefaults()
	o.nodePorts = redirect.NodePorts(o.Routes.NetNS)
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
	mode.Core
	opts    Options
	tools   *tools
	tables  [versions]*tables // nil for a family that the kernel does not have
	sets    *sets             // nil without ipset
	watcher *watcher
	answers redirect.Replies // never changes
	ruled   *contents        // the lists that the rules are about; nil if that is not known
}

var _ redirect.Redirector = (*Redirector)(nil)

// New gets ready to steer and changes nothing in the kernel but in a scratch
// network namespace, where it tries what it needs. What is missing is told by a
// *MissingError. What an earlier process left behind is taken over by the first
// Apply.
func New(opts Options) (*Redirector, error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return nil, err
	}
	ns, err := openNamespace(opts.Routes.NetNS)
	if err != nil {
		return nil, err
	}
	t, err := choose(ns, opts)
	if err != nil {
		ns.close()
		return nil, err
	}
	opts.Variant = t.variant
	opts.Routes.NetNS = ns.fd()
	router, err := route.Open(opts.Routes)
	if err != nil {
		ns.close()
		return nil, err
	}
	r := newRedirector(opts, t)
	r.watcher = &watcher{}
	steps := mode.Steps{Steers: "the kernel's TPROXY", Apply: r.apply, Verify: r.verify, Remove: r.remove, Release: r.release}
	if err := r.Open(steps, router, watchOptions(t)); err != nil {
		return nil, err
	}
	if err := r.watcher.open(t, r.Core.Changed()); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	if !opts.NoReplies {
		tracking := redirect.NewTracking(opts.Routes.NetNS, opts.Conntrack, func() (string, error) {
			return firewall.StateRule(opts.Routes.NetNS, opts.Name)
		})
		tracking.Look()
		r.answers = router.RepliesByMark(opts.ReplyPorts, tracking)
	}
	return r, nil
}

func newRedirector(opts Options, t *tools) *Redirector {
	r := &Redirector{opts: opts, tools: t}
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

func (r *Redirector) release() {
	r.watcher.close()
	r.tools.ns.close()
}

// Traits tell that one listener serves many destinations, how many listeners
// there may be, and that answers to clients' own addresses come back. On the way
// out rules cannot ask for the socket of a packet, so that those on the node's
// address have a mark, unless it would lead their packets astray.
func (r *Redirector) Traits() redirect.Traits {
	t := redirect.Traits{Name: Name + "-" + string(r.opts.Variant), Replies: r.answers, PastMark: r.answers.Mark}
	if r.sets != nil {
		t.MaxListeners = maxListeners
	}
	return t
}

// apply first adds what is new to sets and rules, then changes the routes, then
// removes what is gone. Sets and rules cover the ranges of both plans, and those that
// a killed process left, for as long as they are routed. A destination that is in two
// sets for a moment is refused or silent at once, and steered only when it is in
// neither of those.
func (r *Redirector) apply(p redirect.Plan, _ *redirect.Changes) error {
	before, err := r.Routed()
	if err != nil {
		return err
	}
	both, next := p, route.Marked(&p, r.answers)
	both.Local = redirect.Joined(before, p.Local)
	still := both.Local.Equal(p.Local) && r.Router.Is(&next)
	drop, err := r.put(&both, still)
	if err != nil {
		r.forget()
		return err
	}
	r.Set(both)
	routes := r.Router.Put(next)
	if routes != nil {
		p = both // ranges that may be routed yet are guarded
	}
	if err := r.drop(drop, &p); err != nil {
		r.forget()
		return errors.Join(routes, err)
	}
	r.Set(p)
	return routes
}

// put adds what is new in a plan, and returns what the caller must remove from the
// sets afterwards. If routes and rules stay as they are, it removes that too, by the same
// call of ipset.
func (r *Redirector) put(p *redirect.Plan, still bool) (drop []edit, err error) {
	if r.sets == nil {
		return nil, r.eachTables(func(t *tables) error { return t.apply(r.contents(p), false) })
	}
	var e edits
	if c := redirect.Diff(&r.Plan, p); r.sets.sizes != nil && !c.Rehomes(&r.Plan, p) {
		e = editsOf(&c, &r.Plan, p)
	} else if e, err = r.sets.compare(r.contents(p)); err != nil {
		return nil, err
	}
	named := r.sets.sizes.after(&e).outline()
	named.sockets = r.sockets(p)
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

// drop removes what nothing leads to any more: some elements, the ranges that the
// plan in force has and the next one has not, and sets that no rule names.
func (r *Redirector) drop(drop []edit, p *redirect.Plan) error {
	c := redirect.Diff(&r.Plan, p)
	if r.sets == nil {
		if c.Empty() {
			return nil
		}
		return r.eachTables(func(t *tables) error { return t.apply(r.contents(p), false) })
	}
	e := editsOf(&c, &r.Plan, p) // it adds the parts of a range that was whole
	e.drop = append(drop, e.drop...)
	if err := r.sets.put(e); err != nil {
		return err
	}
	return r.sets.destroy(r.ruled)
}

// contents returns the lists of a plan, and what else rules are about.
func (r *Redirector) contents(p *redirect.Plan) *contents {
	c := contentsOf(p)
	c.sockets = r.sockets(p)
	return c
}

// sockets returns which sockets rules have to look for.
func (r *Redirector) sockets(p *redirect.Plan) sockets {
	s := sockets{replies: !p.NodeSourceOnly && r.answers.Diverted}
	if tracking := r.answers.Tracking; tracking != nil {
		s.untracked = r.answers.Untracked && tracking.Bypassed()
		_, s.kept = tracking.Kept()
	}
	return s
}

// forget makes the next Apply read everything.
func (r *Redirector) forget() {
	r.ruled = nil
	if r.sets != nil {
		r.sets.sizes = nil
	}
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

// verify calls one program for each family and one for the sets: about ten
// milliseconds, and now and then more, when it reads all elements of the sets.
func (r *Redirector) verify() (repaired bool, err error) {
	if err := r.look(); err != nil {
		return false, err
	}
	if repaired, err = r.verifyRules(); err != nil {
		r.forget()
		return repaired, err
	}
	rerouted, err := r.Router.Apply(route.Marked(&r.Plan, r.answers))
	return repaired || rerouted, err
}

// look writes the rules for sockets that bypass connection tracking once connections
// are tracked, and those for sockets that do not once they are kept in it.
func (r *Redirector) look() error {
	before := r.sockets(&r.Plan)
	if tracking := r.answers.Tracking; tracking != nil {
		tracking.Look()
	}
	if r.sockets(&r.Plan) == before {
		return nil
	}
	if r.sets == nil {
		return r.eachTables(func(t *tables) error { return t.apply(r.contents(&r.Plan), false) })
	}
	if r.ruled == nil {
		return nil // Verify writes all of them
	}
	named := *r.ruled
	named.sockets = r.sockets(&r.Plan)
	if err := r.eachTables(func(t *tables) error { return t.apply(&named, true) }); err != nil {
		r.forget()
		return err
	}
	r.ruled = &named
	return nil
}

func (r *Redirector) verifyRules() (repaired bool, err error) {
	var want *contents
	if r.sets == nil {
		want = r.contents(&r.Plan)
	} else {
		if repaired, err = r.verifySets(); err != nil {
			return repaired, err
		}
		if r.ruled == nil {
			r.ruled = r.sets.sizes.outline()
			r.ruled.sockets = r.sockets(&r.Plan)
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

func (r *Redirector) verifySets() (repaired bool, err error) {
	known := r.sets.sizes != nil
	same, err := r.sets.look(&r.Plan)
	if same || err != nil {
		return false, err
	}
	e, err := r.sets.compare(r.contents(&r.Plan))
	if err != nil {
		return false, err
	}
	return known || len(e.add)+len(e.drop) > 0, r.sets.put(e)
}

// remove goes on after an error.
func (r *Redirector) remove() error {
	_, rules := r.removeTables()
	var elements error
	if r.sets != nil {
		_, elements = r.sets.remove()
	}
	return errors.Join(rules, elements)
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
	if removed, err = route.Cleanup(opts.Routes); err != nil {
		return removed, err
	}
	ns, err := openNamespace(opts.Routes.NetNS)
	if err != nil {
		return removed, err
	}
	defer ns.close()
	// The sets go last, when no rule of either variant names them.
	var all *Redirector
	for _, t := range installed(ns) {
		all = newRedirector(opts, t)
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
