package netns

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestClusterHostsReachEachOther also expects each server to see the client's own
// address: the cluster translates none.
func TestClusterHostsReachEachOther(t *testing.T) {
	c := NewCluster(t)
	servers := append(c.Hosts(), c.Node)
	for _, h := range servers {
		h.WitnessTCP(t, 8080)
	}
	for _, client := range []*Host{c.Outside, c.Pods[0], c.Remote[0], c.Node} {
		for _, s := range servers {
			for _, to := range []netip.Addr{s.IPv4, s.IPv6} {
				conn, err := client.Dial("tcp", netip.AddrPortFrom(to, 8080).String())
				if err != nil {
					t.Errorf("%s to %s: %v", client.Name(), to, err)
					continue
				}
				defer conn.Close()
				own := netip.MustParseAddrPort(conn.LocalAddr().String())
				got, err := AskOn(conn)
				if want := fmt.Sprintf("%s:8080 %s", s.Name(), own); err != nil || got != want {
					t.Errorf("%s to %s: got %q, %v, want %q", client.Name(), to, got, err, want)
				}
			}
		}
	}
	for _, a := range NonLocalIPs {
		if got, err := c.Outside.Ask("tcp", netip.AddrPortFrom(a, 8080).String()); err != nil || got[:len("world")] != "world" {
			t.Errorf("outside to %s: got %q, %v", a, got, err)
		}
		check.OKf(t, c.Outside.Ping(a), "outside to %s", a)
	}
	if err := c.Pods[0].Ping(netip.MustParseAddr("10.2.2.2")); err == nil {
		t.Error("ping had an answer from nowhere")
	}
}
