package e2e

import (
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/wait"
)

// TestFullConntrackTableIsNoMatter fills the node's connection tracking table,
// which another program has enabled. Connections through the proxy are not tracked
// on either side, whichever address the endpoint sees, so that all of them work
// while no other connection does.
func TestFullConntrackTableIsNoMatter(t *testing.T) {
	t.Parallel()
	for _, m := range modes {
		if m.lacks(untracked) {
			continue
		}
		for _, network := range m.networks() {
			// One after the other: all tables are in the same hash buckets.
			t.Run(m.name+"/"+network, func(t *testing.T) {
				w := newWorld(t, network, sourceRows)
				w.Node.TrackConnections(t)
				p := w.proxy(t, m)
				p.start(decisionFlags()...)
				w.withFullTable(t, m, p)
			})
		}
	}
	// For cluster IPs alone, nftables has nothing else to do.
	t.Run("cluster IPs alone", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, "tcp", sourceRows[2:3])
		o := w.services[0]
		o.kind, o.nodePort, o.externalIPs, o.lbIPs, o.lbProxied = corev1.ServiceTypeClusterIP, 0, nil, nil, nil
		w.Node.TrackConnections(t)
		p := w.proxy(t, modes[0])
		p.start(decisionFlags("--masquerade-all")...)
		w.isNotTracked(t, modes[0], []string{clusterIP})
		p.stop()
	})
}

// withFullTable connects all clients to all destinations, before and after the
// table is full.
func (w *world) withFullTable(t *testing.T, m mode, p *proxy) {
	w.isNotTracked(t, m, kinds)
	// A connection that was tracked earlier may end just after the table was full,
	// which frees an entry.
	wait.For(t, "no connection past the proxy finds room in the table", startTimeout, func() error {
		w.Node.FillConntrack(t)
		if _, got := w.clients[2].visit(w.network, w.past(), w.nodeAddrs, silence); got != "silent" {
			return errorText(got)
		}
		return nil
	})
	t.Logf("%d connections beside a full table", w.everything(t, m, kinds))
	p.stop()
}

// isNotTracked connects all clients to the destinations of some kinds, none of
// which may be tracked.
func (w *world) isNotTracked(t *testing.T, m mode, kinds []string) {
	t.Helper()
	before := w.Node.Tracked(t)
	w.everything(t, m, kinds)
	if after := w.Node.Tracked(t); after > before {
		t.Errorf("%d connections are tracked after connecting to all Services, %d were before", after, before)
	}
	if _, got := w.clients[2].visit(w.network, w.past(), w.nodeAddrs, startTimeout); !strings.HasPrefix(got, "pod-1:") {
		t.Fatalf("past the proxy: %s", got)
	}
	if after := w.Node.Tracked(t); after == before {
		t.Fatal("a connection past the proxy is not tracked either: it proves nothing")
	}
}

// past is an endpoint, at its own address.
func (w *world) past() netip.AddrPort {
	return netip.AddrPortFrom(w.Pods[0].IPv4, w.services[0].target)
}

// everything connects all clients to the destinations of some kinds, and returns
// how many were served.
func (w *world) everything(t *testing.T, m mode, kinds []string) (served int) {
	t.Helper()
	for _, o := range w.services {
		for _, kind := range kinds {
			if m.lacks(kind) || kind == proxiedIP {
				continue
			}
			for _, to := range o.at(kind) {
				for _, c := range w.clients {
					// Policy Local serves outsiders nothing on another node, and
					// ::1 has no node ports (A4.5).
					if o.name == "local-there" && kind != clusterIP || kind == loopbackPort && (c.name != "node" || to.Addr().Is6()) {
						continue
					}
					served++
					if _, got := c.visit(w.network, to, w.nodeAddrs, startTimeout); !strings.HasPrefix(got, "pod-") {
						t.Errorf("%s to %s of %s, %s: %s", c.name, kind, o.name, to, got)
					}
				}
			}
		}
	}
	return served
}
