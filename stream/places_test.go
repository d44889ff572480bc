package stream

import (
	"testing"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// portOf gives the service port of a Service that web makes.
func portOf(name string) service.PortName {
	return service.PortName{Name: service.Name{Namespace: "test", Name: name}, Protocol: service.TCP}
}

// TestForwardedConnectionsTakePlaces: connections that the kernel forwards count with the relay's
// against each limit. Clients that wait at the limit of all are accepted when one of them ends.
func TestForwardedConnectionsTakePlaces(t *testing.T) {
	netns.Require(t)
	log := new(journal)
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, func(o *setup) {
		o.Logger = zerolog.New(log)
		o.MaxConnections, o.MaxNamespaceConnections, o.MaxServiceConnections, o.CountForwarded = 4, 3, 2, true
	})
	ep := n.echo(0, 8080)
	n.apply(annotate(web("one", "10.96.0.1", ep), "max-connections", "1"))
	n.apply(web("two", "10.96.0.2", ep))
	n.apply(web("three", "10.96.0.3", ep))
	n.apply(in("neighbours", web("four", "10.96.0.4", ep)))
	four := portOf("four")
	four.Namespace = "neighbours"
	if n.server.Places(portOf("none")) != nil {
		t.Error("a service port that does not exist has places")
	}
	take := func(name service.PortName, limits service.Limits, want conntrack.End, ok bool) {
		t.Helper()
		end, got := n.server.Places(name).Take(&limits)
		if end != want || got != ok {
			t.Errorf("a place of %s: %s, %t; want %s, %t", name, end, got, want, ok)
		}
	}
	take(portOf("one"), service.Limits{Connections: 1}, conntrack.EndNone, true)
	wantReset(t, lab.Client, "10.96.0.1:80") // at the Service's annotation
	wait.True(t, "the end of that connection", func() bool { return n.server.Stats().Open == 0 })
	take(portOf("one"), service.Limits{Connections: 1}, conntrack.LimitReached, false)
	take(portOf("two"), service.Limits{}, conntrack.EndNone, true)
	c := n.dial("10.96.0.2:80")
	name(t, c)
	take(portOf("two"), service.Limits{}, conntrack.LimitReached, false)
	take(portOf("three"), service.Limits{}, conntrack.NamespaceLimit, false)
	n.server.Places(four).Add()
	take(four, service.Limits{}, conntrack.EndNone, false) // it waits in the relay
	check.Equalf(t, n.server.Stats().Open, 1, "connections of the relay")

	waits := n.dial("10.96.0.4:80")
	wait.True(t, "accepting is paused", func() bool { return n.server.Stats().AtLimit > 0 })
	n.server.Places(four).Give()
	check.Equal(t, name(t, waits), "b1:8080")
	_, _ = c.Close(), waits.Close()
	wait.True(t, "the relay has no connection", func() bool { return n.server.Stats().Open == 0 })
	take(four, service.Limits{}, conntrack.EndNone, true)
	for _, name := range []service.PortName{portOf("one"), portOf("two"), four} {
		n.server.Places(name).Give()
	}
	check.Equalf(t, n.server.open.Load(), 0, "connections that count at the end")
	n.server.Places(portOf("three")).Full(&service.Limits{PerEndpoint: 7})
	lines := log.lines("max-connections-per-endpoint")
	must.Equalf(t, len(lines), 1, "lines about the limit of endpoints in %s", log)
	check.Containsf(t, lines[0], "has 7 connections open", "the log")
}

// TestForwardedConnectionsAreNotBounded: where flags do not bound forwarded connections, only the
// annotation of their Service does.
func TestForwardedConnectionsAreNotBounded(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) { o.MaxConnections, o.MaxServiceConnections = 1, 1 })
	n.apply(web("web", "10.96.0.1", n.echo(0, 8080)))
	places := n.server.Places(portOf("web"))
	for range 3 {
		if end, ok := places.Take(&service.Limits{Connections: 3}); !ok {
			t.Error(end)
		}
	}
	if end, ok := places.Take(&service.Limits{Connections: 3}); ok || end != conntrack.LimitReached {
		t.Errorf("above the annotation: %s, %t", end, ok)
	}
	name(t, n.dial("10.96.0.1:80"))
	for range 3 {
		places.Give()
	}
	check.Equalf(t, n.server.open.Load(), 1, "connections that count")
}
