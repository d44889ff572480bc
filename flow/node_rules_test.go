package flow

import (
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/bench/world"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// clusterRules gives the lab's node the rules of the kubelet, flannel and portmap, and of ptp.
func clusterRules(t *testing.T, n *node) {
	t.Helper()
	if _, err := exec.LookPath("iptables-nft-restore"); err != nil {
		t.Skip("SKIP-NEEDS: iptables-nft-restore")
	}
	pod := n.lab.Backends[0].IPv4.String()
	const ptp = "*nat\n:CNI-1 - [0:0]\n-A POSTROUTING -s POD/32 -j CNI-1\n-A CNI-1 -d PODS -j ACCEPT\n-A CNI-1 ! -d 224.0.0.0/4 -j MASQUERADE\nCOMMIT\n"
	cmd := n.lab.Node.Command(t, "iptables-nft-restore", "--noflush")
	cmd.Stdin = strings.NewReader(world.Rules("10.2.0.0/16", pod) + strings.NewReplacer("PODS", "10.2.0.0/16", "POD", pod).Replace(ptp))
	must.Run(t, cmd)
}

// Beside the rules of a cluster's node, the kernel forwards the node's own clients. Connection tracking
// sees one connection of each, from the client to the Service and not translated. The endpoint sees
// the address that those rules would masquerade to, and long datagrams arrive.
func TestNodeClientsBesideAClustersRules(t *testing.T) {
	t.Parallel()
	lab := localNode(t, 2)
	lab.Backends[0].WitnessTCP(t, 8080)
	lab.Backends[0].WitnessUDP(t, 8080)
	endpoint, to := at(lab.Backends[0].IPv4, 8080), netip.MustParseAddrPort(vip4+":80")
	n := newNode(t, lab, nil)
	clusterRules(t, n)
	n.apply(svc(vip4, nil, at(lab.Backends[1].IPv4, 8080), endpoint)) // the first one is closed
	looked := func() bool { return n.server.node.Load().masquerade.Load() }
	wait.True(t, "the rules are known", looked)
	n.servesNode()
	const connections = 20
	for _, network := range []string{"tcp", "udp"} {
		for range connections {
			c := n.dialFrom(network, lab.Node.IPv4, to)
			if said := n.say(c); !strings.HasPrefix(said, "b1:8080 10.2.1.1:") {
				t.Errorf("%s: %q", network, said)
			}
			if network == "tcp" { // the kernel may give the next UDP client a closed one's port
				_ = c.Close()
			}
		}
	}
	tracked, err := lab.Node.Netlink().ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	must.OK(t, err)
	seen := make(map[uint8]int)
	for _, f := range tracked {
		if f.Forward.DstIP.String() != vip4 || !f.Reverse.SrcIP.Equal(f.Forward.DstIP) || f.Reverse.DstPort != f.Forward.SrcPort {
			t.Errorf("connection tracking has %s", f)
		}
		seen[f.Forward.Protocol]++
	}
	check.Equalf(t, fmt.Sprint(seen), fmt.Sprint(map[uint8]int{unix.IPPROTO_TCP: connections, unix.IPPROTO_UDP: connections}), "what connection tracking has of each protocol")
	d := n.dialFrom("udp", lab.Node.IPv4, to)
	n.say(d)
	long := strings.Repeat("x", 5000)
	_, err = io.WriteString(d, long)
	must.OK(t, err)
	got := make([]byte, 65536)
	if length, err := d.Read(got); err != nil || !strings.HasSuffix(string(got[:length]), long) {
		t.Errorf("%d bytes of %d came back, %v", length, len(long), err)
	}
	wait.True(t, "all connections have ended", func() bool { return len(n.taken()) == connections })
	for _, r := range n.taken() {
		if r.Path != conntrack.Kernel || r.End != conntrack.ClientFin || r.Endpoint.Addr != endpoint {
			t.Errorf("%+v", r)
		}
	}
}

// While rules judge what the node forwards, UDP of its own clients is relayed, since the node fragments
// long datagrams as it forwards them, and TCP is not.
func TestNodeClientsBesideRulesForForwardedPackets(t *testing.T) {
	t.Parallel()
	lab := localNode(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	lab.Backends[0].EchoUDP(t, 8080)
	lab.Node.WitnessUDPAt(t, vip4+":80") // the relay
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	n.servesNode()
	asks := func(network, want string) {
		t.Helper()
		if said := n.say(n.dialFrom(network, lab.Node.IPv4, netip.MustParseAddrPort(vip4+":80"))); !strings.HasPrefix(said, want) {
			t.Errorf("%s: %q, want %q", network, said, want)
		}
	}
	asks("udp", "b1:8080")
	lab.Node.NFT(t, "table ip other {\nchain c {\ntype filter hook forward priority 0\nip saddr 192.0.2.1 drop\n}\n}")
	wait.True(t, "the rules are known", func() bool { return n.server.node.Load().noFragments.Load() })
	asks("udp", "node:80")
	asks("tcp", "b1:8080")
}
