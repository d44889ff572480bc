// Package route keeps the routes and the policy routing rules that steering
// rests on, the same for every mode.
//
// What there has to be is a [State], whole; a [Router] makes the kernel's
// tables so, adding what is new before it removes what is old.
//
//	r, err := route.Open(route.Options{NodeIPs: nodeIPs})
//	changed, err := r.Apply(route.State{Local: prefixes, MarkSteers: true})
//	removed, err := r.Remove()
//	r.Close()
//
// All that it ever touches, in one network namespace:
//
//   - routes `local P dev lo proto 83 src NODE` in the kernel's table local:
//     ranges that this node delivers to itself (F2). They are in that table,
//     because the kernel sends nothing from an IPv4 address that is not in it:
//     with a table of our own, ICMP port unreachable would not reach clients on
//     this node.
//   - routes `local A dev lo proto 83 src NODE` in the steer table, one for each
//     address that is not ours to own (A3.13), and rules with proto 83 that
//     look there for packets with a mark, or to single ports.
//   - routes in the reply table, and rules with proto 83 that look there for
//     answers to the clients' own addresses: `local default dev lo proto 83`
//     where packets are marked (F7), else `local CLIENT dev lo proto 83` for
//     each client that has a connection through this node (F11).
//
// The local routes of the steer table are single addresses, so that a source
// check that takes the mark into account (src_valid_mark, F10) finds nothing
// there; for the reply table see [SourceChecks].
//
// Routes and rules of others stay as they are. Where one of them is in the way,
// what it clashes with is left out, everything else is put in force, and the
// error is a *redirect.ClashError.
package route

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// Protocol is the protocol number of our routes and rules (`proto 83` in ip's
// output), by which they are told from those of others. 83 is an S.
const Protocol = 83

// The defaults of Options.
const (
	DefaultSteerMark    = 0x1000
	DefaultReplyMark    = 0x2000
	DefaultSteerTable   = 8376
	DefaultReplyTable   = 8377
	DefaultRulePriority = 83

	// DefaultSocketMark is for Options.SocketMark: a bit that neither kube-proxy
	// uses nor those that are often beside it: Cilium, Calico, the CNI plugin of
	// AWS, WireGuard's wg-quick (0xca6c).
	DefaultSocketMark = 0x100
)

// Options are the numbers of what is made in the kernel. The zero value has the
// defaults.
type Options struct {
	// NodeIPs are the addresses that connections from this node to services
	// get as their source (F8), at most one for each family, each assigned to
	// an interface. They go before State.Sources.
	NodeIPs []netip.Addr
	// NetNS is a descriptor of the network namespace to work in; 0 is the one
	// that Open is called in. It must stay open until Close.
	NetNS int
	// SteerMark and ReplyMark are single bits of packets' marks; the other bits
	// are others'.
	SteerMark, ReplyMark uint32
	// SocketMark is a single bit too, of what sockets of ours send; 0 where none
	// has it. No policy routing rule of ours is about it.
	SocketMark uint32
	// SteerTable and ReplyTable are numbers of routing tables of our own, and so is
	// the one after ReplyTable where nothing marks packets.
	SteerTable, ReplyTable int
	// RulePriority is that of our policy routing rules, and the three after it
	// are, too: after that of the table local (0), before that of the table main
	// (32766).
	RulePriority int
	// SplitLate leaves the kernel's IPv4 tables local and main in one until a State
	// has rules. Packets that the node forwards then take some 2 % less CPU time, and
	// local addresses are unreachable for a moment when the first rule comes.
	SplitLate bool
}

// WithDefaults fills in what is zero.
func (o Options) WithDefaults() Options {
	o.SteerMark = cmp.Or(o.SteerMark, DefaultSteerMark)
	o.ReplyMark = cmp.Or(o.ReplyMark, DefaultReplyMark)
	o.SteerTable = cmp.Or(o.SteerTable, DefaultSteerTable)
	o.ReplyTable = cmp.Or(o.ReplyTable, DefaultReplyTable)
	o.RulePriority = cmp.Or(o.RulePriority, o.rulePriority())
	return o
}

// rulePriority gives another proxy of this kind beside us, which has a steer
// table of its own, priorities of its own.
func (o Options) rulePriority() int {
	if o.SteerTable == DefaultSteerTable {
		return DefaultRulePriority
	}
	const numbers = 1000
	return DefaultRulePriority + prioritiesUsed*(1+o.SteerTable%numbers)
}

// prioritiesUsed is how many priorities the rules of one proxy have.
const prioritiesUsed = 4

// Validate returns what is wrong with options that have their defaults.
func (o Options) Validate() error {
	seen := map[service.Family]bool{}
	for _, a := range o.NodeIPs {
		f := service.FamilyOf(a)
		if !a.IsValid() || a.Is4In6() || seen[f] {
			return fmt.Errorf("node addresses %v: want at most one of each family", o.NodeIPs)
		}
		seen[f] = true
	}
	for _, mark := range []uint32{o.SteerMark, o.ReplyMark, o.SocketMark} {
		if mark&(mark-1) != 0 {
			return fmt.Errorf("mark %#x: want a single bit; the others belong to other programs", mark)
		}
	}
	if o.SteerMark == o.ReplyMark {
		return fmt.Errorf("mark %#x is to steer and to bring replies back: want two different ones", o.SteerMark)
	}
	if o.SocketMark&(o.SteerMark|o.ReplyMark) != 0 {
		return fmt.Errorf("mark %#x is for sockets, and to steer or to bring replies back: want different ones", o.SocketMark)
	}
	if o.SteerTable == o.ReplyTable || o.SteerTable == o.ReplyTable+1 {
		return fmt.Errorf("routing table %d is to steer, %d and the one after it to bring replies back: want different ones", o.SteerTable, o.ReplyTable)
	}
	for _, table := range []int{o.SteerTable, o.ReplyTable, o.ReplyTable + 1} {
		if table <= 0 || table >= syscall.RT_TABLE_DEFAULT && table <= syscall.RT_TABLE_LOCAL {
			return fmt.Errorf("routing table %d: want a number of our own, not 0 and not 253 to 255", table)
		}
	}
	if o.RulePriority <= 0 || o.RulePriority > maxPriority {
		return fmt.Errorf("priority %d of policy routing rules: want 1 to %d", o.RulePriority, maxPriority)
	}
	return nil
}

// State is everything that there has to be. A State that was handed to a Router
// is not changed afterwards.
type State struct {
	// Local are the ranges that this node delivers to itself, whoever asks.
	// None lies within another one.
	Local redirect.Set[netip.Prefix]
	// NonLocal are the addresses that the steer table makes local.
	NonLocal redirect.Set[netip.Addr]
	// Sources are those of Plan.Sources.
	Sources redirect.Sources
	// MarkSteers sends packets with the steer mark to the steer table.
	MarkSteers bool
	// PortRules send packets for these destinations to the steer table, where
	// nobody can mark them. The kernel goes through them one by one.
	PortRules redirect.Set[service.Destination]
	// ReplyPorts, first and last, send TCP and UDP packets to these ports, but
	// none that this node sends itself, to the reply table (F11), which then has
	// the addresses that Router.Clients holds; zero sends none.
	ReplyPorts [2]uint16
	// MarkReplies sends of these packets, and of ICMP, those with the reply mark there,
	// wherever they come from, and has a default route in the reply table.
	MarkReplies bool
}

// repliesByClient reports whether the reply table has a route for each client in
// place of a default route.
func (s *State) repliesByClient() bool { return s.ReplyPorts != [2]uint16{} && !s.MarkReplies }

// Router makes the kernel's tables what a State says. Its methods are safe for
// concurrent use.
type Router struct {
	opts Options

	mu sync.Mutex // guards the sockets below
	handles
	want  *State // that was asked for last; nil before the first
	known bool   // the tables are those of want
	// sources are what the routes of each family have; zero before the first route.
	sources [redirect.Families]netip.Addr

	clients clients // of a State with ReplyPorts and without MarkReplies
}

// Open gets ready, and changes nothing in the kernel.
func Open(opts Options) (*Router, error) {
	opts = opts.WithDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	r := &Router{opts: opts}
	r.clients.router = r
	var err error
	if r.handles, err = openHandles(opts.NetNS); err != nil {
		return nil, err
	}
	if r.clients.handles, err = openHandles(opts.NetNS); err != nil {
		r.handles.close()
		return nil, err
	}
	return r, nil
}

// Cleanup removes what a process that was killed left behind: its routes and
// rules. It gives a line for each. A running proxy's lock must be asked for first
// ([redirect.AcquireLock]): Cleanup does not look for one.
func Cleanup(opts Options) (removed []string, err error) {
	r, err := Open(opts)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return r.Remove()
}

// handles are netlink sockets.
type handles struct {
	nl *netlink.Handle
	// lister asks strictly: the kernel then sends the routes of one table
	// instead of all. Kernels before 4.20 send all.
	lister *netlink.Handle
}

func openHandles(namespace int) (h handles, err error) {
	if h.nl, err = kernel.Open(namespace, syscall.NETLINK_ROUTE); err != nil {
		return h, err
	}
	if h.lister, err = kernel.Open(namespace, syscall.NETLINK_ROUTE); err != nil {
		h.nl.Close()
		return h, err
	}
	_ = h.lister.SetStrictCheck(true)
	return h, nil
}

func (h *handles) close() {
	h.nl.Close()
	h.lister.Close()
}

// Close gives the sockets back and leaves the kernel as it is.
func (r *Router) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.handles.close()
	r.clients.close()
}

// Apply makes the kernel's tables what the state says and reports whether
// anything had to be changed. Routes come before the rules that lead to them,
// and go after them. On an error the rest is in force all the same; calling it
// again is safe.
//
// It reads the tables each time, so that it also puts back what somebody else
// removed.
func (r *Router) Apply(s State) (changed bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.applyLocked(&s)
}

func (r *Router) applyLocked(s *State) (changed bool, err error) {
	if r.want == nil && !r.opts.SplitLate {
		r.splitTables()
	}
	r.want, r.known = s, false
	var errs []error
	note := func(c bool, err error) {
		changed = changed || c
		errs = append(errs, err)
	}
	for f := range redirect.Families {
		w, tables, rules, err := r.diff(f, s)
		r.sources[f] = w.source
		errs = append(errs, err)
		for i := range tables {
			note(each(tables[i].add, r.replaceRoute))
			_, err := each(tables[i].moved, r.replaceRoute)
			note(false, err)
		}
		if s.repliesByClient() {
			note(r.clients.apply(f))
		}
		note(each(rules.add, r.addRule))
		note(each(rules.remove, r.removeRule))
		for i := range tables {
			note(each(tables[i].remove, r.removeRoute))
		}
	}
	err = errors.Join(errs...)
	r.known = err == nil
	return changed, err
}

// Verify is Apply for the last state that Put was given.
func (r *Router) Verify() (repaired bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.applyLocked(r.want)
}

// Check returns the error that Apply would give for what is in the kernel now,
// and changes nothing.
func (r *Router) Check(s State) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for f := range redirect.Families {
		_, _, _, err := r.diff(f, &s)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// diff compares the kernel's tables of a family with a state. The error names
// what is left out, and why.
func (r *Router) diff(f service.Family, s *State) (w wants, tables [ourTables]routeChanges, rules ruleChanges, err error) {
	if w, err = r.wanted(f, s); err != nil {
		return w, tables, rules, err
	}
	var errs []error
	for i, table := range r.tables() {
		var err error
		tables[i], err = r.diffRoutes(f, table, w.routes[i], w.source)
		if r.isReplyTable(table) && s.repliesByClient() {
			tables[i] = routeChanges{} // its routes are the clients'
		}
		errs = append(errs, err)
		if err != nil {
			// The table may hold anything: send no further packets there.
			w.noMoreRules = append(w.noMoreRules, table)
		}
	}
	rules, err = r.diffRules(f, &w)
	return w, tables, rules, errors.Join(append(errs, err)...)
}

// tables are those that hold routes of ours, in the order of wants.routes.
func (r *Router) tables() [ourTables]int {
	return [...]int{syscall.RT_TABLE_LOCAL, r.opts.SteerTable, r.opts.ReplyTable, r.opts.ReplyTable + 1}
}

const ourTables = 4

func (r *Router) isReplyTable(table int) bool {
	return table == r.opts.ReplyTable || table == r.opts.ReplyTable+1
}

// wants is what a state asks for in one family.
type wants struct {
	source netip.Addr // of the node's own connections to services; may be none
	routes [ourTables][]netip.Prefix
	rules  []rule
	// noMoreRules are the tables that get no further rules.
	noMoreRules []int
}

func (r *Router) wanted(f service.Family, s *State) (w wants, err error) {
	for _, p := range redirect.Ranges(s.Local) {
		if service.FamilyOf(p.Addr()) == f {
			w.routes[0] = append(w.routes[0], p)
		}
	}
	for a := range s.NonLocal.Keys() {
		if service.FamilyOf(a) == f {
			w.routes[1] = append(w.routes[1], netip.PrefixFrom(a, a.BitLen()))
		}
	}
	slices.SortFunc(w.routes[1], func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	if len(w.routes[0])+len(w.routes[1]) > 0 {
		if w.source, err = r.source(f, s); err != nil {
			return w, err
		}
	}
	for d := range s.PortRules.Keys() {
		if service.FamilyOf(d.Addr) == f {
			w.rules = append(w.rules, r.portRule(d))
		}
	}
	// Only these: the rules of replies have an order of their own, see replyRules.
	slices.SortFunc(w.rules, compareRules)
	if !r.hasFamily(f) {
		return w, nil
	}
	if s.MarkSteers {
		w.rules = append(w.rules, r.steerRule(f))
	}
	if replies := r.replyRules(f, s); len(replies) > 0 {
		w.routes[2] = []netip.Prefix{defaultRoute(f)}
		if s.repliesByClient() {
			w.routes[3] = w.routes[2]
		}
		w.rules = append(w.rules, replies...)
	}
	return w, nil
}

// hasFamily reports whether this namespace routes an address family: IPv6 can be
// missing in the kernel or be switched off, which is no error as long as nobody
// asks for an address of it.
func (r *Router) hasFamily(f service.Family) bool {
	if f == service.IPv4 {
		return true
	}
	lo, err := r.nl.LinkByIndex(kernel.Loopback)
	if err != nil {
		return false
	}
	addrs, err := r.nl.AddrList(lo, netlinkFamily(f))
	return err == nil && slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.IsLoopback() })
}

// each calls do for all of a list, whatever errors there are, and reports whether
// there was anything to do.
func each[T any](list []T, do func(*T) error) (changed bool, err error) {
	var errs []error
	for i := range list {
		errs = append(errs, do(&list[i]))
	}
	return len(list) > 0, errors.Join(errs...)
}

func netlinkFamily(f service.Family) int {
	if f == service.IPv6 {
		return netlink.FAMILY_V6
	}
	return netlink.FAMILY_V4
}

// noSuchFamily reports whether an error is that of a kernel that does not have an address
// family, or nothing in a routing table.
func noSuchFamily(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EAFNOSUPPORT) || errors.Is(err, syscall.EOPNOTSUPP)
}

func missingRight(err error) error {
	return &redirect.MissingError{Mode: "routes", Feature: redirect.FeatureNetAdmin, Remedy: redirect.RemedyNetAdmin, Err: err}
}
