package flow

import (
	"bufio"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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

// talk is a connection to a server that echoes, or a session. A connection's server has said its name.
type talk struct {
	net.Conn
	answers *bufio.Reader
}

// open opens a connection and a session to each Service. Nothing is sent on a connection that nobody asks.
func (c *policyNet) open(t *testing.T) (open []talk) {
	t.Helper()
	for _, vip := range policyVIPs[c.ipv6] {
		for _, network := range []string{"tcp", "udp"} {
			d := &net.Dialer{Timeout: patience, KeepAlive: -1}
			conn := must.Get(c.Pods[0].Dialer(d, network, net.JoinHostPort(vip, "80")))(t)
			t.Cleanup(func() { _ = conn.Close() })
			k := talk{conn, bufio.NewReader(conn)}
			if network == "tcp" {
				_ = conn.SetDeadline(time.Now().Add(patience))
				must.Get(k.answers.ReadString('\n'))(t)
			}
			open = append(open, k)
		}
	}
	return open
}

// ask returns what the server sees of the client's address if it is a session.
func (k talk) ask() (said string, err error) {
	_ = k.SetDeadline(time.Now().Add(patience))
	conn, isTCP := k.Conn.(*net.TCPConn)
	if !isTCP {
		return line(k.Conn)
	}
	if _, err = conn.Write([]byte("who?\n")); err == nil {
		_, err = k.answers.ReadString('\n')
	}
	if err != nil {
		return "", err
	}
	raw, err := conn.SyscallConn()
	if err == nil { // the acknowledgement goes at once, so that no packet is to come
		err = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_QUICKACK, 1) })
	}
	return "", err
}

// askEach asks on each connection, three times, and returns the last answers of sessions.
func askEach(t *testing.T, when string, open []talk) (sessions string) {
	t.Helper()
	for i := range 3 {
		for _, k := range open {
			said, err := k.ask()
			must.OKf(t, err, "%s: %s to %s: %q", when, k.LocalAddr(), k.RemoteAddr(), said)
			if i == 2 {
				sessions += said + "\n"
			}
		}
	}
	return sessions
}
