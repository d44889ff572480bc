package flow

import (
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
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
	c := newPolicyServers(t, ipv6)
	if tracked {
		c.Node.NFT(t, "table inet tracking {\nchain forward {\ntype filter hook forward priority filter\nct state established accept\n}\n}\n")
	}
	n := c.flows(t, false)
	if !tracked {
		n.awaitShortcutsAllowed(true)
	}
	open := c.open(t)
	askEach(t, "before", open)
	for i, rules := range []string{"ct state new drop", "ct state invalid drop\nct state established accept\nct state new {family} saddr {client} drop"} {
		c.Node.NFT(t, fmt.Sprintf("table inet states%d {\nchain forward {\ntype filter hook forward priority filter\n%s\n}\n}\n", i, c.fill(rules)))
		n.awaitShortcutsAllowed(false)
		askEach(t, rules, open)
	}
	if said, allowed := c.try(c.Pods[0], "udp", policyVIPs[ipv6][0], false); allowed {
		t.Errorf("a new session passes the rules: %q", said)
	}
}

// Open connections and sessions that took shortcuts keep their ports when rules come that translate the sources
// of new ones.
func TestRulesThatTranslateKeepOpenConnections(t *testing.T) {
	t.Parallel()
	for _, ipv6 := range []bool{false, true} {
		for _, hidden := range []bool{false, true} {
			t.Run(fmt.Sprintf("ipv6=%t/hidden=%t", ipv6, hidden), func(t *testing.T) {
				t.Parallel()
				c := newPolicyServers(t, ipv6)
				n := c.flows(t, hidden)
				n.awaitShortcutsAllowed(true)
				open := c.open(t)
				said := askEach(t, "before", open)
				c.Node.NFT(t, c.fill("table {family} others {\nchain post {\ntype nat hook postrouting priority srcnat\n{family} saddr {client} masquerade fully-random\n}\n}\n"))
				n.awaitShortcutsAllowed(false)
				check.Equalf(t, askEach(t, "afterwards", open), said, "what the endpoints see")
				askEach(t, "new ones", c.open(t))
			})
		}
	}
}

// newPolicyServers is a network with servers at the endpoints.
func newPolicyServers(t *testing.T, ipv6 bool) *policyNet {
	c := &policyNet{Cluster: netns.NewCluster(t), ipv6: ipv6}
	for _, h := range []*netns.Host{c.Pods[1], c.Remote[0]} {
		h.WitnessTCP(t, 8080)
		h.WitnessUDP(t, 8080)
	}
	return c
}

// awaitShortcutsAllowed waits until packets may take shortcuts, or must not.
func (n *node) awaitShortcutsAllowed(want bool) {
	n.t.Helper()
	wait.Equal(n.t, "whether shortcuts are allowed", patience, want, func() bool {
		return atomic.LoadUint64(&n.server.kernel.Control.ShortcutsUntil) != 0
	})
}

// open opens a connection and a session to each Service.
func (c *policyNet) open(t *testing.T) (open []net.Conn) {
	t.Helper()
	for _, vip := range policyVIPs[c.ipv6] {
		for _, network := range []string{"tcp", "udp"} {
			conn := must.Get(c.Pods[0].Dialer(&net.Dialer{Timeout: patience}, network, net.JoinHostPort(vip, "80")))(t)
			t.Cleanup(func() { _ = conn.Close() })
			open = append(open, conn)
		}
	}
	return open
}

// askEach asks on each connection, three times, and returns the last answers of UDP, which say what the endpoints see.
func askEach(t *testing.T, when string, open []net.Conn) (sessions string) {
	t.Helper()
	for i := range 3 {
		for _, conn := range open {
			_ = conn.SetDeadline(time.Now().Add(patience))
			said, err := line(conn)
			must.OKf(t, err, "%s: %s to %s: %q", when, conn.LocalAddr(), conn.RemoteAddr(), said)
			if i == 2 && conn.LocalAddr().Network() == "udp" {
				sessions += said + "\n"
			}
		}
	}
	return sessions
}
