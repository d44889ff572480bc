package stream

import (
	"io"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
)

// halfOpen makes a client's handshake with a destination stop short of its end,
// as if the last packet were on its way; the client has a connection by then.
// What it gives lets the handshake end, and wants an answer.
func (n *node) halfOpen(fd int, address string) (finish func()) {
	n.t.Helper()
	openingOnly := []sys.FilterOp{
		{Code: sys.FilterLoadWord, K: 12}, // of the TCP header, with the flags
		{Code: sys.FilterAnd, K: 0x00020000},
		{Code: 0x16}, // return A
	}
	if e := sys.AttachFilter(fd, openingOnly); e != 0 {
		n.t.Fatal(e)
	}
	c := n.dial(address)
	return func() {
		n.t.Helper()
		if !n.silences(fd) {
			sys.DetachFilter(fd) // another one may have done it
		}
		const want = "b1:8080\nx"
		got := make([]byte, len(want))
		if _, err := c.Write([]byte("x")); err != nil {
			n.t.Error(err)
		}
		if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
			n.t.Errorf("%s, whose service went during the handshake: %q, %v", address, got, err)
		}
	}
}

// silences tells whether a socket has a filter of ours, in the place of a
// test's.
func (n *node) silences(fd int) bool {
	return slices.ContainsFunc(n.server.grace.dropping, func(d dropping) bool { return d.socket.fd == fd })
}

// Whoever had an answer before a service went is served by the policy of that
// time; whoever comes afterwards is refused.
func TestConnectionsInGraceAreServed(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	options, _ := onAddresses(lab)
	n := newNode(t, lab, options)
	ep := n.echo(0, 8080)
	full := nodePort(web("web", "10.97.0.1", ep), 30080)
	full.Services[0].Spec.ExternalIPs = []string{"192.0.2.1"}
	port := destination("10.1.0.1:30080")
	for what, change := range map[string]service.Change{
		"no endpoint is left": {Deleted: objects.Gone("web", 1).Deleted[1:]},
		"the service is gone": objects.Gone("web", 1),
	} {
		n.apply(full)
		target, _ := n.steer.plan.Steer.Get(destination("10.97.0.1:80"))
		listener := target.FD
		finish := []func(){
			n.halfOpen(listener, "10.97.0.1:80"),
			n.halfOpen(listener, "192.0.2.1:80"),
			n.halfOpen(n.server.bound[port].socket.fd, "10.1.0.1:30080"),
		}
		n.apply(change)
		for range 2 { // what follows makes no difference
			n.apply(web("other", "10.96.0.9", ep))
			n.apply(objects.Gone("other", 1))
			n.maintain()
		}
		n.want(lab.Client, "10.1.0.1:30080", "refused")
		for _, f := range finish {
			f()
		}
		n.pass()
		if past, left := len(n.server.state.Load().past), len(n.server.grace.closing); past+left > 0 {
			t.Errorf("%s: %d policies and %d sockets kept after the grace period", what, past, left)
		}
	}
	n.stop()
	if got := n.records.Ends(); got[conntrack.NoEndpoints]+got[conntrack.NotAdmitted] > 0 || n.server.Stats().Strays > 0 {
		t.Errorf("ends %v, %d strays", got, n.server.Stats().Strays)
	}
}

// Connections in grace have further attempts by the policy of that time too.
func TestConnectionsInGraceAreServedAfterAFailedAttempt(t *testing.T) {
	netns.Require(t)
	for what, change := range map[string]service.Change{
		"no endpoint is left": {Deleted: objects.Gone("web", 2).Deleted[1:]},
		"the service is gone": objects.Gone("web", 2),
	} {
		n := newNode(t, netns.NewLab(t, 1), func(o *setup) { o.Balancer.Plan = besideSilent })
		n.apply(web("web", "10.97.0.1", n.echo(0, 8080), n.silent()))
		target, _ := n.steer.plan.Steer.Get(destination("10.97.0.1:80"))
		var finish []func()
		for range 3 { // the endpoints take turns: one at least meets the silent one
			finish = append(finish, n.halfOpen(target.FD, "10.97.0.1:80"))
		}
		n.apply(change)
		for _, f := range finish {
			f()
		}
		n.stop()
		failed := 0
		for _, r := range n.records.All() {
			failed += len(r.Failed)
		}
		if failed == 0 {
			t.Errorf("%s: no connection met the silent endpoint: it proves nothing", what)
		}
	}
}

// Also where the socket itself becomes silent; later it is that to all packets.
func TestConnectionsInGraceToDroppingSocketsAreServed(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	options, _ := onAddresses(lab)
	n := newNode(t, lab, func(o *setup) { options(o); byRoutes(t, lab, o) })
	full := web("web", "10.96.0.3", n.echo(0, 8080))
	local := web("web", "10.96.0.3", netip.MustParseAddrPort("10.2.1.2:8080"))
	policy := corev1.ServiceInternalTrafficPolicyLocal
	local.Services[0].Spec.InternalTrafficPolicy = &policy
	n.apply(full)
	n.want(lab.Client, "10.96.0.3:80", "b1:8080")
	finish := n.halfOpen(n.server.bound[destination("10.96.0.3:80")].socket.fd, "10.96.0.3:80")
	n.apply(local)
	n.want(lab.Client, "10.96.0.3:80", "silence") // A3.5
	finish()
	n.pass()
	if left := len(n.server.grace.dropping); left > 0 {
		t.Errorf("%d sockets are still in their grace period", left)
	}
	n.want(lab.Client, "10.96.0.3:80", "silence")
	n.stop()
	if got := n.records.Ends(); got[conntrack.NotAdmitted] > 0 {
		t.Errorf("ends %v", got)
	}
}

// Destinations that are withdrawn are in grace once, not for ever: another policy that
// serves them not is not gone behind.
func TestGraceIsDecidedByTheLastPolicyThatServed(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) { o.Redirector.(*spy).Redirector = nowhere{} })
	vip, client := netip.MustParseAddrPort("10.96.0.1:80"), netip.MustParseAddr("10.1.0.2")
	inGrace := func() string {
		s := n.server.state.Load()
		now := s.table.Resolve(service.TCP, client, vip)
		_, v := s.inGrace(service.TCP, client, vip, now, n.server.clock())
		if len(v.Candidates) == 0 {
			return v.Action.String()
		}
		return v.Candidates[0].Addr.String()
	}
	want := func(what, want string) {
		t.Helper()
		check.Equalf(t, inGrace(), want, "%s", what)
	}
	n.apply(web("web", "10.96.0.1", netip.MustParseAddrPort("10.2.1.2:1")))
	n.apply(objects.Gone("web", 1))
	want("gone", "10.2.1.2:1")
	n.apply(web("web", "10.96.0.1", netip.MustParseAddrPort("10.2.1.2:2")))
	want("back", "10.2.1.2:2")
	n.apply(service.Change{Deleted: objects.Gone("web", 1).Deleted[1:]})
	want("without endpoints", "10.2.1.2:2")
	for range 2 * maxPast {
		n.apply(web("other", "10.96.0.9", netip.MustParseAddrPort("10.2.1.2:2")))
		n.apply(objects.Gone("other", 1))
	}
	if got := len(n.server.state.Load().past); got > maxPast {
		t.Errorf("%d policies are kept, want at most %d", got, maxPast)
	}
	n.pass()
	want("later", "refuse")
}
