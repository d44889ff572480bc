package e2e

import (
	"net/netip"
	"strings"
	"testing"
)

// TestFullConntrackTableIsNoMatter fills the node's connection tracking table,
// which somebody else has switched on: connections are not tracked on either
// side, whosever address the endpoint sees, so that all of them go on while none
// past the proxy does.
func TestFullConntrackTableIsNoMatter(t *testing.T) {
	for _, m := range modes {
		if m.lacks(untracked) {
			continue
		}
		for _, network := range m.networks() {
			t.Run(m.name+"/"+network, func(t *testing.T) {
				t.Parallel()
				newWorld(t, network, sourceRows).withFullTable(t, m)
			})
		}
	}
}

func (w *world) withFullTable(t *testing.T, m mode) {
	nft := administration(t, "nft")
	const others = "add table inet others; add chain inet others in { type filter hook prerouting priority filter; }; add rule inet others in ct state invalid counter"
	if out, err := w.Node.Command(t, nft, others).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	p := w.proxy(t, m)
	p.start(decisionFlags()...)
	past := netip.AddrPortFrom(w.Pods[0].IPv4, w.services[0].target)
	// everything connects everybody with all that there is, and gives how many
	// were served.
	everything := func() (served int) {
		t.Helper()
		for _, o := range w.services {
			for _, kind := range kinds {
				if m.lacks(kind) || kind == proxiedIP {
					continue
				}
				for _, to := range o.at(kind) {
					for _, c := range w.clients {
						// Nothing is served to policy Local's outsiders elsewhere,
						// and no node port on ::1 (A4.5).
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
	before := w.Node.Tracked(t)
	everything()
	if after := w.Node.Tracked(t); after > before {
		t.Errorf("%d connections are tracked after connecting to all Services, %d were before", after, before)
	}
	if _, got := w.clients[2].visit(w.network, past, w.nodeAddrs, startTimeout); !strings.HasPrefix(got, "pod-1:") {
		t.Fatalf("past the proxy: %s", got)
	}
	if after := w.Node.Tracked(t); after == before {
		t.Fatal("a connection past the proxy is not tracked either: it proves nothing")
	}
	// A connection that was tracked before may end right after the table was
	// full, which makes room for one.
	await(t, "no connection past the proxy finds room in the table", startTimeout, func() error {
		w.Node.FillConntrack(t)
		if _, got := w.clients[2].visit(w.network, past, w.nodeAddrs, silence); got != "silent" {
			return errorText(got)
		}
		return nil
	})
	t.Logf("%d connections beside a full table", everything())
	p.stop()
}
