package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestOtherPortsOfNonLocalAddressesAreLeftAlone has a Service on addresses of
// another host. That host must stay reachable on all other ports, by TCP, by
// datagrams, and by ping (A3.13).
func TestOtherPortsOfNonLocalAddressesAreLeftAlone(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		if m.lacks(nonLocalExternalIP) {
			return
		}
		w := newWorld(t, "tcp", []row{{name: "web", endpoints: "here there"}, {name: "none"}, {name: "elsewhere", endpoints: "there", external: "Local"}})
		o := w.services[0]
		w.World.WitnessTCP(t, o.port)
		w.World.WitnessTCP(t, 2222)
		var nonLocal []netip.AddrPort
		for _, kind := range []string{nonLocalExternalIP, loadBalancerIP} {
			nonLocal = append(nonLocal, o.at(kind)...)
		}
		for _, a := range nonLocal {
			w.World.WitnessUDPAt(t, a.String())
		}
		p := w.proxy(t, m)
		p.start(decisionFlags()...)
		for _, c := range w.clients {
			for _, a := range nonLocal {
				if got := c.dial(a, w.nodeAddrs, startTimeout); !strings.HasPrefix(got, "pod-") {
					t.Errorf("%s to the Service at %s: %s", c.name, a, got)
				}
				w.wantWorld(t, c, netip.AddrPortFrom(a.Addr(), 2222))
				check.Equalf(t, c.dial(netip.AddrPortFrom(a.Addr(), 3333), w.nodeAddrs, startTimeout), "refused", "%s to a port of %s without a listener", c.name, a.Addr())
				if _, got := c.visit("udp", a, w.nodeAddrs, startTimeout); !strings.HasPrefix(got, fmt.Sprintf("world:%d ", o.port)) {
					t.Errorf("%s by UDP to the Service's TCP port at %s: %s", c.name, a, got)
				}
				check.OKf(t, c.Ping(a.Addr()), "%s", c.name)
			}
		}
		// After the Service is removed, clients of its port reach the host too.
		p.remove(o.name)
		for _, c := range w.clients {
			for _, a := range nonLocal {
				wait.For(t, c.name+" gets past the Service that is gone", startTimeout, func() error {
					if got := c.dial(a, w.nodeAddrs, startTimeout); !strings.HasPrefix(got, "world:") {
						return errorText(got)
					}
					return nil
				})
			}
		}
		p.stop()
	})
}

// wantWorld expects the host itself to answer, and to see the client's own
// address.
func (w *world) wantWorld(t *testing.T, c client, a netip.AddrPort) {
	t.Helper()
	want := fmt.Sprintf("world:%d client", a.Port())
	if c.name == "node" {
		want = fmt.Sprintf("world:%d node", a.Port())
	}
	check.Equalf(t, c.dial(a, w.nodeAddrs, startTimeout), want, "%s to %s", c.name, a)
}
