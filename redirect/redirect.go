// Package redirect steers packets that are sent to Services into this
// process's listening sockets.
//
// A [Plan] holds everything to steer, as plain data. Each change of the Services makes
// a new one. A [Redirector] puts it in force and keeps it there; there
// is one for each mode (redirect/tproxy, for example). It knows a service's addresses
// and listener ports, and nothing else of it.
//
//	lock, err := redirect.AcquireLock("sluice")   // one proxy in a network namespace
//	r, err := tproxy.New(tproxy.Options{})
//	err = r.Apply(plan)                           // again for each new plan: sends what changed
//	repaired, err := r.Verify()                   // every few seconds
//	err = r.Close()                               // undoes everything
//
// A connection that was accepted goes on whatever later plans say of its
// destination (A8.1, A8.7), as long as its address is in Plan.Local.
//
// Out of scope: listening, choosing endpoints, addresses of interfaces, and
// everything in the kernel that does not carry the package's names and numbers.
package redirect

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-proxy/sluice/service"
)

// ListenIPv4 and ListenIPv6 are the addresses that listeners bind to for
// destinations of their family. They are loopback addresses, so that no port opens to
// the outside: a listener accepts what was steered to it, and connections of this node
// to the address itself. The listeners need IP_TRANSPARENT.
var (
	ListenIPv4 = netip.AddrFrom4([4]byte{127, 83, 76, 1})
	ListenIPv6 = netip.IPv6Loopback()
)

// ListenAddress returns that of a family.
func ListenAddress(f service.Family) netip.Addr {
	return [...]netip.Addr{service.IPv4: ListenIPv4, service.IPv6: ListenIPv6}[f]
}

// Target says where connections to a destination go: to the listener on this
// port of ListenIPv4 or ListenIPv6, by the destination's family.
type Target struct {
	Port uint16
	// FD is the listening socket itself, for modes that hand it to
	// the kernel; 0 where the plan's maker has none to give. It stays open for
	// as long as a plan that names it is in force.
	FD int
}

// Traits are what a mode asks of listeners and gives to dials.
type Traits struct {
	// Name is what the log says, such as "tproxy/nftables".
	Name string
	// BindEach asks for a listening socket bound to each destination of
	// Plan.Steer (with IP_FREEBIND and IP_TRANSPARENT): steering only makes the
	// addresses local, and Targets mean nothing. A destination in Plan.Silent
	// then needs a listening socket that filters everything (F5).
	BindEach bool
	// MaxListeners is how many listening sockets of each protocol and family there
	// should be at most, as each makes steering slower; 0 means any number.
	MaxListeners int
	// PastMark is a mark that exempts a socket's packets from steering; 0 if there is
	// none. Sockets that bypass connection tracking are never steered.
	PastMark uint32
	// Replies says that an answer to a client's own address comes back to the
	// transparent socket that is connected from there (F7, F11).
	Replies Replies
}

// Plan is everything to steer. Its maps are immutable. A plan that is derived from
// another one shares the unchanged parts with it, so that Diff skips them: see [Map].
type Plan struct {
	// Steer are the destinations that listeners accept for.
	Steer Map[service.Destination, Target]
	// Refuse are the destinations that refuse (A3.4): TCP with a reset, UDP with ICMP
	// port unreachable.
	Refuse Set[service.Destination]
	// Silent are the destinations that do not answer (A3.5).
	Silent Set[service.Destination]
	// Local are the ranges that this node delivers to itself (F2): service
	// CIDRs, cluster IPs outside of them, and addresses that left the model
	// but still carry connections. Destinations to steer or refuse lie within.
	// TCP and UDP to an address of Local that nothing else in the Plan
	// says something about is dropped (A3.12, unallocated addresses). None lies
	// within another one: see [LocalOf]. SCTP to Local is the kernel's: it finds
	// the socket that is bound to the packet's destination, or answers with an ABORT.
	Local Set[netip.Prefix]
	// ClusterIPs are the addresses whose other ports refuse (A3.12), so that
	// the host's own wildcard servers are not reachable on them (F4).
	ClusterIPs Set[netip.Addr]
	// NonLocal are addresses that are not this node's to own: external and load
	// balancer IPs. Destinations to steer, refuse or silence may be on them;
	// everything else that is sent to them, and ping, goes on as if there were
	// no Redirector (A3.13). None lies in Local or is an address of this node.
	NonLocal Set[netip.Addr]
	// Lingering are destinations on NonLocal addresses that are no longer served
	// but still carry established connections (A8.7): those go on, and new
	// ones go past us.
	Lingering Set[service.Destination]
	// Own are destinations on this node's own addresses, node ports for
	// example, where listening sockets of ours are bound (A3.15). They need no
	// steering, and are only kept from connection tracking.
	Own Set[service.Destination]
	// Node are this node's own addresses but loopback's. Answers to sockets there
	// that pass connection tracking are looked for among what comes to them.
	Node Set[netip.Addr]
	// Sources are the addresses that this node's own connections to what the plan
	// names come from (F8). They count as long as an interface has them; else it is
	// that of the default route.
	Sources Sources
	// NodeSourceOnly says that client addresses are never used, so that no answers to
	// them have to be brought back.
	NodeSourceOnly bool
}

// Sources are at most one address of each family, by service.Family.
type Sources [2]netip.Addr

// Names reports whether the plan steers, refuses or silences a destination.
func (p *Plan) Names(d service.Destination) bool {
	return p.Steer.Has(d) || p.Refuse.Has(d) || p.Silent.Has(d)
}

// Redirector puts plans in force. Its methods are safe for concurrent use.
type Redirector interface {
	// Traits tell how it works; they never change.
	Traits() Traits
	// Apply replaces the plan in force, sending only what changed. When it returns
	// nil, new connections follow the plan. Meanwhile, a destination in both plans is
	// delivered to its listener alone, and no packet to Local leaves the node. After an
	// error nothing of the plan, or all of it but routes, is in force; calling it
	// again is safe.
	Apply(Plan) error
	// Verify checks that what was applied is still in the kernel and puts back
	// what is missing. It reports whether there was anything to put back.
	Verify() (repaired bool, err error)
	// Changed delivers a value when Verify should be called at once, because another
	// program may have changed what Apply put there, a few times a second at most. Our
	// own changes count too.
	Changed() <-chan struct{}
	// Close takes everything out of the kernel that Apply put there.
	Close() error
	// Leave ends the Redirector and leaves what is in the kernel to another process, which
	// has put a plan of its own in force.
	Leave()
}

// Validate returns what is wrong with a plan whose difference to a valid one is
// given, or nil. It looks at the difference only.
func (c *Changes) Validate(to *Plan) error {
	for _, s := range c.Steer {
		if s.Target.Port == 0 {
			return fmt.Errorf("steer %s: listener port 0", s.Destination)
		}
		if err := to.check(s.Destination); err != nil {
			return fmt.Errorf("steer %s: %w", s.Destination, err)
		}
	}
	return cmp.Or(
		firstWrong("refuse", c.Refuse.Add, to.check),
		firstWrong("silence", c.Silent.Add, to.check),
		firstWrong("cluster IP", c.ClusterIPs.Add, CheckAddr),
		c.validateLocal(to),
		firstWrong("non-local", c.NonLocal.Add, to.checkNonLocal),
		firstWrong("lingering", c.Lingering.Add, to.checkLingering),
		firstWrong("own", c.Own.Add, checkOwn),
	)
}

// firstWrong returns the first error of a check of all keys.
func firstWrong[K fmt.Stringer](what string, keys []K, check func(K) error) error {
	for _, k := range keys {
		if err := check(k); err != nil {
			return fmt.Errorf("%s %s: %w", what, k, err)
		}
	}
	return nil
}

// check returns what is wrong with a destination that the plan steers, refuses or
// silences: it may be in one of these sets only.
func (p *Plan) check(d service.Destination) error {
	switch steered, refused, silent := p.Steer.Has(d), p.Refuse.Has(d), p.Silent.Has(d); {
	case steered && refused:
		return errors.New("it is to be steered and refused")
	case steered && silent:
		return errors.New("it is to be steered and silent")
	case refused && silent:
		return errors.New("it is to be refused and silent")
	}
	return checkDestination(d)
}

func (p *Plan) checkNonLocal(a netip.Addr) error {
	if within, is := within(p.Local, a, a.BitLen()); is {
		return fmt.Errorf("lies in %s, which is local", within)
	}
	return CheckAddr(a)
}

func (p *Plan) checkLingering(d service.Destination) error {
	if !p.NonLocal.Has(d.Addr) {
		return errors.New("not on a non-local address")
	}
	return checkDestination(d)
}

// checkOwn accepts special addresses: whatever else an address is, the node has it.
func checkOwn(d service.Destination) error {
	if !isPlain(d.Addr) {
		return errNotPlain
	}
	return checkPort(d)
}

// validateLocal checks ranges. It reads all ranges and all non-local addresses, once,
// only if a new range is not a single address: another proxy's Services can cut the
// service ranges into many.
func (c *Changes) validateLocal(to *Plan) error {
	whole := false
	for _, l := range c.Local.Add {
		if err := CheckRange(l); err != nil {
			return fmt.Errorf("local %s: %w", l, err)
		}
		if outer, is := within(to.Local, l.Addr(), l.Bits()-1); is {
			return fmt.Errorf("local %s: lies in %s, which is local too", l, outer)
		}
		if !l.IsSingleIP() {
			whole = true
		} else if to.NonLocal.Has(l.Addr()) {
			return fmt.Errorf("local %s: is non-local, too", l)
		}
	}
	if !whole {
		return nil
	}
	for inner := range to.Local.Keys() {
		if outer, is := within(to.Local, inner.Addr(), inner.Bits()-1); is {
			return fmt.Errorf("local %s: lies in %s, which is local too", inner, outer)
		}
	}
	for a := range to.NonLocal.Keys() {
		if outer, is := within(to.Local, a, a.BitLen()); is {
			return fmt.Errorf("local %s: takes in the non-local address %s", outer, a)
		}
	}
	return nil
}

func checkDestination(d service.Destination) error { return cmp.Or(checkPort(d), CheckAddr(d.Addr)) }

func checkPort(d service.Destination) error {
	if d.Port == 0 {
		return errors.New("port 0")
	}
	if d.Protocol < service.TCP || d.Protocol > service.SCTP {
		return fmt.Errorf("protocol %d", d.Protocol)
	}
	return nil
}

var errNotPlain = errors.New("not a plain IPv4 or IPv6 address")

// CheckAddr returns why destinations of a plan cannot be on an address, or nil.
func CheckAddr(a netip.Addr) error {
	if !isPlain(a) {
		return errNotPlain
	}
	return service.CheckAddress(a)
}

func isPlain(a netip.Addr) bool { return a.IsValid() && !a.Is4In6() && a.Zone() == "" }

// CheckRange returns why this node cannot deliver a range to itself, or nil.
func CheckRange(p netip.Prefix) error {
	switch {
	case !p.IsValid() || !isPlain(p.Addr()):
		return fmt.Errorf("not an IPv4 or IPv6 range")
	case p != p.Masked():
		return fmt.Errorf("not the first address of a range")
	}
	return service.CheckRange(p)
}
