// Package steering plays the same scenes in every steering mode, in network
// namespaces: which clients reach which destinations, from another host and from
// the node itself, by IPv4 and IPv6, TCP and UDP.
//
//	func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }
//	func TestSteering(t *testing.T) { steering.Run(t, steering.Mode{...}) }
package steering

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// Mode is a mode, and what it cannot do.
type Mode struct {
	// New creates a Redirector in a node, as if in a separate process.
	New func(t testing.TB, node *netns.Host) redirect.Redirector
	// Kill does to the kernel's state what the end of the Redirector's process
	// does: it closes descriptors, and removes nothing.
	Kill func(t testing.TB, r redirect.Redirector)
	// Cleanup is that of the mode's package.
	Cleanup func(node *netns.Host) (removed []string, err error)

	// UnallocatedRefuses: an address of a service range that the plan does not
	// name refuses; it should drop (A3.12).
	UnallocatedRefuses bool
	// Unshielded: a wildcard server of the host is reachable on services'
	// addresses, and keeps a service from its port (F4).
	Unshielded bool
	// NonLocalSilent: an IPv4 destination to refuse drops, if its address is
	// non-local.
	NonLocalSilent bool
	// LingeringStays: a destination in its grace period still takes new
	// connections: it refuses them, or drops them with NonLocalSilent.
	LingeringStays bool
	// OwnLingeringRefuses: a destination in its grace period refuses new
	// connections of the node itself.
	OwnLingeringRefuses bool
	// Renumbers: a process that takes over from a killed one creates objects
	// again, with other numbers in the kernel.
	Renumbers bool
	// NonLocalUncounted: what is sent to non-local addresses is not counted.
	NonLocalUncounted bool
	// Uncounted: what is refused and dropped is not counted.
	Uncounted bool
}

// Run plays all scenes.
func Run(t *testing.T, m Mode) {
	t.Run("who reaches what", func(t *testing.T) { whoReachesWhat(t, m) })
	t.Run("non-local addresses", func(t *testing.T) { nonLocal(t, m) })
	t.Run("clients' own addresses", func(t *testing.T) { clientAddresses(t, m) })
	t.Run("changes leave connections alone", func(t *testing.T) { changes(t, m) })
	t.Run("nothing stays", func(t *testing.T) { nothingStays(t, m) })
	t.Run("plans that cannot be", func(t *testing.T) { plansThatCannotBe(t, m) })
	t.Run("refusals are counted", func(t *testing.T) { refusals(t, m) })
	t.Run("killed", func(t *testing.T) { killed(t, m) })
}

// stage is a lab with a Redirector and a front.
type stage struct {
	*netns.Lab
	mode  Mode
	steer redirect.Redirector
	front *Front
}

func newStage(t *testing.T, m Mode, backends int) *stage {
	t.Helper()
	s := &stage{Lab: netns.NewLab(t, backends), mode: m}
	s.front = NewFront(t, s.Node, "front")
	s.start(t)
	return s
}

func (s *stage) start(t *testing.T) {
	t.Helper()
	r := s.mode.New(t, s.Node)
	s.steer = r
	t.Cleanup(func() { check.OKf(t, r.Close(), "close") })
}

// another returns a second front, or the first where it binds for each plan.
func (s *stage) another(t *testing.T) *Front {
	t.Helper()
	if s.steer.Traits().BindEach {
		return s.front
	}
	return NewFront(t, s.Node, "second")
}

func (s *stage) apply(t *testing.T, p redirect.Plan) {
	t.Helper()
	if s.steer.Traits().BindEach {
		s.front.Bind(p)
	}
	must.OK(t, s.steer.Apply(p))
}

// fromEverywhere checks the results of clients on another host and on the node.
func (s *stage) fromEverywhere(t *testing.T, when string, want string, ds ...service.Destination) {
	t.Helper()
	type answer struct {
		from      *netns.Host
		to        service.Destination
		got, want string
	}
	answers := make(chan answer)
	for _, d := range ds {
		expect := want
		if want == served {
			expect = s.front.Says(d)
		}
		for _, from := range []*netns.Host{s.Client, s.Node} {
			go func() { answers <- answer{from, d, Reach(t, from, d, expect), expect} }()
		}
	}
	for range 2 * len(ds) {
		if a := <-answers; a.got != a.want {
			t.Errorf("%s: %s to %s: %q, want %q", when, a.from.Name(), a.to, a.got, a.want)
		}
	}
}

// served stands for the front's greeting.
const served = "served"

// Plan returns a plan with the usual service ranges.
func Plan(parts ...func(*redirect.Plan)) redirect.Plan {
	p := redirect.Plan{
		Local: redirect.LocalOf(netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd01::/112")),
	}
	for _, part := range parts {
		part(&p)
	}
	return p
}

// nonLocalRange holds the non-local addresses of the scenes.
var nonLocalRange = [2]netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/64")}

func own(p *redirect.Plan, d service.Destination) {
	for _, r := range nonLocalRange {
		if r.Contains(d.Addr) {
			p.NonLocal = p.NonLocal.With(d.Addr, struct{}{})
			return
		}
	}
	p.ClusterIPs = p.ClusterIPs.With(d.Addr, struct{}{})
}

// Steer makes a front serve destinations.
func Steer(f *Front, ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Steer = p.Steer.With(d, f.Target(d))
			own(p, d)
		}
	}
}

// Refuse makes destinations refuse.
func Refuse(ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Refuse = p.Refuse.With(d, struct{}{})
			own(p, d)
		}
	}
}

// Silent makes destinations drop.
func Silent(ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Silent = p.Silent.With(d, struct{}{})
			own(p, d)
		}
	}
}

// Linger makes destinations serve only established connections.
func Linger(ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Lingering = p.Lingering.With(d, struct{}{})
			own(p, d)
		}
	}
}

// At returns the destination at an address and port.
func At(s string, p service.Protocol) service.Destination {
	a := netip.MustParseAddrPort(s)
	return service.Destination{Addr: a.Addr(), Port: a.Port(), Protocol: p}
}

// TCP is At for TCP.
func TCP(s string) service.Destination { return At(s, service.TCP) }

// UDP is At for UDP.
func UDP(s string) service.Destination { return At(s, service.UDP) }

// SCTP is At for SCTP.
func SCTP(s string) service.Destination { return At(s, service.SCTP) }

// Same compares dumps, line by line.
func Same(t testing.TB, before, after string) {
	t.Helper()
	if before == after {
		return
	}
	was, is := strings.Split(before, "\n"), strings.Split(after, "\n")
	for _, l := range was {
		if !slices.Contains(is, l) {
			t.Errorf("gone: %s", l)
		}
	}
	for _, l := range is {
		if !slices.Contains(was, l) {
			t.Errorf("left: %s", l)
		}
	}
	if !t.Failed() {
		t.Errorf("not the same order:\n%s\nwas:\n%s", after, before)
	}
}

// all returns a destination by TCP and UDP at both addresses.
func all(v4, v6 string, port uint16) []service.Destination {
	return append(both(service.TCP, v4, v6, port), both(service.UDP, v4, v6, port)...)
}

func both(p service.Protocol, v4, v6 string, port uint16) []service.Destination {
	return []service.Destination{
		{Addr: netip.MustParseAddr(v4), Port: port, Protocol: p},
		{Addr: netip.MustParseAddr(v6), Port: port, Protocol: p},
	}
}
