package stream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/listener"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
	"github.com/sluice-proxy/sluice/test/steering"
	"github.com/sluice-proxy/sluice/test/wait"
)

// before is the Server that another one takes over from, as that of another process.
type before struct {
	*Server
	n       *node
	conn    *handover.Conn // to the next process
	next    *handover.Conn // to this one
	sockets *handover.Sockets
}

// takeOver has a new Server, with a table of its own, take the node's place as far as it has the
// sockets of the one before. The first apply follows.
func (n *node) takeOver() *before {
	n.t.Helper()
	b := &before{Server: n.server, n: n}
	address := fmt.Sprint(n.t.Name(), os.Getpid())
	offer := must.Get(handover.Listen(address, func() (r handover.Running) { return r }))(n.t)
	defer offer.Close()
	failed := make(chan error, 1)
	go func() {
		var err error
		b.conn, err = offer.Accept()
		if err == nil {
			err = b.conn.Give(b.Sockets(), nil)
		}
		failed <- err
	}()
	b.next = must.Get(handover.Dial(address))(n.t)
	var err error
	b.sockets, _, err = b.next.Take()
	must.OK(n.t, errors.Join(err, <-failed))
	manager, table := n.manager, n.table
	n.t.Cleanup(func() {
		_, _ = b.conn.Close(), b.next.Close()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		check.OK(n.t, errors.Join(manager.Stop(ctx), table.Close(ctx)))
		check.Equalf(n.t, b.Stats().Open, 0, "connections open before the take-over")
	})
	n.table = conntrack.NewTable(conntrack.Options{Shards: loops, Sink: &n.records})
	o := b.Server.options
	o.Table = n.table
	n.server = New(o)
	n.options.Table, n.options.Descriptors, n.options.DataPaths = n.table, n.server, []listener.DataPath{n.server}
	n.options.Protocols = map[service.Protocol]listener.Protocol{
		service.TCP: {Ports: n.server, Listeners: n.server, SocketsPerPort: 1, KeepsConnections: true},
	}
	n.manager = listener.New(n.options)
	n.server.Inherit(b.sockets)
	return b
}

// leave has the Server that has taken over accept, and the one before not. It returns the names of
// sockets that serve no more.
func (b *before) leave() []string {
	b.n.server.Begin()
	unused := b.sockets.Close()
	b.Leave()
	return unused
}

// wantMoved moves what can move to the Server that has taken over.
func (b *before) wantMoved(want int) {
	b.n.t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			if _, err := b.next.TakeMoved(b.n.server.Take, func([]handover.State) {}); err != nil {
				return
			}
		}
	}()
	pauses, err := b.Move(b.conn.Move)
	check.OK(b.n.t, err)
	check.Equalf(b.n.t, len(pauses), want, "connections that have moved")
	_ = b.conn.Close()
	<-done
}

// says sends a line on a connection to n.echo, and wants it back.
func says(t *testing.T, c net.Conn, line string) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(patience))
	check.OK(t, must.Err(io.WriteString(c, line)))
	back := make([]byte, len(line))
	if _, err := io.ReadFull(c, back); err != nil || string(back) != line {
		t.Errorf("%q comes back as %q, %v", line, back, err)
	}
}

// ended gives the record of a Service's only connection, once it has one.
func (n *node) ended(service string) (found conntrack.Record) {
	n.t.Helper()
	wait.True(n.t, "the record of "+service, func() bool {
		all := n.records.All()
		i := slices.IndexFunc(all, func(r conntrack.Record) bool { return r.Port.Name.Name.Name == service })
		if i >= 0 {
			found = all[i]
		}
		return i >= 0
	})
	return found
}

// TestConnectionsMove: what is relayed or held goes on in the next process, with one record that
// tells of both. One whose address is another Service's by then ends where it is.
func TestConnectionsMove(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), nil)
	echo := n.echo(0, 8080)
	n.apply(web("relayed", "10.96.0.1", echo))
	n.apply(annotate(web("held", "10.96.0.2"), "hold", "10m", "proxy-protocol", "v1"))
	n.apply(web("gone", "10.96.0.3", echo))
	relayed, held, stays := n.dial("10.96.0.1:80"), n.dial("10.96.0.2:80"), n.dial("10.96.0.3:80")
	name(t, relayed)
	name(t, stays)
	ask(t, held)
	wait.True(t, "a held connection", func() bool { return n.server.Stats().Held == 1 })
	targets := maps.Collect(n.steer.plan.Steer.All())

	b := n.takeOver()
	other := web("other", "10.96.0.3", echo)
	other.Deleted = objects.Gone("gone", 1).Deleted
	n.apply(other)
	check.EqualSlicesf(t, b.leave(), []string{"TCP steered IPv4 test/gone"}, "sockets that nobody needs")
	for _, at := range []service.Destination{destination("10.96.0.1:80"), destination("10.96.0.2:80")} {
		target, _ := n.steer.plan.Steer.Get(at)
		check.Equalf(t, target.Port, targets[at].Port, "the port of the listening socket for %s", at.Addr)
	}
	b.wantMoved(2)
	check.Equalf(t, b.Stats().Open, 1, "connections that stay")
	check.Equalf(t, b.Stats().Held, 0, "held connections that stay")
	wait.True(t, "the held connection has moved", func() bool { return n.server.Stats().Held == 1 })
	name(t, n.dial("10.96.0.1:80"))
	check.Equalf(t, n.server.Stats().Open, 3, "connections with a new one")
	says(t, stays, "hello")
	says(t, relayed, "hello")

	n.apply(annotate(web("held", "10.96.0.2", echo), "hold", "10m", "proxy-protocol", "v1"))
	_ = held.SetDeadline(time.Now().Add(patience))
	port := held.LocalAddr().(*net.TCPAddr).Port
	want := fmt.Sprintf("b1:8080\nPROXY TCP4 10.1.0.2 10.96.0.2 %d 80\r\na question\n", port)
	check.Equalf(t, string(must.Get(io.ReadAll(held))(t)), want, "the held client gets")
	_, _ = relayed.Close(), stays.Close()
	r := n.ended("relayed")
	check.Equalf(t, r.Client.String(), relayed.LocalAddr().String(), "the client")
	check.Equalf(t, r.Endpoint.Addr, echo, "the endpoint")
	if r.End != conntrack.ClientFin || r.Attempts != 1 || r.BytesFromClient != 12+5 || r.BytesFromEndpoint != 8+12+5 {
		t.Errorf("%s, %d attempts, %d and %d bytes", r.End, r.Attempts, r.BytesFromClient, r.BytesFromEndpoint)
	}
	if r.FirstByte < r.ConnectTime || r.Duration < r.FirstByte || r.WaitTime() != 0 {
		t.Errorf("connected at %d, first byte %d, end %d, waited %d", r.ConnectTime, r.FirstByte, r.Duration, r.WaitTime())
	}
	r = n.ended("held")
	if r.End != conntrack.ClientFin || r.WaitTime() == 0 || r.ConnectTime < r.WaitTime() || r.Attempts != 1 {
		t.Errorf("held: %s, waited %d, connected at %d, %d attempts", r.End, r.WaitTime(), r.ConnectTime, r.Attempts)
	}
	check.Equalf(t, n.ended("gone").End, conntrack.ClientFin, "the end of the one that stayed")
	n.stop()
	check.Equalf(t, len(n.records.All()), 4, "records of four connections")
}

// TestBoundSocketsMove: in the next process, the sockets of node ports do at once what they did, and
// something else later (A3.15). No other program gets the ports in between. A client that came when
// nobody accepted is served.
func TestBoundSocketsMove(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	options, _ := onAddresses(lab)
	n := newNode(t, lab, options)
	live := n.echo(0, 8080)
	apply := func(service string, port int32, local bool, endpoints ...netip.AddrPort) {
		t.Helper()
		c := nodePort(web(service, fmt.Sprintf("10.96.0.%d", port-30079), endpoints...), port)
		if local {
			c.Services[0].Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		}
		n.apply(c)
	}
	apply("serves", 30080, false, live)
	apply("never", 30081, false)
	apply("lost", 30082, false, live)
	n.apply(service.Change{Deleted: objects.Gone("lost", 1).Deleted[1:]})
	apply("local", 30083, true, live)
	listeners := n.server.Stats().Listeners

	b := n.takeOver()
	n.apply(service.Change{})
	b.Leave()
	waits := n.dial("10.1.0.1:30080")
	check.EqualSlicesf(t, b.leave(), []string{"TCP steered IPv4 test/lost"}, "sockets that nobody needs")
	check.Equal(t, name(t, waits), "b1:8080")
	if s := n.manager.Stats(); s.Claims != 4 || s.Conflicts != 0 {
		t.Errorf("%d claims, %d conflicts", s.Claims, s.Conflicts)
	}
	check.Equalf(t, n.server.Stats().Listeners, listeners-1, "sockets that listen, all but the one that is not needed")
	for i, want := range []string{"b1:8080", "refused", "refused", "silence"} {
		port := 30080 + i
		n.want(lab.Client, fmt.Sprintf("10.1.0.1:%d", port), want)
		l, err := lab.Node.Listen("tcp", fmt.Sprintf("10.1.0.1:%d", port))
		check.ErrorIsf(t, err, syscall.EADDRINUSE, "another program listens on port %d", port)
		if err == nil {
			_ = l.Close()
		}
	}
	apply("serves", 30080, false)
	n.apply(service.Change{Deleted: objects.Gone("serves", 1).Deleted[1:]})
	n.want(lab.Client, "10.1.0.1:30080", "refused")
	for i, service := range []string{"never", "lost", "local"} {
		apply(service, int32(30081+i), false, live)
		n.want(lab.Client, fmt.Sprintf("10.1.0.1:%d", 30081+i), "b1:8080")
	}
}

// end ends the open connection of a client from outside.
func (n *node) end(end conntrack.End, client net.Conn) {
	n.t.Helper()
	is := func(r *conntrack.Record) bool { return r.Client.String() == client.LocalAddr().String() }
	ended, err := n.table.EndWhere(context.Background(), conntrack.OnLoops(n.server.loops), 1, end, is)
	check.OK(n.t, err)
	check.Equalf(n.t, ended, 1, "connections that were to end with %s", end)
}

// isReset wants a client to be reset.
func isReset(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(patience))
	check.ErrorIsf(t, must.Err(io.Copy(io.Discard, c)), syscall.ECONNRESET, "%s", c.LocalAddr())
}

// TestConnectionsStay: a connection that no other process takes goes on, unless somebody ended it
// meanwhile. It is offered again only if the other process could not answer.
func TestConnectionsStay(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), nil)
	echo := n.echo(0, 8080)
	n.apply(web("web", "10.96.0.1", echo))
	n.apply(annotate(web("held", "10.96.0.2"), "hold", "10m"))
	relayed, balanced, killed := n.dial("10.96.0.1:80"), n.dial("10.96.0.1:80"), n.dial("10.96.0.1:80")
	for _, c := range []net.Conn{relayed, balanced, killed} {
		name(t, c)
	}
	held, heldKilled := n.dial("10.96.0.2:80"), n.dial("10.96.0.2:80")
	wait.True(t, "held connections", func() bool { return n.server.Stats().Held == 2 })
	broken, offered := errors.New("broken"), 0
	pauses, err := n.server.Move(func(list []handover.Moved) ([]bool, error) {
		offered += len(list)
		return make([]bool, len(list)), broken
	})
	if len(pauses) != 0 || err != broken || offered == 0 { // the first loop's
		t.Errorf("%d of %d connections have moved, %v, want %v", len(pauses), offered, err, broken)
	}
	kinds := map[string]int{}
	ends := map[conntrack.End]net.Conn{
		conntrack.Rebalanced: balanced, conntrack.Admin: killed, conntrack.Drained: heldKilled,
	}
	stay := func(list []handover.Moved) ([]bool, error) {
		for _, m := range list {
			kinds[m.Kind]++
			var is movedConn
			check.OK(t, json.Unmarshal(m.State, &is))
			for end, client := range ends {
				if is.Record.Client.String() == client.LocalAddr().String() {
					n.end(end, client)
				}
			}
		}
		return make([]bool, len(list)), nil
	}
	for range 2 {
		pauses, err = n.server.Move(stay)
		check.OK(t, err)
		check.Equalf(t, len(pauses), 0, "connections that have moved")
	}
	if want := map[string]int{"tcp": 3, "tcp held": 2}; !maps.Equal(kinds, want) {
		t.Errorf("the other process is asked for %v, want %v", kinds, want)
	}
	says(t, relayed, "hello")
	says(t, balanced, "hello")
	isReset(t, killed)
	isReset(t, heldKilled)
	n.apply(annotate(web("held", "10.96.0.2", echo), "hold", "10m"))
	name(t, held)
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.Admin: 1, conntrack.Drained: 1, conntrack.Shutdown: 3})
}

// TestTakeRefuses: the next process leaves what it cannot serve, or has no room for. What it has
// accepted and does not get gives its room back, and its client's address.
func TestTakeRefuses(t *testing.T) {
	netns.Require(t)
	var clients *steering.Counted
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, func(o *setup) {
		o.MaxServiceConnections = 2 // of which one is for new connections
		clients = byRoutes(t, lab, o)
	})
	n.policy.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	n.apply(web("web", "10.96.0.1", n.echo(0, 8080)))
	c := n.dial("10.96.0.1:80")
	name(t, c)
	must.Equalf(t, clients.Open.Load(), 1, "clients' addresses in use")
	b := n.takeOver()
	n.apply(service.Change{})
	b.leave()
	take := func(m handover.Moved, change func(m *handover.Moved, state *movedConn)) handover.Taken {
		var state movedConn
		check.OK(t, json.Unmarshal(m.State, &state))
		m.FDs = slices.Clone(m.FDs)
		for i := range m.FDs {
			m.FDs[i] = must.Get(syscall.Dup(m.FDs[i]))(t)
		}
		all := slices.Clone(m.FDs)
		change(&m, &state)
		if m.State != nil {
			m.State = must.Get(json.Marshal(&state))(t)
		}
		taken := n.server.Take(&m)
		if taken == nil {
			for _, fd := range all {
				_ = syscall.Close(fd)
			}
		}
		return taken
	}
	as := func(*handover.Moved, *movedConn) {}
	pauses, err := b.Move(func(list []handover.Moved) ([]bool, error) {
		for what, change := range map[string]func(m *handover.Moved, state *movedConn){
			"unreadable":           func(m *handover.Moved, _ *movedConn) { m.State = nil },
			"of an unknown kind":   func(m *handover.Moved, _ *movedConn) { m.Kind = "quic" },
			"without a descriptor": func(m *handover.Moved, _ *movedConn) { m.FDs = m.FDs[1:] },
			"without its link":     func(_ *handover.Moved, s *movedConn) { s.Link = nil },
			"without its endpoint": func(_ *handover.Moved, s *movedConn) { s.Record.Endpoint = nil },
			"of another Service":   func(_ *handover.Moved, s *movedConn) { s.Record.Port.Name.Name = "other" },
			"to another Service":   func(_ *handover.Moved, s *movedConn) { s.Record.VIP = s.Record.Client },
		} {
			if take(list[0], change) != nil {
				t.Errorf("a connection %s is taken", what)
			}
		}
		check.Equalf(t, n.server.open.Load(), 0, "connections that count")
		for range 2 {
			first := take(list[0], as)
			if first == nil || take(list[0], as) != nil {
				t.Fatal("not one connection is taken")
			}
			check.Equalf(t, clients.Open.Load(), 2, "uses of the client's address by both processes")
			first.Discard()
			check.Equalf(t, n.server.open.Load(), 0, "connections that count")
			check.Equalf(t, clients.Open.Load(), 1, "uses of the client's address")
		}
		take(list[0], as).Begin()
		return []bool{true}, nil
	})
	check.OK(t, err)
	check.Equalf(t, len(pauses), 1, "connections that have moved")
	says(t, c, "hello")
	wait.True(t, "one process uses the client's address", func() bool { return clients.Open.Load() == 1 })
	n.stop()
	isReset(t, c) // no descriptor is left open
	check.Equalf(t, clients.Open.Load(), 0, "clients' addresses in use")
}
