package flow

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
)

// Open connections and sessions go on when rules come that drop what connection tracking takes for
// new, if tracking had begun before these opened, as docs/datapath.md says.
func TestRulesWithStatesKeepTrackedConnections(t *testing.T) {
	t.Parallel()
	c := &policyNet{Cluster: netns.NewCluster(t)}
	near, remote := c.Pods[1], c.Remote[0]
	for _, h := range []*netns.Host{near, remote} {
		h.WitnessTCP(t, 8080)
		h.WitnessUDP(t, 8080)
	}
	c.Node.NFT(t, "table inet tracking {\nchain forward {\ntype filter hook forward priority filter\nct state established accept\n}\n}\n")
	c.flows(t, false)
	var open []net.Conn
	for _, vip := range policyVIPs[false] {
		for _, network := range []string{"tcp", "udp"} {
			conn, err := c.Pods[0].Dialer(&net.Dialer{Timeout: patience}, network, net.JoinHostPort(vip, "80"))
			if err != nil {
				t.Fatal(err)
			}
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
					t.Errorf("%s: %s to %s: %q, %v", rules, conn.LocalAddr(), conn.RemoteAddr(), said, err)
				}
			}
		}
	}
	ask("before")
	for i, rules := range []string{"ct state new drop", "ct state invalid drop\nct state established accept\nct state new ip saddr " + c.Pods[0].IPv4.String() + " drop"} {
		c.Node.NFT(t, fmt.Sprintf("table inet states%d {\nchain forward {\ntype filter hook forward priority filter\n%s\n}\n}\n", i, rules))
		ask(rules)
	}
	if said, allowed := c.try(c.Pods[0], "udp", policyVIPs[false][0], false); allowed {
		t.Errorf("a new session passes the rules: %q", said)
	}
}
