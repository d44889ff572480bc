package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// held are connections to all kinds of a Service's destinations.
type held struct {
	conns []net.Conn
	names []string
}

// holdAll connects each client to each destination of a Service that the mode
// serves, and keeps the connections open.
func (w *world) holdAll(t *testing.T, m mode, o *object) *held {
	t.Helper()
	h := &held{}
	for _, kind := range kinds {
		if m.lacks(kind) || kind == proxiedIP {
			continue
		}
		for _, to := range o.at(kind) {
			for _, c := range w.clients {
				if to.Addr() == netip.IPv6Loopback() || to.Addr().IsLoopback() && c.name != "node" {
					continue
				}
				conn, err := c.Dialer(c.dialer("tcp", to, startTimeout), "tcp", to.String())
				must.OKf(t, err, "%s to %s %s", c.name, kind, to)
				t.Cleanup(func() { _ = conn.Close() })
				said, err := netns.AskOn(conn)
				if err != nil || !strings.HasPrefix(said, "pod-") {
					t.Fatalf("%s to %s %s: %q, %v", c.name, kind, to, said, err)
				}
				h.conns, h.names = append(h.conns, conn), append(h.names, fmt.Sprintf("%s to %s %s, by %s", c.name, kind, to, said))
			}
		}
	}
	return h
}

// alive expects each of them to continue.
func (h *held) alive(t *testing.T, when string) {
	t.Helper()
	for i, c := range h.conns {
		check.OKf(t, echoes(c), "%s: %s", when, h.names[i])
	}
}

// TestConnectionsOutliveTheirService removes everything that the connections used:
// the endpoint, the policy, the destinations, the Service (A8.1, A8.7).
func TestConnectionsOutliveTheirService(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		w := newWorld(t, "tcp", []row{{name: "web", endpoints: "here there"}})
		o := w.services[0]
		p := w.proxy(t, m)
		p.start(decisionFlags()...)
		h := w.holdAll(t, m, o)
		changed := *o
		for _, step := range []struct {
			name   string
			change func()
		}{
			{"one endpoint is gone", func() { changed.endpoints = o.endpoints[:1] }},
			{"the other one is gone", func() { changed.endpoints = o.endpoints[1:] }},
			{"policy Local leaves none here", func() { changed.internal, changed.external = "Local", "Local" }},
			{"source ranges let nobody in", func() { changed.ranges = []string{"192.0.2.1/32", "2001:db8::1/128"} }},
			{"no endpoint is left", func() { changed.endpoints = nil }},
			{"another node port", func() { changed.endpoints, changed.nodePort = o.endpoints, o.nodePort+100 }},
			{"cluster IPs only", func() {
				changed.kind, changed.nodePort, changed.externalIPs, changed.lbIPs, changed.lbProxied, changed.ranges, changed.external = "ClusterIP", 0, nil, nil, nil, nil, ""
			}},
			{"other cluster IPs", func() { changed.vips = []string{"10.96.9.9", "fd00:96::99"} }},
			{"ExternalName", func() { changed.kind = "ExternalName" }},
		} {
			step.change()
			p.settled(func() { p.put(&changed) })
			h.alive(t, step.name)
		}
		p.remove("web") // it has no effect any more (A1.4)
		// The Service is added again, and serves new connections beside the old
		// ones.
		p.settled(func() { p.put(o) })
		h.alive(t, "the Service is back")
		w.holdAll(t, m, o).alive(t, "new connections")
		h.alive(t, "beside new connections")
		t.Logf("%d connections lived on", len(h.conns))
	})
}

// TestConnectionsOutliveAFlush runs the commands of a firewall's reload or of a
// hasty administrator. The proxy must restore its state and log that once, and no
// established connection may be lost.
func TestConnectionsOutliveAFlush(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		w := newWorld(t, "tcp", []row{{name: "web", endpoints: "here there"}, {name: "local", endpoints: "here", external: "Local"}})
		w.Settle(t)
		// No host has the non-local addresses: a packet that is misrouted in the
		// meantime is lost, and repeated. A host with the address would reset its
		// connection.
		const nobody = "add table inet nobody; add chain inet nobody in { type filter hook input priority 0; policy drop; }"
		must.Run(t, w.World.Command(t, administration(t, "nft"), nobody))
		p := w.proxy(t, m)
		p.start(decisionFlags()...)
		h := w.holdAll(t, m, w.services[0])
		g := w.holdAll(t, m, w.services[1])
		during := stateOf(t, w.Node) // with the state for the clients' replies
		repairs := 0
		steps := [][][]string{m.flush}
		if m.name == modes[0].name {
			steps = nil
			for _, command := range m.flush {
				steps = append(steps, [][]string{command})
			}
		}
		for _, step := range steps {
			name := strings.Join(step[0], " ")
			for _, command := range step {
				out, err := w.Node.Command(t, administration(t, command[0]), command[1:]...).CombinedOutput()
				if err != nil && !strings.Contains(string(out), "FIB table does not exist") { // the table holds nothing of ours
					t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
				}
			}
			flushed := time.Now()
			wait.For(t, name+": everything is there again", repairTimeout, func() error {
				if diff := changes(during, stateOf(t, w.Node)); diff != "" {
					return errorText(diff)
				}
				return nil
			})
			took := time.Since(flushed)
			values := must.Get(p.metrics())(t)
			found := int(values["sluice_steering_repairs_total"])
			// A flush removes things one by one, and the first may be restored
			// before the last is removed.
			if found > repairs+10*len(step) {
				t.Errorf("%s: repaired %d times", name, found-repairs)
			}
			t.Logf("%s: %d repairs, there again after %v", name, found-repairs, took.Round(time.Millisecond))
			repairs = found
			h.alive(t, name)
			g.alive(t, name)
		}
		if repairs < len(steps)/2 || repairs == 0 {
			t.Errorf("only %d repairs of %d flushes: it proves nothing", repairs, len(steps))
		}
		p.awaitMetrics("the log and the metric agree", func(m map[string]float64) bool {
			return strings.Count(p.stderr.String(), "it is restored") == int(m["sluice_steering_repairs_total"])
		})
		w.holdAll(t, m, w.services[0]).alive(t, "new connections")
		p.stop()
	})
}
