// Package choose picks the mode that fits this kernel: the best of those that work in
// a trial, whatever the kernel's version says.
//
//	choice, err := choose.Open(choose.Options{Mode: choose.Auto})
//	log.Info().Msg(choice.String())
//	choice.Redirector.Apply(plan)
//
// A trial is a small test of the whole mode in a temporary network namespace: it
// applies a plan, makes a connection through it to a listening socket, has another
// one refused, and has an endpoint answer to a client's address. Where no namespace
// can be made, each mode checks by itself what it lacks, which changes nothing.
//
// Endpoints should see clients' addresses: a mode that cannot do that is taken only
// if no other works, with the node's address.
package choose

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/bind"
	"github.com/sluice-proxy/sluice/redirect/iptables"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/sklookup"
	"github.com/sluice-proxy/sluice/redirect/tproxy"
)

// The modes and the backends of TProxy.
const (
	Auto     = "auto"
	TProxy   = "tproxy"
	SkLookup = "sklookup"
	Both     = "sklookup+nftables"
	Bind     = "bind"

	NFTables = "nftables"
	IPTables = "iptables"
)

// Modes and Backends are what Options may say.
var (
	Modes    = []string{Auto, Both, TProxy, SkLookup, Bind}
	Backends = []string{Auto, NFTables, IPTables}
)

// Options say what to choose from, and what the modes are to make.
type Options struct {
	// Mode is one of Modes; empty means Auto.
	Mode string
	// Backend is one of Backends, for the mode TProxy; empty means Auto.
	Backend string
	// Table is the name of the nftables table.
	Table string
	// Routes are the numbers of routes and rules, without SocketMark.
	// Routes.NetNS is where to steer.
	Routes route.Options
	// SocketMark is that of sockets, for netfilter.
	SocketMark uint32
	// ReplyPorts, first and last, are the local ports of sockets that are bound
	// to clients' addresses; zero means the mode's own default.
	ReplyPorts [2]uint16
	// NoReplies leaves clients' addresses alone: no socket is bound to them.
	NoReplies bool
	// Conntrack says whether connections to endpoints bypass connection tracking, in modes
	// that can do so.
	Conntrack redirect.Conntrack
	// BPFRoot is where the BPF file system is mounted, in which the program of sklookup
	// is pinned; empty: it is not pinned.
	BPFRoot string
	// Running is the name of the mode by which a process with the same names steers, which
	// this one replaces. It is taken without a trial if the options leave it and it can be
	// opened: a trial that fails on a busy machine would cut that process's connections.
	Running string
	// Beside says that a process with the same names steers, and keeps what it made until
	// the Redirector has a plan.
	Beside bool
}

// DefaultReplyPorts are those of modes without netfilter (F11): Linux clients
// use 32768 to 60999 by themselves.
var DefaultReplyPorts = [2]uint16{61000, 65534}

// unmarkedPorts returns the ports of modes that mark no packets.
func (o *Options) unmarkedPorts() [2]uint16 {
	switch {
	case o.NoReplies:
		return [2]uint16{}
	case o.ReplyPorts == [2]uint16{}:
		return DefaultReplyPorts
	}
	return o.ReplyPorts
}

func (o *Options) iptables() iptables.Options {
	return iptables.Options{Name: o.Table, Routes: o.markedRoutes(), ReplyPorts: o.ReplyPorts, NoReplies: o.NoReplies, Conntrack: o.Conntrack}
}

func (o *Options) nftables() tproxy.Options {
	return tproxy.Options{Table: o.Table, Routes: o.markedRoutes(), ReplyPorts: o.ReplyPorts, NoReplies: o.NoReplies, Conntrack: o.Conntrack}
}

func (o *Options) sklookup() sklookup.Options {
	return sklookup.Options{Routes: o.Routes, BPFRoot: o.BPFRoot, Name: o.Table}
}

// markedRoutes are the routes of modes that know sockets by their mark.
func (o *Options) markedRoutes() route.Options {
	routes := o.Routes
	routes.SocketMark = o.SocketMark
	return routes
}

// openBoth has a BPF program find the sockets, and nftables do what it cannot.
func openBoth(o Options) (redirect.Redirector, error) {
	table := o.nftables()
	table.Lookup = true
	beside, err := tproxy.New(table)
	if err != nil {
		return nil, err
	}
	finder := o.sklookup()
	finder.Beside = beside
	r, err := sklookup.New(finder)
	if err != nil {
		return nil, errors.Join(err, beside.Close())
	}
	return r, nil
}

// candidate is one mode, with its backend.
type candidate struct {
	name          string
	mode, backend string
	open          func(Options) (redirect.Redirector, error)
}

// all lists all of them, the best first: those that can do everything, the
// fastest of them first (docs/benchmarks.md), then those that cannot.
var all = []candidate{
	{"sklookup/nftables", Both, "", openBoth},
	{"tproxy/nftables", TProxy, NFTables, func(o Options) (redirect.Redirector, error) {
		return opened(tproxy.New(o.nftables()))
	}},
	{iptables.Name, TProxy, IPTables, func(o Options) (redirect.Redirector, error) {
		return opened(iptables.New(o.iptables()))
	}},
	{sklookup.Name, SkLookup, "", func(o Options) (redirect.Redirector, error) {
		if err := MayListen(o.Routes.NetNS); err != nil {
			return nil, err // before it finds out in words of its own
		}
		alone := o.sklookup()
		alone.ReplyPorts = o.unmarkedPorts()
		return opened(sklookup.New(alone))
	}},
	{bind.Name, Bind, "", func(o Options) (redirect.Redirector, error) {
		if err := MayListen(o.Routes.NetNS); err != nil {
			return nil, err // bind itself finds out when there are Services
		}
		return opened(bind.New(bind.Options{Routes: o.Routes, ReplyPorts: o.unmarkedPorts()}))
	}},
}

// opened keeps a nil pointer from becoming an interface that is not nil.
func opened[R redirect.Redirector](r R, err error) (redirect.Redirector, error) {
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Names returns the names of all modes, the best first.
func Names() []string {
	var names []string
	for _, w := range all {
		names = append(names, w.name)
	}
	return names
}

// Choice is the mode that was chosen.
type Choice struct {
	Redirector redirect.Redirector
	Name       string
	// Asked is whether it was the only one that the options left.
	Asked bool
	// IsRunning is whether it was taken as the one of Options.Running.
	IsRunning bool
	// NoReplies says why endpoints see the node's address, where nothing brings
	// answers to clients' addresses back; nil otherwise.
	NoReplies *RepliesError
	// Unpinned says why the BPF program ends with the process; nil if it does not, or
	// if the mode has none.
	Unpinned error
	// PassedOver are the better ones that do not work here.
	PassedOver []Failure
	// Took is how long the choice took.
	Took time.Duration
}

// Failure says why a mode does not work.
type Failure struct {
	Name string
	Err  error
}

// String says what was chosen, and why not the others.
func (c *Choice) String() string {
	text := "steering by " + c.Name
	if c.Asked {
		text += ", as asked for"
	}
	if c.IsRunning {
		text += ", as the running sluice does"
	}
	if c.NoReplies != nil {
		text += " with the node's address (" + c.NoReplies.Error() + ")"
	}
	for i, f := range c.PassedOver {
		text += [...]string{"; not ", ", not "}[min(i, 1)] + f.Name + " (" + Brief(f.Err) + ")"
	}
	if c.Unpinned != nil {
		text += "; the BPF program ends with the process (" + c.Unpinned.Error() + ")"
	}
	return text
}

// Brief says in a few words what is missing.
func Brief(err error) string {
	var missing *redirect.MissingError
	if errors.As(err, &missing) {
		return string(missing.Feature) + " is missing"
	}
	return err.Error()
}

// Open chooses and opens; nothing is steered yet. Where the options leave one
// mode only, it is opened without a trial, and its own error says what it lacks.
func Open(o Options) (*Choice, error) { return open(o, all, try) }

func open(o Options, from []candidate, try func(candidate, Options) error) (*Choice, error) {
	begin := time.Now()
	candidates, err := o.candidates(from)
	if err != nil {
		return nil, err
	}
	c, err := pick(o, candidates, try)
	if err != nil {
		return nil, err
	}
	if r, is := c.Redirector.(*sklookup.Redirector); is {
		c.Unpinned = r.Unpinned()
	} else if o.Beside {
		// A running process steers in the same mode, or the next Open is not beside it.
	} else if _, err := sklookup.Cleanup(o.sklookup()); err != nil {
		// The program of a killed process would keep packets from this mode's sockets.
		return nil, errors.Join(err, c.Redirector.Close())
	}
	c.Took = time.Since(begin)
	return c, nil
}

func pick(o Options, candidates []candidate, try func(candidate, Options) error) (c *Choice, err error) {
	c = &Choice{}
	if len(candidates) == 1 {
		c.Asked, c.Name = true, candidates[0].name
		c.Redirector, err = candidates[0].open(o)
		return c, err
	}
	for _, w := range candidates {
		if w.name == o.Running {
			if c.Redirector, err = openWhole(w, o); err == nil {
				c.Name, c.IsRunning = w.name, true
				return c, nil
			}
		}
	}
	var without *candidate // the best of those that bring no answers back
	for _, w := range candidates {
		err := try(w, o)
		if err == nil {
			c.Redirector, err = openWhole(w, o)
		}
		if err == nil {
			c.Name = w.name
			return c, nil
		}
		if clash := new(redirect.ClashError); errors.As(err, &clash) && !errors.As(err, new(*RepliesError)) {
			return nil, fmt.Errorf("%s: %w", w.name, err) // not a reason to steer otherwise
		}
		if errors.As(err, new(*RepliesError)) && without == nil {
			without = &w
		}
		c.PassedOver = append(c.PassedOver, Failure{w.name, err})
	}
	if without != nil {
		return c, c.openWithout(*without, o)
	}
	var errs []error
	for _, f := range c.PassedOver {
		errs = append(errs, fmt.Errorf("%s: %w", f.Name, f.Err))
	}
	return nil, fmt.Errorf("no mode works here; sluice doctor says what each needs:\n%w", errors.Join(errs...))
}

// openWhole opens a mode that brings answers back, if it is to.
func openWhole(w candidate, o Options) (redirect.Redirector, error) {
	r, err := w.open(o)
	if err != nil || o.NoReplies {
		return r, err
	}
	if err := claimsAnswers(r.Traits().Replies); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// openWithout takes a mode that was passed over because it brings no
// answers back.
func (c *Choice) openWithout(w candidate, o Options) (err error) {
	i := slices.IndexFunc(c.PassedOver, func(f Failure) bool { return f.Name == w.name })
	errors.As(c.PassedOver[i].Err, &c.NoReplies)
	c.PassedOver = slices.Delete(c.PassedOver, i, i+1)
	o.NoReplies = true
	c.Name = w.name
	c.Redirector, err = w.open(o)
	return err
}

// candidates are those that the options leave.
func (o Options) candidates(from []candidate) ([]candidate, error) {
	var left []candidate
	for _, w := range from {
		if o.Mode != "" && o.Mode != Auto && o.Mode != w.mode {
			continue
		}
		if w.mode == TProxy && o.Backend != "" && o.Backend != Auto && o.Backend != w.backend {
			continue
		}
		left = append(left, w)
	}
	if len(left) == 0 {
		return nil, fmt.Errorf("no mode is called %q with the backend %q; modes are %s, backends of tproxy %s",
			o.Mode, o.Backend, strings.Join(Modes, ", "), strings.Join(Backends, ", "))
	}
	return left, nil
}

// Cleanup removes what any mode left behind in Options.Routes.NetNS,
// whatever mode the options name. It gives a line for each thing that it
// removed.
func Cleanup(o Options) (removed []string, err error) {
	// What bind and sklookup leave are routes and rules, the same as tproxy's.
	removed, err = tproxy.Cleanup(o.nftables())
	rules, rulesErr := iptables.Cleanup(o.iptables())
	pins, pinsErr := sklookup.Cleanup(o.sklookup())
	return slices.Concat(removed, rules, pins), errors.Join(err, rulesErr, pinsErr)
}
