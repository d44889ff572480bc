package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The destination of a visit of nodesTable: the Service's address of that kind,
// and the node that is asked, if there is a choice.
const (
	atOwnNode   = "own node"
	atOtherNode = "another node"
)

// nodesTable lists which address of a client an endpoint sees in a cluster where
// each node has its own proxy. A Service has one endpoint: on the node that is
// asked ("here") or on another ("there").
var nodesTable = []struct {
	client   string // pod, node or outside
	kind     string
	asked    string // which node, for node ports
	policy   string // externalTrafficPolicy
	endpoint string
	want     string // whose address the endpoint sees, or silent
}{
	{"pod", clusterIP, atOwnNode, "", "here", "client"}, // A3.9
	{"pod", clusterIP, atOwnNode, "", "there", "client"},
	{"node", clusterIP, atOwnNode, "", "here", "node"},
	{"node", clusterIP, atOwnNode, "", "there", "node"},
	{"pod", nodePort, atOwnNode, "", "here", "node"}, // A3.8
	{"pod", nodePort, atOwnNode, "", "there", "node"},
	{"pod", nodePort, atOtherNode, "", "here", "node"},
	{"pod", nodePort, atOtherNode, "", "there", "node"},
	{"pod", nodePort, atOwnNode, "Local", "here", "client"}, // A3.6
	{"pod", nodePort, atOwnNode, "Local", "there", "client"},
	// The endpoint's node is the client's second proxy, beside that of its own
	// node.
	{"pod", nodePort, atOtherNode, "Local", "here", "client"},
	{"node", nodePort, atOwnNode, "", "there", "node"},
	{"node", nodePort, atOtherNode, "", "here", "node"},
	{"node", nodePort, atOtherNode, "Local", "here", "client"},
	{"outside", nodePort, atOtherNode, "", "here", "node"},
	{"outside", nodePort, atOtherNode, "", "there", "node"},
	{"outside", nodePort, atOtherNode, "Local", "here", "client"},
	{"outside", nodePort, atOtherNode, "Local", "there", "silent"}, // A3.5
	{"pod", nonLocalExternalIP, atOwnNode, "", "there", "node"},    // A3.13
	{"pod", nonLocalExternalIP, atOwnNode, "Local", "there", "client"},
	{"node", nonLocalExternalIP, atOwnNode, "", "there", "node"},
	{"pod", loadBalancerIP, atOwnNode, "", "here", "node"},
	{"pod", loadBalancerIP, atOwnNode, "Local", "there", "client"},
	{"outside", loadBalancerIP, atOtherNode, "", "there", "node"},
	{"outside", loadBalancerIP, atOtherNode, "Local", "here", "client"},
}

// nodesVisit is one connection: a row of the table for a client, a node and an
// endpoint.
type nodesVisit struct {
	name   string
	client client
	to     netip.AddrPort
	asked  *netns.Member
	want   string
}

// mostAgain is how many connections may have to be made again. The client's node and the
// endpoint's may happen to choose the same of 20,000 ports for one client and endpoint at a
// time (docs/steering.md): the endpoint's answers to one of them are lost.
const mostAgain = 2

// TestEachNodeServesBesideOthers makes the connections of nodesTable between three
// nodes that each run a proxy; two of them reach each other through the third. No
// proxy may take another proxy's replies.
func TestEachNodeServesBesideOthers(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		c := netns.NewNodes(t, 2) // an endpoint and a client on each
		var visits []nodesVisit
		var networks []string
		var services []*object
		for i, network := range m.networks() {
			for j, policy := range []string{"", "Local"} {
				for k, n := range c.Nodes {
					o := nodesService(network, policy, 100*i+10*j+k, k+1, n)
					serveNodes(t, n.Pods[0], network, o.target)
					services = append(services, o)
					list := nodesVisits(c, o, policy, k)
					visits = append(visits, list...)
					networks = append(networks, slices.Repeat([]string{network}, len(list))...)
				}
			}
		}
		var records []func() []record // of each node's proxy, which ends
		for _, n := range c.Nodes {
			p := newProxy(t, n.Host)
			p.mode = m
			for _, other := range c.Nodes {
				p.write(other.Name()+".yaml", nodeYAML(other.Name(), []netip.Addr{other.IPv4, other.IPv6}, other.PodCIDRs))
			}
			for _, o := range services {
				p.put(o)
			}
			p.start(decisionFlags("--hostname-override", n.Name())...)
			stop := sync.OnceFunc(p.stop)
			defer stop()
			records = append(records, func() []record {
				stop()
				return p.records()
			})
		}
		var again atomic.Int32
		got := crowd(len(visits), 32, func(i int) visit {
			v := visits[i]
			if v.want == "silent" {
				own, said := v.client.visit(networks[i], v.to, v.asked.Addrs(t), silence)
				return visit{name: said, client: own}
			}
			own, said := v.client.visit(networks[i], v.to, v.asked.Addrs(t), wait.Patience)
			if said == "silent" {
				again.Add(1)
				own, said = v.client.visit(networks[i], v.to, v.asked.Addrs(t), startTimeout)
			}
			return visit{name: said, client: own}
		})
		if n := again.Load(); n > mostAgain {
			t.Errorf("%d of %d connections had to be made again", n, len(visits))
		}
		var wrong []netip.AddrPort
		for i, v := range visits {
			if got[i].name != v.want {
				t.Errorf("%s %s: %s, want %s", networks[i], v.name, got[i].name, v.want)
				wrong = append(wrong, got[i].client)
			}
		}
		t.Logf("%d connections", len(visits))
		if len(wrong) == 0 {
			return
		}
		for i, of := range records {
			for _, r := range of() {
				if slices.ContainsFunc(wrong, func(client netip.AddrPort) bool { return r.Client.Addr() == client.Addr() && r.Protocol == "UDP" }) {
					t.Logf("%s has %+v", c.Nodes[i].Name(), r)
				}
			}
		}
	})
}

func serveNodes(t *testing.T, h *netns.Host, network string, port uint16) {
	t.Helper()
	if network == "udp" {
		h.WitnessUDP(t, port)
		return
	}
	h.WitnessTCP(t, port)
}

// nodesService has its endpoint on one node, and numbers of its own.
func nodesService(network, policy string, number, node int, n *netns.Member) *object {
	return &object{
		name: fmt.Sprintf("%s-%s-on-%d", network, strings.ToLower("p"+policy), node), protocol: corev1.Protocol(strings.ToUpper(network)),
		vips: []string{fmt.Sprintf("10.96.1.%d", number+1), fmt.Sprintf("fd00:96::1:%x", number+1)},
		port: uint16(1000 + number), nodePort: uint16(30000 + number), target: uint16(8000 + number),
		externalIPs: nonLocalIPs, lbIPs: lbIPs, external: policy,
		endpoints: []endpoint{{host: n.Pods[0], node: n.Name()}},
	}
}

// nodesVisits returns the connections of the table to a Service whose endpoint is
// on the node with the index on.
func nodesVisits(c *netns.Nodes, o *object, policy string, on int) []nodesVisit {
	var list []nodesVisit
	for _, row := range nodesTable {
		if row.policy != policy {
			continue
		}
		for i, asked := range c.Nodes {
			if (i == on) != (row.endpoint == "here") {
				continue
			}
			for j, home := range c.Nodes {
				from := client{name: row.client, Host: home.Host}
				switch {
				case row.client == "outside":
					if from.Host = c.Outside; j > 0 {
						continue
					}
					// Addresses that no node has are routed to the neighbouring
					// node.
					if row.kind == loadBalancerIP && i != 1 {
						continue
					}
				case (i == j) != (row.asked == atOwnNode):
					continue
				case row.client == "pod":
					from.Host = home.Pods[1]
				}
				for _, to := range nodesTargets(o, row.kind, asked) {
					want := row.want
					if want != "silent" {
						want = fmt.Sprintf("%s:%d %s", c.Nodes[on].Pods[0].Name(), o.target, want)
					}
					list = append(list, nodesVisit{
						name:   fmt.Sprintf("%s to %s of %s at %s, %s", from.Host.Name(), row.kind, o.name, asked.Name(), to),
						client: from, to: to, asked: asked, want: want,
					})
				}
			}
		}
	}
	return list
}

func nodesTargets(o *object, kind string, asked *netns.Member) []netip.AddrPort {
	if kind == nodePort {
		return []netip.AddrPort{netip.AddrPortFrom(asked.IPv4, o.nodePort), netip.AddrPortFrom(asked.IPv6, o.nodePort)}
	}
	return o.at(kind)
}
