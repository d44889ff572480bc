// Package sklookup steers with a BPF program that the kernel runs when it looks up
// the socket of a locally delivered packet (sk_lookup, Linux 5.9; F9), and with routes
// that make the Services' addresses local (F2). Packets pass no netfilter; the kernel
// needs only BPF and routes.
//
// In the network namespace it creates, and touches nothing else:
//
//   - a program of the type sk_lookup, attached by a link. The link is pinned in the
//     BPF file system where there is one: it outlives a process that is killed, and
//     then refuses (see pin). Otherwise link, program and maps end with the process.
//   - routes and policy routing rules; see package route. There is no rule
//     unless a plan has non-local addresses, or replies to clients' addresses
//     must come back (Options.ReplyPorts).
//   - at most four sockets on the listeners' loopback addresses that drop
//     everything, for the destinations that drop.
//   - if replies to clients' addresses must come back, from the first socket on such an
//     address on (see mode.Demand), a program at the ingress of
//     each interface except lo, held by descriptors too: see ingress. Without tcx
//     (Linux 6.6), their ports select them.
//
// The program looks up address, protocol and port in one map, which contains the
// listening socket or a refusal. Other ports of cluster IPs refuse, other addresses of
// the service ranges drop (A3.12), and everything else belongs to the host. The kernel
// finds established connections before it runs the program, so they continue
// whatever the plans are (A8.1, A8.7).
//
// If the kernel has netfilter, another mode can do the rest (Options.Beside).
// Limitations without it: see docs/steering.md. A non-local address has policy routing
// rules for its ports, which the kernel tries one by one. There, an IPv4 destination
// that should refuse drops, because the kernel sends no reset from an address that is
// not local. And a destination that only established connections still use
// (Plan.Lingering) refuses new ones until the last of them has ended.
package sklookup

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/mode"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/watch"
)

// Name is what Traits say.
const Name = "sklookup"

// Options are the numbers of what is made in the kernel. The zero value has the
// defaults.
type Options struct {
	// Routes are those of package route. Routes.NetNS is the network namespace
	// that everything is made in.
	Routes route.Options
	// ReplyPorts, first and last, are the ports of sockets that are bound to
	// clients' addresses: answers to them are brought back (F7, F11). Zero:
	// answers are not brought back.
	ReplyPorts [2]uint16
	// Beside, if not nil, does what a look-up of sockets cannot: it makes the
	// routes, takes what is sent to addresses that are not ours to own, brings
	// answers back and keeps everything out of connection tracking. It is given
	// each plan without the destinations that are found here, and is closed
	// with the Redirector; Routes.NetNS is all that counts of Routes then, and
	// ReplyPorts nothing.
	Beside Beside
	// BPFRoot is where the BPF file system is mounted, and Name what tells the proxy
	// from others in the network namespace. If it is empty, nothing is pinned.
	BPFRoot, Name string
	// MaxDestinations bounds the destinations, and the ranges and cluster IPs,
	// of each family; 262,144 if 0. Each costs 16 bytes whether it is used or
	// not.
	MaxDestinations int
	// MaxSockets bounds the listening sockets; 131,072 if 0.
	MaxSockets int
}

func (o Options) withDefaults() Options {
	o.MaxDestinations = cmp.Or(o.MaxDestinations, 1<<18)
	o.MaxSockets = cmp.Or(o.MaxSockets, 1<<17)
	return o
}

// Beside is a mode that stands beside the program.
type Beside interface {
	redirect.Redirector
	// Outlived says whether the program outlives the process. If not, Beside has to
	// refuse packets to addresses of ours for which no listener is found.
	Outlived(bool)
}

// Redirector steers by sk_lookup. Its methods are safe for concurrent use.
type Redirector struct {
	mode.Core
	opts     Options
	beside   *beside          // nil if there is none
	answers  redirect.Replies // never changes
	ingress  *ingress         // nil where answers are found by ports
	silent   silence
	refusals *refusals
	link     *link.NetNsLink // nil before the first Apply
	pin      pin             // of the link
	tables   *tables         // that the attached program looks into
	whole    bool            // the tables are those of Core.Plan
	unread   int             // calls of Verify until the maps are read
	unmarked route.Unmarked
	marks    bool // ingress has to mark replies
	linked   bool // ingress is where it has to be
}

var (
	_ redirect.Redirector = (*Redirector)(nil)
	_ redirect.Counter    = (*Redirector)(nil)
)

// New gets ready to steer and changes nothing in the network namespace but for
// sockets. It reports what the kernel or the process lacks by a
// *redirect.MissingError. What an earlier process left behind is taken over by
// the first Apply.
func New(opts Options) (*Redirector, error) {
	opts = opts.withDefaults()
	silent, err := openSilence(opts.Routes.NetNS)
	if err != nil {
		return nil, err
	}
	r := &Redirector{opts: opts, silent: silent}
	if err := r.probe(); err != nil {
		r.refusals.close()
		silent.close()
		return nil, err
	}
	steps := mode.Steps{Steers: "sk_lookup", Check: checkSocket, Apply: r.apply, Verify: r.verify, Remove: r.remove, Release: r.release}
	if opts.Beside != nil {
		r.beside = &beside{Beside: opts.Beside}
		r.Touched = true // it is closed with us
		steps.Prepare = r.beside.split
		return r, r.Open(steps, nil, watch.Options{})
	}
	router, err := route.Open(opts.Routes)
	if err != nil {
		r.release()
		return nil, err
	}
	r.openAnswers(router)
	if err := r.Open(steps, router, watch.Options{NetNS: opts.Routes.NetNS, Links: r.ingress != nil}); err != nil {
		return nil, err
	}
	return r, nil
}

// openAnswers finds out how answers to clients' addresses can be brought back: by a
// program at the interfaces that finds their sockets, or else by ports.
func (r *Redirector) openAnswers(router *route.Router) {
	routes, ports := r.opts.Routes.WithDefaults(), r.opts.ReplyPorts
	if ports != [2]uint16{} && router.Check(route.State{MarkReplies: true, ReplyPorts: ports}) == nil {
		var err error
		if r.ingress, err = openIngress(routes.NetNS, routes.ReplyMark, ports); err == nil {
			r.answers = redirect.Replies{Diverted: true, FirstPort: ports[0], LastPort: ports[1]}
			r.Demand = mode.NewDemand(&r.Core, r.answers, func(p redirect.Plan) error {
				err := r.route(&r.Plan, &p, &redirect.Changes{})
				r.Set(p)
				return err
			})
			r.answers.Clients = r.Demand
			return
		}
	}
	r.answers = router.RepliesByPort(ports)
}

// remove takes out of the kernel what Apply put there.
func (r *Redirector) remove() error {
	err := r.pin.remove(r.link)
	if r.beside != nil {
		err = errors.Join(err, r.beside.Close())
	}
	return err
}

// Leave leaves the pinned link and what Options.Beside made to another process.
func (r *Redirector) Leave() {
	r.Core.Leave()
	if r.beside != nil {
		r.beside.Leave()
	}
}

// Unpinned returns the reason why the program ends with the process; nil if it does not.
func (r *Redirector) Unpinned() error { return r.pin.missing }

// release gives back what New and Apply opened.
func (r *Redirector) release() {
	if r.link != nil {
		_ = r.link.Close()
	}
	if r.tables != nil {
		r.tables.close()
	}
	if r.ingress != nil {
		r.ingress.close()
	}
	r.silent.close()
	r.refusals.close()
	r.pin.close()
}

// Refused returns what the program has refused and dropped, and Options.Beside with it; see
// [redirect.Counter].
func (r *Redirector) Refused() (redirect.Refused, error) {
	own, err := r.refusals.take()
	if r.beside == nil {
		return own, err
	}
	counter, is := r.beside.Beside.(redirect.Counter)
	if !is {
		return own, err
	}
	more, besideErr := counter.Refused()
	return own.With(more), errors.Join(err, besideErr)
}

// Changed receives when Verify should be called; see [redirect.Redirector].
func (r *Redirector) Changed() <-chan struct{} {
	if r.beside != nil {
		return r.beside.Changed()
	}
	return r.Core.Changed()
}

// probe has the kernel judge the program, with maps of the smallest size.
func (r *Redirector) probe() (err error) {
	if r.refusals, err = unlocked(newRefusals); err != nil {
		return err
	}
	t, err := newTables(1, int(firstSlot), r.refusals)
	if err != nil {
		return err
	}
	defer t.close()
	r.pin = openPin(&r.opts, t.program)
	return nil
}

// Traits tell that one listener serves many destinations, and whether replies
// to clients' addresses come back.
func (r *Redirector) Traits() redirect.Traits {
	if r.beside != nil {
		return r.beside.traits()
	}
	return redirect.Traits{Name: Name, Replies: r.answers}
}

// checkSocket returns the error of a target that has no socket.
func checkSocket(s redirect.Steering) error {
	if s.Target.FD == 0 {
		return errors.New("no descriptor of the listening socket")
	}
	return nil
}

// apply adds sockets before the verdicts that name them, and verdicts before the
// routes that lead to them. It removes in the opposite order.
func (r *Redirector) apply(p redirect.Plan, changes *redirect.Changes) error {
	old, kept := r.Plan, r.whole
	if err := r.fill(&p, changes); err != nil {
		return err
	}
	var routes, pinned error
	if !r.pin.there {
		_, pinned = r.pin.keep(r.link)
	}
	if r.beside != nil {
		r.beside.Outlived(r.pin.there)
		routes = r.beside.apply()
	} else {
		routes = r.route(&old, &p, changes)
	}
	if kept {
		if err := r.tables.remove(&old, &p, changes); err != nil {
			r.whole = false
			return errors.Join(pinned, routes, err)
		}
	}
	return errors.Join(pinned, routes)
}

// route puts the routes of a plan in force. Answers are marked before the rule that
// matches the mark is added.
func (r *Redirector) route(old, p *redirect.Plan, changes *redirect.Changes) error {
	s := r.unmarked.State(old, p, changes, r.answers)
	s.MarkReplies = r.ingress != nil && s.ReplyPorts != [2]uint16{}
	var links error
	if !r.linked || r.marks != s.MarkReplies {
		r.marks = s.MarkReplies
		_, links = r.followLinks()
		r.linked = links == nil
	}
	return errors.Join(links, r.Router.Put(s))
}

// fill adds what is new in the plan to the tables, or fills new ones if they are not
// those of the last plan.
func (r *Redirector) fill(p *redirect.Plan, c *redirect.Changes) error {
	if !r.whole {
		return r.refill(p)
	}
	if err := r.tables.add(p, c); err != nil {
		r.whole = false
		return err
	}
	r.Set(*p)
	return nil
}

// refill fills new tables and replaces the program by one that uses them, in one
// step.
func (r *Redirector) refill(p *redirect.Plan) error {
	t, err := newTables(r.opts.MaxDestinations, r.opts.MaxSockets, r.refusals)
	if err != nil {
		return err
	}
	if err = t.fill(p, r.silent); err == nil {
		err = r.attach(t.program)
	}
	if err != nil {
		t.close()
		return err
	}
	if r.tables != nil {
		r.tables.close()
	}
	r.tables, r.whole = t, true
	r.Set(*p)
	return nil
}

// attach puts a program in the place of the one that is attached, be it that of a
// process that was killed.
func (r *Redirector) attach(program *ebpf.Program) error {
	if r.link == nil {
		r.link = r.pin.left(r.opts.Routes.NetNS)
	}
	if r.link != nil {
		if attached(r.link) {
			if err := r.link.Update(program); err != nil {
				return fmt.Errorf("exchange the sk_lookup program: %w", err)
			}
			return nil
		}
		_ = r.link.Close()
		r.link = nil
	}
	namespace := r.opts.Routes.NetNS
	if namespace == 0 {
		own, err := sys.OwnNetNS()
		if err != nil {
			return fmt.Errorf("own network namespace: %w", err)
		}
		defer own.Close()
		namespace = int(own.Fd())
	}
	l, err := link.AttachNetNs(namespace, program)
	if err != nil {
		return explain(fmt.Errorf("attach the sk_lookup program: %w", err), FeatureSkLookup)
	}
	r.link = l
	return nil
}

// attached reports whether a link still holds. After another process has detached it,
// its network namespace is 0.
func attached(l *link.NetNsLink) bool { return inodeOf(l) != 0 }

// runs reports whether the attached program is this process's: another one may have tried to
// take over, and ended.
func (r *Redirector) runs() bool {
	at, err := r.link.Info()
	if err != nil {
		return false
	}
	own, err := r.tables.program.Info()
	if err != nil {
		return false
	}
	id, known := own.ID()
	return !known || at.Program == id
}

// verify checks that the program is attached and that the routes are there, and
// now and then that the maps hold what they should. A map is changed by nobody
// who does not look for it by its number, and reading all of them takes about
// 15 ms for 10,000 services: that is done each 12th time.
func (r *Redirector) verify() (repaired bool, err error) {
	if !r.whole {
		return false, nil // the next Apply does everything anew
	}
	refill := !attached(r.link) || !r.runs()
	if r.unread--; r.unread < 0 {
		r.unread = readEvery - 1
		matching, err := r.tables.match(&r.Plan)
		if err != nil {
			return false, err
		}
		if repaired, err = r.tables.restore(r.silent); err != nil {
			return repaired, err
		}
		refill = refill || !matching
	}
	if refill {
		repaired = true
		if err := r.refill(&r.Plan); err != nil {
			return repaired, err
		}
	}
	repinned, pinErr := r.pin.keep(r.link)
	repaired = repaired || repinned
	if r.beside != nil {
		r.beside.Outlived(r.pin.there)
		mended, err := r.beside.Verify()
		return repaired || mended, errors.Join(pinErr, err)
	}
	attached, linkErr := r.followLinks()
	rerouted, err := r.Router.Verify()
	return repaired || attached || rerouted, errors.Join(pinErr, linkErr, err)
}

// followLinks has the ingress program at all interfaces if answers are marked, else
// at none.
func (r *Redirector) followLinks() (repaired bool, err error) {
	switch {
	case r.ingress == nil:
	case r.marks:
		return r.ingress.follow()
	default:
		r.ingress.detach()
	}
	return false, nil
}

// readEvery is how many calls of Verify there are from one reading of the maps
// to the next.
const readEvery = 12
