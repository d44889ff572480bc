package flow

import (
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Open connections and sessions go on when rules come that drop what connection tracking takes for
// new: if tracking had begun before these opened, or if they took shortcuts until the rules came.
func TestRulesWithStatesKeepOpenConnections(t *testing.T) {
	t.Parallel()
	for _, ipv6 := range []bool{false, true} {
		for _, tracked := range []bool{false, true} {
			t.Run(fmt.Sprintf("ipv6=%t/tracked=%t", ipv6, tracked), func(t *testing.T) {
				t.Parallel()
				testRulesWithStates(t, ipv6, tracked)
			})
		}
	}
}

func testRulesWithStates(t *testing.T, ipv6, tracked bool) {
	c := &policyNet{Cluster: netns.NewCluster(t), ipv6: ipv6}
	near, remote := c.Pods[1], c.Remote[0]
	for _, h := range []*netns.Host{near, remote} {
		h.WitnessTCP(t, 8080)
		h.WitnessUDP(t, 8080)
	}
	if tracked {
		c.Node.NFT(t, "table inet tracking {\nchain forward {\ntype filter hook forward priority filter\nct state established accept\n}\n}\n")
	}
	n := c.flows(t, false)
	if !tracked {
		wait.True(t, "shortcuts are allowed", func() bool { return atomic.LoadUint64(&n.server.kernel.Control.ShortcutsUntil) != 0 })
	}
	var open []net.Conn
	for _, vip := range policyVIPs[ipv6] {
		for _, network := range []string{"tcp", "udp"} {
			conn := must.Get(c.Pods[0].Dialer(&net.Dialer{Timeout: patience}, network, net.JoinHostPort(vip, "80")))(t)
			t.Cleanup(func() { _ = conn.Close() })
			open = append(open, conn)
		}
	}
	ask := func(rules string) {
		t.Helper()
		for range 3 {
			for _, conn := range open {
				_ = conn.SetDeadline(time.Now().Add(patience))
				if said, err := line(conn); err != nil {
					t.Fatalf("%s: %s to %s: %q, %v", rules, conn.LocalAddr(), conn.RemoteAddr(), said, err)
				}
			}
		}
	}
	ask("before")
	client := "ip saddr " + c.Pods[0].IPv4.String()
	if ipv6 {
		client = "ip6 saddr " + c.Pods[0].IPv6.String()
	}
	for i, rules := range []string{"ct state new drop", "ct state invalid drop\nct state established accept\nct state new " + client + " drop"} {
		c.Node.NFT(t, fmt.Sprintf("table inet states%d {\nchain forward {\ntype filter hook forward priority filter\n%s\n}\n}\n", i, rules))
		wait.True(t, "no packet takes a shortcut", func() bool { return atomic.LoadUint64(&n.server.kernel.Control.ShortcutsUntil) == 0 })
		ask(rules)
	}
	if said, allowed := c.try(c.Pods[0], "udp", policyVIPs[ipv6][0], false); allowed {
		t.Errorf("a new session passes the rules: %q", said)
	}
}
