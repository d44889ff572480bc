package netns

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

// Member is a node of a cluster, with its pods.
type Member struct {
	*Host
	Pods     []*Host
	PodCIDRs []netip.Prefix
}

// Nodes is a cluster of three nodes in a row, each a router with pods: what the
// first and the last send each other passes the one in the middle, as does what
// they and the client outside send each other.
//
//	node1 10.1.1.1 fd00:1:1::1 --- 10.1.1.254 fd00:1:1::ff  node2
//	node3 10.1.3.1 fd00:1:3::1 --- 10.1.3.254 fd00:1:3::ff  node2
//	outside 10.1.0.2 fd00:1::2 --- 10.1.0.1   fd00:1::1     node2
//
// Pods of node N are 10.244.N.2 and fd00:244:N::2 onwards, joined as those of
// Cluster.
type Nodes struct {
	Nodes   []*Member
	Outside *Host
}

// NewNodes builds a cluster that is released when the test ends.
func NewNodes(t testing.TB, podsEach int) *Nodes {
	t.Helper()
	c := &Nodes{Outside: &Host{New(t, "outside"), netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("fd00:1::2")}}
	for i, at := range [][2]string{{"10.1.1.1", "fd00:1:1::1"}, {"10.1.0.1", "fd00:1::1"}, {"10.1.3.1", "fd00:1:3::1"}} {
		c.Nodes = append(c.Nodes, &Member{
			Host:     &Host{New(t, fmt.Sprintf("node%d", i+1)), netip.MustParseAddr(at[0]), netip.MustParseAddr(at[1])},
			PodCIDRs: prefixes(fmt.Sprintf("10.244.%d.0/24", i+1), fmt.Sprintf("fd00:244:%d::/64", i+1)),
		})
	}
	middle := c.Nodes[1]
	attach(t, middle.Host, c.Outside, middle.IPv4, middle.IPv6)
	for _, i := range []int{1, 3} {
		attach(t, middle.Host, c.Nodes[i-1].Host, addrs(fmt.Sprintf("10.1.%d.254", i))[0], addrs(fmt.Sprintf("fd00:1:%d::ff", i))[0])
	}
	// The node's own processes need a route for addresses that only a proxy
	// serves.
	for _, via := range []netip.Addr{c.Outside.IPv4, c.Outside.IPv6} {
		must.OK(t, middle.AddRoute(netip.PrefixFrom(zero(via), 0), via))
	}
	for i, n := range c.Nodes {
		n.forward(t)
		if n != middle {
			for f, via := range []netip.Addr{n.IPv4, n.IPv6} {
				must.OK(t, middle.AddRoute(n.PodCIDRs[f], via))
			}
		}
		four, six := n.PodCIDRs[0].Addr().Next(), n.PodCIDRs[1].Addr().Next()
		for j := range podsEach {
			four, six = four.Next(), six.Next()
			pod := &Host{New(t, fmt.Sprintf("pod-%d-%d", i+1, j+1)), four, six}
			attachPod(t, n.Host, pod, n.PodCIDRs)
			n.Pods = append(n.Pods, pod)
		}
	}
	return c
}
