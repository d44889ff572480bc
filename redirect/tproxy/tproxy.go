// Package tproxy steers by nftables: one table with a map from destination to
// listener port, filled over netlink, and routes that make the services'
// addresses local (facts F2, F3). No program such as nft or ip is needed.
//
// What it makes in the network namespace, and all that it ever touches:
//
//   - the table `inet sluice` (Options.Table). The number of its chains and
//     rules is constant; services are elements of its sets and map.
//   - routes `local RANGE dev lo proto 83 src NODE` in the kernel's routing
//     table local, one for each prefix of Plan.Local.
//
// No mark and no policy routing rule is used, so src_valid_mark does not
// matter (F10).
//
// A packet to a steered destination is handed to the listener before
// connection tracking sees it, or to the established socket if there is one
// (the kernel looks for that first). It does not matter whether it came in by
// an interface or from this node, whose own packets come in by lo (F3). A
// packet to another destination in Plan.Local belongs to an established
// connection that outlived its service port (A8.7), or is refused or dropped.
//
// TCP and UDP can be steered; SCTP can only be refused (F1).
package tproxy

import (
	"errors"
	"fmt"
	"net/netip"
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
	// Table is the name of the nftables table; "sluice" if empty.
	Table string
	// NodeIPs are the addresses that connections from this node to services
	// get as their source (F8); see [route.Options].
	NodeIPs []netip.Addr
	// NetNS is a descriptor of the network namespace to work in; 0 is the one
	// that New is called in. It must stay open until Close.
	NetNS int
}

// DefaultTable is the table's name if Options has none.
const DefaultTable = "sluice"

func (o Options) withDefaults() Options {
	if o.Table == "" {
		o.Table = DefaultTable
	}
	return o
}

func (o Options) validate() error {
	if strings.ContainsAny(o.Table, " \t\n\"") || len(o.Table) > 100 {
		return fmt.Errorf("nftables table name %q", o.Table)
	}
	return o.routing().Validate()
}

// routing are the options of the routes.
func (o Options) routing() route.Options {
	return route.Options{NodeIPs: o.NodeIPs, NetNS: o.NetNS}.WithDefaults()
}

// Redirector steers by nftables. Its methods are safe for concurrent use.
type Redirector struct {
	mu     sync.Mutex // guards everything below
	opts   Options
	filter *filter
	router *route.Router
	closed bool

	plan    redirect.Plan // in force; empty before the first Apply
	touched bool          // there may be something of ours in the kernel
	applied bool          // the table is that of the plan
	routed  bool          // the routes are, too
}

var _ redirect.Redirector = (*Redirector)(nil)

// ErrClosed is the error of using a Redirector after Close.
var ErrClosed = errors.New("tproxy: closed")

// New gets ready to steer and changes nothing in the kernel. It tells what the
// kernel or the process lacks by a *redirect.MissingError. What an earlier process left
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
	if err := f.probe(); err != nil {
		f.close()
		return nil, err
	}
	rt, err := route.Open(opts.routing())
	if err != nil {
		f.close()
		return nil, err
	}
	return &Redirector{opts: opts, filter: f, router: rt}, nil
}

// Traits tell that one listener serves many destinations.
func (r *Redirector) Traits() redirect.Traits { return redirect.Traits{Name: "tproxy/nftables"} }

// Apply puts the plan in force; see [redirect.Redirector]. An SCTP destination
// in Plan.Steer is an error (F1), as is a range in Plan.Local that takes in an
// address of this node; then nothing is changed. A *redirect.ClashError says that
// somebody else has a route for the same range.
//
// The order of the steps keeps every destination in good hands: the table
// first learns what is new and keeps the ranges of both plans; then routes are
// added, then removed; then the table forgets the ranges that are gone.
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
	before, after := redirect.Cover(r.plan.Local), redirect.Cover(p.Local)
	if !r.applied {
		// What a killed process left routed is not to leak before its route goes.
		var err error
		if before, err = r.router.LocalRoutes(); err != nil {
			return err
		}
	}
	if !slices.Equal(before, after) {
		if err := r.router.CheckLocal(after); err != nil {
			return err
		}
		r.routed = false
	}
	both := redirect.Cover(slices.Concat(before, after))
	changes.AddLocal, changes.DropLocal = redirect.DiffLocal(before, both)
	p.Local = both
	r.touched = true
	if err := r.filter.apply(&changes, &p); err != nil {
		return err
	}
	r.plan, r.applied = p, true
	if r.routed {
		return nil
	}
	if _, err := r.router.Apply(route.State{Local: after}); err != nil {
		return err
	}
	p.Local = after
	changes = redirect.Changes{}
	changes.AddLocal, changes.DropLocal = redirect.DiffLocal(both, after)
	if err := r.filter.apply(&changes, &p); err != nil {
		return err
	}
	r.plan, r.routed = p, true
	return nil
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
	refilled, err := r.filter.verify(&r.plan)
	if err != nil {
		return refilled, err
	}
	rerouted, err := r.router.Apply(route.State{Local: r.plan.Local})
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
	r.router.Close()
	r.filter.close()
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
