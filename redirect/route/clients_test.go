package route

import (
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// clientRoutes gives the routes of the reply tables, without what is the same in
// all of them.
func clientRoutes(t *testing.T, r *Router) string {
	t.Helper()
	var list []string
	for line := range strings.Lines(dump(t, r)) {
		if to, is := strings.CutPrefix(line, "route local "); is {
			to, table, _ := strings.Cut(strings.TrimSpace(to), " dev lo table ")
			list = append(list, to+" "+strings.TrimSuffix(table, " proto 83"))
		}
	}
	return strings.Join(list, ", ")
}

// TestClientsHaveRoutesWhileTheyAreServed: F11: answers are taken for clients of
// this node alone, and clients behind it have other ports than those elsewhere,
// who may be clients of another node too.
func TestClientsHaveRoutesWhileTheyAreServed(t *testing.T) {
	c := netns.NewCluster(t)
	r := open(t, c.Node, Options{})
	state := State{ReplyPorts: [2]uint16{61000, 65534}}
	replies := r.RepliesByPort(state.ReplyPorts)
	if _, err := replies.Clients.Hold(c.Pods[0].IPv4); err == nil {
		t.Error("a client is held before any rule leads to its route")
	}
	netns.Wire(t, c.Node.Namespace, "tunnel", nil, c.World.Namespace, "tunnel", nil)
	tunnel, err := c.Node.Netlink().LinkByName("tunnel")
	if err == nil {
		err = c.Node.Netlink().LinkSetARPOff(tunnel)
	}
	if err == nil {
		err = c.Node.AddLinkRoute(netip.MustParsePrefix("10.244.9.0/24"), "tunnel")
	}
	must.OK(t, err)
	apply(t, r, state, true)
	apply(t, r, state, false)
	behind, others := [2]uint16{61000, 63267}, [2]uint16{63268, 65534}
	for _, k := range []struct {
		what  string
		addr  netip.Addr
		ports [2]uint16
	}{
		{"a pod", c.Pods[0].IPv4, behind},
		{"a pod, IPv6", c.Pods[0].IPv6, behind},
		{"a pod again", c.Pods[0].IPv4, behind},
		{"a pod of another node", c.Remote[0].IPv4, others},
		{"a pod of another node, IPv6", c.Remote[0].IPv6, others},
		{"by a tunnel without gateway", netip.MustParseAddr("10.244.9.2"), others},
		{"by the default route", netip.MustParseAddr("192.0.2.1"), others},
		{"on the network of the default route", c.World.IPv6, others},
	} {
		if got, err := replies.Clients.Hold(k.addr); err != nil || got != k.ports {
			t.Errorf("%s: ports %v, %v, want %v", k.what, got, err, k.ports)
		}
	}
	const all = "10.244.1.2/32 8377, fd00:244:1::2/128 8377, 10.244.2.2/32 8378, 10.244.9.2/32 8378, 192.0.2.1/32 8378, fd00:244:2::2/128 8378, fd00:9::2/128 8378"
	check.Equal(t, clientRoutes(t, r), all)
	apply(t, r, state, false)
	flushReplies(t, r)
	apply(t, r, state, true)
	check.Equalf(t, clientRoutes(t, r), all, "after a flush")

	// A route goes some time after the client's last socket.
	age := func() {
		for i := range r.clients.unused {
			u := &r.clients.unused[i]
			u.since = u.since.Add(-2 * clientLinger)
			if k := r.clients.held[u.addr]; k != nil && !k.unused.IsZero() {
				k.unused = u.since
			}
		}
	}
	for _, a := range []netip.Addr{c.Pods[0].IPv4, c.Pods[0].IPv4, c.Pods[0].IPv6, c.World.IPv6} {
		replies.Clients.Release(a)
	}
	apply(t, r, state, false)
	if _, err := replies.Clients.Hold(c.Pods[0].IPv6); err != nil { // again
		t.Fatal(err)
	}
	age()
	must.OK(t, must.Err(r.Apply(state)))
	const left = "fd00:244:1::2/128 8377, 10.244.2.2/32 8378, 10.244.9.2/32 8378, 192.0.2.1/32 8378, fd00:244:2::2/128 8378"
	check.Equalf(t, clientRoutes(t, r), left, "after a time")

	must.OK(t, must.Err(r.Remove()))
	if _, err := replies.Clients.Hold(c.Pods[0].IPv4); err == nil || dump(t, r) != "" {
		t.Errorf("held after the end: %v, %s", err, dump(t, r))
	}
}

func flushReplies(t *testing.T, r *Router) {
	t.Helper()
	for f := range redirect.Families {
		for _, table := range []int{r.opts.ReplyTable, r.opts.ReplyTable + 1} {
			routes := must.Get(r.routes(f, table))(t)
			for _, k := range routes {
				must.OK(t, r.removeRoute(&k))
			}
		}
	}
}

// TestUnusedClientsAreBounded: clients from very many addresses leave no more
// routes than a bound, and those in use stay.
func TestUnusedClientsAreBounded(t *testing.T) {
	c := netns.NewCluster(t)
	r := open(t, c.Node, Options{})
	state := State{ReplyPorts: [2]uint16{61000, 65534}}
	replies := r.RepliesByPort(state.ReplyPorts)
	apply(t, r, state, true)
	must.OK(t, must.Err(replies.Clients.Hold(c.Pods[0].IPv4)))
	addr := netip.MustParseAddr("198.18.0.0")
	for range mostUnused + 100 {
		addr = addr.Next()
		must.OK(t, must.Err(replies.Clients.Hold(addr)))
		replies.Clients.Release(addr)
	}
	check.Equalf(t, len(r.clients.held), mostUnused+1, "clients")
	if changed, err := r.Apply(state); changed || err != nil {
		t.Errorf("the routes are not those of the clients: %v, %v", changed, err)
	}
}

// TestClientsComeAndGoBesideApply: no client that has a socket is without its
// route when everything is still.
func TestClientsComeAndGoBesideApply(t *testing.T) {
	c := netns.NewCluster(t)
	r := open(t, c.Node, Options{})
	state := State{ReplyPorts: [2]uint16{61000, 65534}}
	replies := r.RepliesByPort(state.ReplyPorts)
	apply(t, r, state, true)
	var workers sync.WaitGroup
	for w := range 4 {
		workers.Go(func() {
			addr := netip.AddrFrom4([4]byte{198, 18, byte(w % 2), 0}) // two workers have the same clients
			for range 200 {
				addr = addr.Next()
				check.OK(t, must.Err(replies.Clients.Hold(addr)))
				if w > 0 {
					replies.Clients.Release(addr)
				}
			}
		})
	}
	for range 20 {
		check.OK(t, must.Err(r.Apply(state)))
	}
	workers.Wait()
	if changed, err := r.Apply(state); changed || err != nil {
		t.Errorf("the routes are not those of the clients: %v, %v", changed, err)
	}
}

// Another proxy of this kind may have marks, and the table after our reply table
// for its own answers: they stay.
func TestTheTableAfterOursMayBeAnothersReplyTable(t *testing.T) {
	lab := netns.NewLab(t, 0)
	lab.Settle(t)
	other := open(t, lab.Node, Options{SteerTable: 8400, ReplyTable: DefaultReplyTable + 1, SteerMark: 0x4, ReplyMark: 0x8})
	apply(t, other, State{MarkReplies: true, ReplyPorts: redirect.ReplyPorts}, true)
	before := dump(t, other)
	r := open(t, lab.Node, Options{})
	apply(t, r, State{MarkReplies: true, ReplyPorts: redirect.ReplyPorts}, true)
	apply(t, r, State{MarkReplies: true, ReplyPorts: redirect.ReplyPorts}, false)
	must.OK(t, must.Err(r.Remove()))
	check.Textf(t, dump(t, other), before, "the other proxy's")
}
