package stream

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestConnectionsAreEnded: an operator's end resets a connection whatever it waits for, and a
// rebalanced one gets a FIN. Until then, each service port says what waits.
func TestConnectionsAreEnded(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), nil)
	echo := n.echo(0, 8080)
	n.apply(web("relayed", "10.96.0.1", echo))
	n.apply(web("dialled", "10.96.0.2", n.silent()))
	n.apply(annotate(web("held", "10.96.0.3"), "hold", "10m"))
	n.apply(annotate(web("queued", "10.96.0.4", echo), "max-connections", "1", "queue-timeout", "10m"))
	relayed, balanced, served := n.dial("10.96.0.1:80"), n.dial("10.96.0.1:80"), n.dial("10.96.0.4:80")
	for _, c := range []net.Conn{relayed, balanced, served} {
		name(t, c)
	}
	ending := []net.Conn{relayed, n.dial("10.96.0.2:80"), n.dial("10.96.0.3:80"), n.dial("10.96.0.4:80")}
	n.queued(1)
	wait.True(t, "connections without an endpoint", func() bool {
		s := n.server.Stats()
		return s.Held == 1 && s.Dialing == 3 // with the queued one
	})
	for service, want := range map[string]Choosing{"relayed": {}, "held": {Held: 1}, "queued": {Queued: 1}} {
		want.Balancer = n.server.Balancer(portOf(service))
		if got := n.server.Choosing(n.server.pools[portOf(service)].port); got != want || got.Balancer == nil {
			t.Errorf("%s: %+v, want %+v", service, got, want)
		}
	}
	check.Equalf(t, n.server.Choosing(&service.Port{ID: 99}), Choosing{}, "a service port that does not exist meets")
	for _, c := range ending {
		n.end(conntrack.Admin, c)
		isReset(t, c)
	}
	idle := func(atLeast time.Duration) (is bool) {
		for _, w := range n.server.workers {
			w.run(func() {
				w.shard.Each(func(r *conntrack.Record) {
					if r.Client.String() == balanced.LocalAddr().String() {
						is = r.Owner.(conntrack.Idler).IdleFor(atLeast)
					}
				})
			})
		}
		return is
	}
	check.Equalf(t, idle(time.Hour), false, "a connection was idle for an hour")
	wait.True(t, "the connection is idle", func() bool { return idle(1) })
	n.end(conntrack.Rebalanced, balanced)
	_ = balanced.SetDeadline(time.Now().Add(patience))
	check.OK(t, must.Err(io.Copy(io.Discard, balanced)))
	check.Equalf(t, n.ended("dialled").Attempts, 1, "attempts of the one that was dialled")
	check.Equalf(t, n.ended("held").Attempts, 0, "attempts of the held one")
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.Admin: 4, conntrack.Rebalanced: 1, conntrack.Shutdown: 1})
}

// TestTransportIsInspected: who asks for it learns what the kernel knows of both sides, or of the
// client alone while there is no endpoint.
func TestTransportIsInspected(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), nil)
	n.apply(web("relayed", "10.96.0.1", n.echo(0, 8080)))
	n.apply(annotate(web("held", "10.96.0.2"), "hold", "10m"))
	name(t, n.dial("10.96.0.1:80"))
	n.dial("10.96.0.2:80")
	wait.True(t, "a held connection", func() bool { return n.server.Stats().Held == 1 })
	seen := 0
	must.OK(t, n.table.Inspect(context.Background(), conntrack.OnLoops(n.server.loops), func(r *conntrack.Record) error {
		seen++
		tr := r.Transport()
		if tr == nil {
			return errors.New("nothing is known")
		}
		if tr.Client.Known != conntrack.BySocket || tr.Client.RTT <= 0 || tr.Client.Window == 0 || tr.Idle > tr.Client.Idle {
			t.Errorf("%s: client %+v, idle %d", r.Port.Name.Name, tr.Client, tr.Idle)
		}
		if known := tr.Endpoint.Known == conntrack.BySocket && tr.Endpoint.RTT > 0; known != r.Connected {
			t.Errorf("%s: endpoint %+v", r.Port.Name.Name, tr.Endpoint)
		}
		return nil
	}))
	check.Equalf(t, seen, 2, "connections")
}
