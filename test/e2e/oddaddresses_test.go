package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestOddAddressesAreServedOrNamed has Services at addresses that no host can
// have, before one that must be served, and one in 240.0.0.0/4, which Linux routes
// like any other range. The log must name those that cannot be served. All others
// must be served in each mode, also after later changes.
func TestOddAddressesAreServedOrNamed(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		c := netns.NewCluster(t)
		pod := c.Remote[0]
		pod.WitnessTCP(t, 8080)
		p := newClusterProxy(t, c)
		p.mode = m
		refused := []string{"0.1.2.3", "255.255.255.255", "169.254.7.7"}
		for i, vip := range append(refused, "240.1.2.3") {
			p.apply(webService{name: fmt.Sprintf("odd-%d", i), vips: []string{vip}, port: 80, endpoints: on(8080, pod)})
		}
		p.apply(webService{name: "web", vips: []string{vip4, vip6}, port: 80, endpoints: on(8080, pod)})
		p.start(decisionFlags()...)
		wantServed := func(addrs ...string) {
			t.Helper()
			for _, from := range []*netns.Host{c.Node, c.Pods[0]} {
				for _, a := range addresses(80, addrs...) {
					wait.For(t, from.Name()+" reaches "+a, startTimeout, func() error {
						if got := (client{name: from.Name(), Host: from}).dial(netip.MustParseAddrPort(a), nil, startTimeout); !strings.HasPrefix(got, "pod-3:") {
							return errorText(got)
						}
						return nil
					})
				}
			}
		}
		wantServed(vip4, vip6, "240.1.2.3")
		p.apply(webService{name: "later", vips: []string{"10.96.0.77"}, port: 80, endpoints: on(8080, pod)})
		wantServed("10.96.0.77")
		for _, vip := range refused {
			p.awaitLog(vip)
		}
		p.stop()
	})
}
