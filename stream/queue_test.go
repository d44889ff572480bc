package stream

import (
	"io"
	"maps"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// annotate sets annotations of a change's Service, in pairs of name and value.
func annotate(c service.Change, annotations ...string) service.Change {
	c.Services[0].Annotations = map[string]string{}
	for i := 0; i < len(annotations); i += 2 {
		c.Services[0].Annotations["sluice.dev/"+annotations[i]] = annotations[i+1]
	}
	return c
}

// queued waits until so many connections are in the queue.
func (n *node) queued(want int) {
	n.t.Helper()
	wait.True(n.t, "queued connections", func() bool { return n.server.Stats().Queued == int64(want) })
}

// ask sends a request and a FIN.
func ask(t *testing.T, c *net.TCPConn) {
	t.Helper()
	must.OK(t, must.Err(io.WriteString(c, "a question\n")))
	must.OK(t, c.CloseWrite())
}

// answered reads the answer of n.echo to ask, to its end.
func answered(t *testing.T, c *net.TCPConn) {
	t.Helper()
	if got, err := io.ReadAll(c); err != nil || string(got) != "b1:8080\na question\n" {
		t.Errorf("a half-closed client that had to wait gets %q, %v", got, err)
	}
	_ = c.Close()
}

// TestLimitOfEachEndpoint: an endpoint at its limit is passed over, also by a client that
// session affinity leads to it. Without a queue, connections beyond all limits are reset.
func TestLimitOfEachEndpoint(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 2), nil)
	change := annotate(web("web", "10.96.0.1", n.echo(0, 8080), n.echo(1, 8080)), "max-connections-per-endpoint", "2", "balancer", "source-hash")
	n.apply(change)
	for round := range 2 {
		got := map[string]int{}
		var open []net.Conn
		for range 4 {
			c := n.dial("10.96.0.1:80")
			got[name(t, c)]++
			open = append(open, c)
		}
		if want := map[string]int{"b1:8080": 2, "b2:8080": 2}; !maps.Equal(got, want) {
			t.Errorf("round %d: four connections go to %v, want %v", round, got, want)
		}
		wantReset(t, n.lab.Client, "10.96.0.1:80")
		for _, c := range open {
			_ = c.Close()
		}
		wait.True(t, "the ends of all connections", func() bool { return n.server.Stats().Open == 0 })
	}
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.LimitReached: 2, conntrack.ClientFin: 8})
}

// TestQueueIsInOrder: at the limits of a Service and of its endpoints, connections wait, and
// are served in order as places become free. Those whose client leaves give up their place in
// the queue at once. When the limit is lifted, all are served.
func TestQueueIsInOrder(t *testing.T) {
	netns.Require(t)
	for _, limit := range []string{"max-connections", "max-connections-per-endpoint"} {
		t.Run(limit, func(t *testing.T) {
			n := newNode(t, netns.NewLab(t, 1), nil)
			echo := n.echo(0, 8080)
			n.apply(annotate(web("web", "10.96.0.1", echo), limit, "2", "queue-timeout", "10m"))
			n.apply(web("free", "10.96.0.2", echo))
			served := []net.Conn{n.dial("10.96.0.1:80"), n.dial("10.96.0.1:80")}
			for _, c := range served {
				name(t, c)
			}
			for i := range 10 {
				served = append(served, n.dial("10.96.0.1:80"))
				n.queued(i + 1)
			}
			name(t, n.dial("10.96.0.2:80")) // a neighbour does not notice
			_ = served[3].Close()           // in the middle of the queue
			n.queued(9)
			check.OK(t, served[4].(interface{ SetLinger(int) error }).SetLinger(0))
			_ = served[4].Close()
			n.queued(8)
			for i, next := range []int{2, 5, 6} {
				_ = served[[]int{0, 1, 2}[i]].Close()
				n.queued(7 - i)
				name(t, served[next])
			}
			n.apply(web("web", "10.96.0.1", echo))
			n.queued(0)
			for _, c := range served[7:] {
				name(t, c)
			}
			n.stop()
			want := map[conntrack.End]int{conntrack.ClientFin: 4, conntrack.ClientReset: 1, conntrack.Shutdown: 8}
			if ends := n.records.Ends(); !maps.Equal(ends, want) {
				t.Errorf("ends %v, want %v", ends, want)
			}
		})
	}
}

// TestQueueEnds: a connection that gets no place in time is reset, and new endpoints make room.
func TestQueueEnds(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 2), nil)
	first, second := n.echo(0, 8080), n.echo(1, 8080)
	n.apply(annotate(web("short", "10.96.0.1", first), "max-connections-per-endpoint", "1", "queue-timeout", "50ms"))
	n.apply(annotate(web("long", "10.96.0.2", first), "max-connections-per-endpoint", "1", "queue-timeout", "10m"))
	name(t, n.dial("10.96.0.1:80"))
	wantReset(t, n.lab.Client, "10.96.0.1:80")
	name(t, n.dial("10.96.0.2:80"))
	waiting := n.dial("10.96.0.2:80")
	n.queued(1)
	n.apply(annotate(web("long", "10.96.0.2", first, second), "max-connections-per-endpoint", "1", "queue-timeout", "10m"))
	check.Equalf(t, name(t, waiting), "b2:8080", "who answers, and a new endpoint has room")
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.LimitReached: 1, conntrack.Shutdown: 3})
}

// TestHeldClientsLeave: a client that closes or resets its connection while the Service has no
// endpoints gives its place back at once. One that has sent its request and a FIN stays: it waits
// for the answer.
func TestHeldClientsLeave(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) { o.MaxServiceDialing = 3 })
	n.apply(annotate(web("web", "10.96.0.1"), "hold", "10m"))
	held := func(want int64) {
		t.Helper()
		wait.True(t, "held connections", func() bool { return n.server.Stats().Held == want })
	}
	asks := n.dial("10.96.0.1:80")
	ask(t, asks)
	closes, resets := n.dial("10.96.0.1:80"), n.dial("10.96.0.1:80")
	held(3)
	_ = closes.Close()
	held(2)
	check.OK(t, resets.SetLinger(0))
	_ = resets.Close()
	held(1)
	stays := []net.Conn{n.dial("10.96.0.1:80"), n.dial("10.96.0.1:80")}
	held(3)
	n.apply(web("web", "10.96.0.1", n.echo(0, 8080)))
	answered(t, asks)
	for _, c := range stays {
		name(t, c)
	}
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.ClientFin: 2, conntrack.ClientReset: 1, conntrack.Shutdown: 2})
}

// TestLimitsUnderLoad: many clients come and go, on all loops. No endpoint ever has more
// connections than it may have, all clients are served, and nothing stays counted.
func TestLimitsUnderLoad(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 2), nil)
	endpoints := []netip.AddrPort{n.echo(0, 8080), n.echo(1, 8080)}
	n.apply(annotate(web("web", "10.96.0.1", endpoints...), "max-connections", "5", "max-connections-per-endpoint", "3", "queue-timeout", "10m"))
	var pool *pool
	for _, p := range n.server.pools {
		pool = p
	}
	const clients, visits = 24, 20
	done := make(chan error)
	for range clients {
		go func() {
			for range visits {
				c, err := n.lab.Client.Dial("tcp", "10.96.0.1:80")
				if err == nil {
					_, err = netns.AskOn(c)
					for _, ep := range endpoints {
						if open := pool.counters.Loads().Of(ep).Open(); open > 3 {
							t.Errorf("%s has %d connections", ep, open)
						}
					}
					if n := pool.service.served.Load(); n > 5 {
						t.Errorf("the Service has %d connections", n)
					}
					_ = c.Close()
				}
				if err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range clients {
		check.OK(t, <-done)
	}
	wait.True(t, "the ends of all connections", func() bool { return n.server.Stats().Open == 0 })
	n.stop()
	if served, queued := pool.service.served.Load(), n.server.Stats().Queued; served != 0 || queued != 0 || pool.queued.Load() != 0 {
		t.Errorf("at the end, %d are served, %d queued, %d of the port", served, queued, pool.queued.Load())
	}
	if ends := n.records.Ends(); ends[conntrack.ClientFin]+ends[conntrack.EndpointFin] != clients*visits {
		t.Errorf("ends %v", ends)
	}
}

// TestFailedAttemptsGiveNoTime: one endpoint is full, and the other one refuses. Connections that
// wait try the one that refuses now and then, and are reset when their time in the queue is over.
func TestFailedAttemptsGiveNoTime(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) {
		o.Balancer.Plan = balancer.Plan{Timeouts: []time.Duration{time.Second}, After: patience, Total: patience}
	})
	echo, refuses := n.echo(0, 8080), netip.AddrPortFrom(n.lab.Backends[0].IPv4, 9)
	n.apply(annotate(web("web", "10.96.0.1", echo, refuses), "max-connections-per-endpoint", "1", "queue-timeout", "3s"))
	name(t, n.dial("10.96.0.1:80"))
	const clients = 4
	for range clients {
		n.dial("10.96.0.1:80")
	}
	wait.True(t, "the ends of those that wait", func() bool { return n.records.Ends()[conntrack.LimitReached] == clients })
	n.stop()
}

// TestHeldConnectionsQueue: the time that a connection was held does not count as time in the queue.
func TestHeldConnectionsQueue(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), nil)
	limits := []string{"hold", "10m", "max-connections-per-endpoint", "1", "queue-timeout", "2s"}
	n.apply(annotate(web("web", "10.96.0.1"), limits...))
	for range 2 {
		n.dial("10.96.0.1:80")
	}
	wait.True(t, "held connections", func() bool { return n.server.Stats().Held == 2 })
	began := time.Now()
	wait.True(t, "the time of the queue has passed", func() bool { return time.Since(began) > 2*time.Second })
	n.apply(annotate(web("web", "10.96.0.1", n.echo(0, 8080)), limits...))
	n.queued(1)
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.LimitReached: 0})
}

// TestTurns: an end gives a turn to the first connection of its own service port alone, or to some
// more at the Service's limit, and each port comes round. One that has its turn keeps its place.
func TestTurns(t *testing.T) {
	loop := must.Get(poll.New())(t)
	t.Cleanup(func() {
		loop.Stop()
		check.OK(t, loop.Run())
	})
	var s Server
	w, service, limits := &worker{server: &s, loop: loop}, new(quota), service.Limits{Connections: 1, PerEndpoint: 1}
	q := &service.queue
	pools := make([]*pool, 3*calledAtOnce)
	first := make([]*conn, len(pools))
	for i := range pools {
		pools[i] = &pool{service: service}
		for range 3 {
			c := &conn{worker: w, pool: pools[i], counts: amongQueued}
			q.add(c)
			if first[i] == nil {
				first[i] = c
			}
		}
	}
	called := func(want int) {
		t.Helper()
		n := 0
		for _, p := range pools {
			for i, e := range p.waiting {
				if e.called && i > 0 {
					t.Error("one is called that is not the first")
				}
				if e.called {
					n++
				}
			}
		}
		check.Equalf(t, n, want, "connections have a turn")
	}
	q.call(pools[0], pools[0].waiting[1].conn)
	called(0)
	q.freed(pools[0])
	called(1)
	late := &conn{worker: w, pool: pools[0]}
	if late.enter(&limits) || !first[0].enter(&limits) || first[1].enter(&limits) {
		t.Error("a connection enters out of its turn, or above the limit")
	}
	if !q.full.Swap(false) {
		t.Error("the Service's limit was not noted")
	}
	first[0].leave()
	q.freed(pools[0]) // in its turn: it has another one
	q.endTurn(pools[0])
	called(1)
	q.endTurn(pools[0])
	called(0)
	for n := range 3 { // at the Service's limit
		q.full.Store(true)
		q.freed(pools[len(pools)-1])
		called(min(calledAtOnce*(n+1)+1, len(pools)))
	}
	q.wake()
	called(len(pools))
}
