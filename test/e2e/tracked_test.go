package e2e

import (
	"net/netip"
	"strings"
	"testing"
)

// TestFullConntrackTableIsNoMatter fills the node's connection tracking table,
// which somebody else has switched on: connections whose endpoint sees the
// client's address are not tracked on either side, so that all of them go on
// while none past the proxy does. (Of others, the node's side is like any
// connection of a program of the node: docs/operations.md.)
func TestFullConntrackTableIsNoMatter(t *testing.T) {
	m := modes[0]
	w := newWorld(t, "tcp", sourceRows)
	nft := administration(t, "nft")
	const others = "add table inet others; add chain inet others in { type filter hook prerouting priority filter; }; add rule inet others in ct state invalid counter"
	if out, err := w.Node.Command(t, nft, others).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	p := w.proxy(t, m)
	p.start(decisionFlags()...)
	past := netip.AddrPortFrom(w.Pods[0].IPv4, w.services[0].target)
	everything := func() {
		t.Helper()
		for _, o := range w.services {
			for _, kind := range kinds {
				if m.lacks(kind) || kind == proxiedIP {
					continue
				}
				for _, to := range o.at(kind) {
					for _, c := range w.clients {
						pod := c.name == "pod" && kind == clusterIP
						outside := c.name == "outside" && kind != clusterIP && kind != loopbackPort && o.name == "local-here"
						if !pod && !outside {
							continue
						}
						if got := c.dial(to, w.nodeAddrs, startTimeout); !strings.HasPrefix(got, "pod-") {
							t.Errorf("%s to %s of %s, %s: %s", c.name, kind, o.name, to, got)
						}
					}
				}
			}
		}
	}
	before := w.Node.Tracked(t)
	everything()
	if after := w.Node.Tracked(t); after > before {
		t.Errorf("%d connections are tracked after connecting to all Services, %d were before", after, before)
	}
	if got := w.clients[2].dial(past, w.nodeAddrs, startTimeout); !strings.HasPrefix(got, "pod-1:") {
		t.Fatalf("past the proxy: %s", got)
	}
	if after := w.Node.Tracked(t); after == before {
		t.Fatal("a connection past the proxy is not tracked either: it proves nothing")
	}
	w.Node.FillConntrack(t)
	if got := w.clients[2].dial(past, w.nodeAddrs, silence); got != "silent" {
		t.Fatalf("past the proxy with a full table: %s, want it to be silent", got)
	}
	everything()
	p.stop()
}
