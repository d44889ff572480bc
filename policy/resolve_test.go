package policy

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// say returns a verdict on one line: what a table of expectations can be read
// in. "accept A3.2 client A3.9: 10.1.0.1 10.1.0.2", "drop A3.5".
func say(v Verdict) string {
	if v.Action != Accept {
		return fmt.Sprintf("%s %s", v.Action, v.Rule)
	}
	return fmt.Sprintf("accept %s %s %s: %s", v.Rule, v.Source, v.SourceRule, names(v.Candidates))
}

// compile makes the table of a cluster with the node n0 (172.16.0.1, fd01::1).
func compile(t testing.TB, cfg Config, list ...svc) *Table {
	t.Helper()
	c := change(t, list...)
	c.Nodes = append(c.Nodes, nodeObject(ownNode, nil, "172.16.0.1", "fd01::1"))
	cfg.NodeName = ownNode
	return Compile(nil, newStore().Apply(c), cfg)
}

// The clients of the tests.
var clients = map[string]netip.Addr{
	"pod":      netip.MustParseAddr("10.244.0.5"),
	"pod6":     netip.MustParseAddr("fd44::5"),
	"node":     netip.MustParseAddr("172.16.0.1"),
	"node6":    netip.MustParseAddr("fd01::1"),
	"loopback": netip.MustParseAddr("127.0.0.1"),
	"bridge":   netip.MustParseAddr("10.244.0.1"), // an address of the node that is a pod's too
	"outside":  netip.MustParseAddr("198.51.100.7"),
	"outside6": netip.MustParseAddr("2001:db8::7"),
	"friend":   netip.MustParseAddr("203.0.113.9"), // in the source ranges
	"balancer": netip.MustParseAddr("192.0.2.2"),   // the load balancer IP itself
	"vip":      netip.MustParseAddr("10.96.0.1"),   // the cluster IP itself
}

func TestResolve(t *testing.T) {
	pods := Config{ClusterCIDRs: prefixes("10.244.0.0/16", "fd44::/16")}
	anyNode := Config{ClusterCIDRs: pods.ClusterCIDRs, NodeAddresses: addresses("10.244.0.1", "192.168.7.1")}
	const (
		vip, ext, lb, np = "10.96.0.1:80", "192.0.2.1:80", "192.0.2.2:80", "172.16.0.1:30000"
		both             = "10.1.0.1 10.1.0.2"
	)
	web := func(endpoints ...string) svc {
		return svc{name: "web", clusterIPs: "10.96.0.1", externalIPs: "192.0.2.1", balancerIPs: "192.0.2.2", nodePort: 30000, endpoints: endpoints}
	}
	with := func(s svc, f func(*svc)) svc { f(&s); return s }
	iL := func(s *svc) { s.internal = "Local" }
	eL := func(s *svc) { s.external = "Local" }
	mixed, remote := web("10.1.0.1", "10.1.0.2 local"), web("10.1.0.1", "10.1.0.2")
	dual := svc{name: "dual", clusterIPs: "10.96.0.2 fd00::2", nodePort: 30002, endpoints: []string{"10.1.0.1", "fd10::1"}}
	ranged := with(mixed, func(s *svc) { s.ranges = "203.0.113.0/24" })
	nodeRanged := with(mixed, func(s *svc) { s.ranges = "203.0.113.0/24 172.16.0.0/24" })

	tests := []struct {
		name   string
		cfg    Config
		svc    svc
		client string
		dst    string
		want   string
	}{
		// Which destinations.
		{"A3.1 cluster IP", pods, mixed, "pod", vip, "accept A3.2 client A3.9: " + both},
		{"A3.1 external IP", pods, mixed, "pod", ext, "accept A3.3 node A3.8: " + both},
		{"A3.1 load balancer IP", pods, mixed, "pod", lb, "accept A3.3 node A3.8: " + both},
		{"A3.1 node port", pods, mixed, "pod", np, "accept A3.3 node A3.8: " + both},
		{"A3.1 the port on a node address is not the node port", pods, mixed, "pod", "172.16.0.1:80", "none A3.13"},
		{"A3.1 the node port on a cluster IP", pods, mixed, "pod", "10.96.0.1:30000", "refuse A3.12"},
		{"A3.12 another port of a cluster IP", pods, mixed, "pod", "10.96.0.1:81", "refuse A3.12"},
		{"A3.12 an address of a service CIDR that no service has", Config{ServiceCIDRs: prefixes("10.96.0.0/16")}, mixed, "pod", "10.96.0.9:80", "drop A3.12"},
		{"A3.12 without a service CIDR", pods, mixed, "pod", "10.96.0.9:80", "none A3.13"},
		{"A3.13 another port of an external IP", pods, mixed, "pod", "192.0.2.1:81", "none A3.13"},
		{"A3.13 another port of a load balancer IP", pods, mixed, "pod", "192.0.2.2:81", "none A3.13"},
		{"A1.19 IPv6 has endpoints of its own", pods, dual, "pod6", "[fd00::2]:80", "accept A3.2 client A3.9: fd10::1"},
		{"A1.19 node port of a family without cluster IP", pods, mixed, "outside6", "[fd01::1]:30000", "none A3.13"},
		{"A1.19 node port of both families", pods, dual, "outside6", "[fd01::1]:30002", "accept A3.3 node A3.8: fd10::1"},

		// Which list.
		{"A3.2 internal Local", pods, with(mixed, iL), "pod", vip, "accept A3.2 client A3.9: 10.1.0.2"},
		{"A3.2 external Local does not matter", pods, with(mixed, eL), "pod", vip, "accept A3.2 client A3.9: " + both},
		{"A3.2 internal is what the destination is, not the client", pods, with(mixed, iL), "outside", vip, "accept A3.2 node A3.8: 10.1.0.2"},
		{"A3.3 external Local, external IP", pods, with(mixed, eL), "outside", ext, "accept A3.3 client A3.9: 10.1.0.2"},
		{"A3.3 external Local, load balancer IP", pods, with(mixed, eL), "outside", lb, "accept A3.3 client A3.9: 10.1.0.2"},
		{"A3.3 external Local, node port", pods, with(mixed, eL), "outside", np, "accept A3.3 client A3.9: 10.1.0.2"},
		{"A3.3 internal Local does not matter", pods, with(mixed, iL), "outside", ext, "accept A3.3 node A3.8: " + both},

		// Refuse or drop.
		{"A3.4 cluster IP", pods, web(), "pod", vip, "refuse A3.4"},
		{"A3.4 external IP", pods, web(), "outside", ext, "refuse A3.4"},
		{"A3.4 load balancer IP", pods, web(), "outside", lb, "refuse A3.4"},
		{"A3.4 node port", pods, web(), "outside", np, "refuse A3.4"},
		{"A3.4 none that is ready", pods, web("10.1.0.1 unready"), "pod", vip, "refuse A3.4"},
		{"A3.4 internal Local", pods, with(web(), iL), "pod", vip, "refuse A3.4"},
		{"A3.4 external Local", pods, with(web(), eL), "outside", np, "refuse A3.4"},
		{"A3.4 outside the source ranges", pods, with(ranged, func(s *svc) { s.endpoints = nil }), "outside", lb, "refuse A3.4"},
		{"A3.5 internal Local, all elsewhere", pods, with(remote, iL), "pod", vip, "drop A3.5"},
		{"A3.5 internal Local, all elsewhere, by the external IP", pods, with(remote, iL), "outside", ext, "accept A3.3 node A3.8: " + both},
		{"A3.5 external Local, all elsewhere, external IP", pods, with(remote, eL), "outside", ext, "drop A3.5"},
		{"A3.5 external Local, all elsewhere, load balancer IP", pods, with(remote, eL), "outside", lb, "drop A3.5"},
		{"A3.5 external Local, all elsewhere, node port", pods, with(remote, eL), "outside", np, "drop A3.5"},
		{"A3.5 external Local, all elsewhere, by the cluster IP", pods, with(remote, eL), "outside", vip, "accept A3.2 node A3.8: " + both},
		{"A3.5 only draining elsewhere", pods, with(web("10.1.0.1 draining"), iL), "pod", vip, "drop A3.5"},

		// Clients that bypass policy Local.
		{"A3.6 a pod", pods, with(mixed, eL), "pod", ext, "accept A3.6 client A3.9: " + both},
		{"A3.6 a pod, none here", pods, with(remote, eL), "pod", lb, "accept A3.6 client A3.9: " + both},
		{"A3.6 the node, none here", pods, with(remote, eL), "node", np, "accept A3.6 node A3.8: " + both},
		{"A3.6 the node by loopback", pods, with(remote, eL), "loopback", ext, "accept A3.6 node A3.8: " + both},
		{"A3.6 an address of the node in the pods' range", anyNode, with(remote, eL), "bridge", ext, "accept A3.6 client A3.9: " + both},
		{"A3.6 not for internal Local", pods, with(remote, iL), "node", vip, "drop A3.5"},
		{"A3.7 no pods known", Config{}, with(remote, eL), "pod", ext, "drop A3.5"},
		{"A3.7 no pods known, the node", Config{}, with(remote, eL), "node", ext, "accept A3.6 node A3.8: " + both},
		{"A3.7 no pods known, local ones", Config{}, with(mixed, eL), "pod", ext, "accept A3.3 client A3.9: 10.1.0.2"},

		// Whose address the endpoint sees.
		{"A3.8 cluster IP from outside", pods, mixed, "outside", vip, "accept A3.2 node A3.8: " + both},
		{"A3.8 cluster IP from the node", pods, mixed, "node", vip, "accept A3.2 node A3.8: " + both},
		{"A3.8 external, policy Cluster, a pod", pods, mixed, "pod", np, "accept A3.3 node A3.8: " + both},
		{"A3.8 masquerade all", Config{ClusterCIDRs: pods.ClusterCIDRs, MasqueradeAll: true}, mixed, "pod", vip, "accept A3.2 node A3.8: " + both},
		{"A3.8 masquerade all is for cluster IPs", Config{ClusterCIDRs: pods.ClusterCIDRs, MasqueradeAll: true}, with(mixed, eL), "outside", ext, "accept A3.3 client A3.9: 10.1.0.2"},
		{"A3.8 hairpin, the only endpoint", pods, web("10.244.0.5"), "pod", vip, "accept A3.2 node A3.8: 10.244.0.5"},
		{"A3.8 a loopback client never reaches another host", Config{}, mixed, "loopback", vip, "accept A3.2 node A3.8: " + both},
		{"A3.8 a cluster IP as client, which is the node itself", Config{}, mixed, "vip", vip, "accept A3.2 node A3.8: " + both},
		{"A3.9 a pod", pods, mixed, "pod", vip, "accept A3.2 client A3.9: " + both},
		{"A3.9 no pods known, from outside", Config{}, mixed, "outside", vip, "accept A3.2 client A3.9: " + both},
		{"A3.7 pods known of the other family only", Config{ClusterCIDRs: prefixes("fd44::/16")}, mixed, "outside", vip, "accept A3.2 client A3.9: " + both},

		// Source ranges.
		{"A3.10 in them", pods, ranged, "friend", lb, "accept A3.3 node A3.8: " + both},
		{"A3.10 outside", pods, ranged, "outside", lb, "drop A3.10"},
		{"A3.10 a pod is not exempt", pods, ranged, "pod", lb, "drop A3.10"},
		// Only a PROXY header names such a client.
		{"A3.10 a client of the other family, outside of its ranges", pods, with(dual, func(s *svc) { s.balancerIPs, s.ranges = "192.0.2.2", "fd99::/16" }), "outside6", lb, "drop A3.10"},
		{"A3.10 a client of the other family, in its ranges", pods, with(dual, func(s *svc) { s.balancerIPs, s.ranges = "192.0.2.2", "2001:db8::/32" }), "outside6", lb, "accept A3.3 node A3.8: 10.1.0.1"},
		{"A3.10 not on the node port", pods, ranged, "outside", np, "accept A3.3 node A3.8: " + both},
		{"A3.10 not on the external IP", pods, ranged, "outside", ext, "accept A3.3 node A3.8: " + both},
		{"A3.10 not on the cluster IP", pods, ranged, "outside", vip, "accept A3.2 node A3.8: " + both},
		{"A3.10 an external IP that is a load balancer IP too", pods, with(ranged, func(s *svc) { s.externalIPs = "192.0.2.2" }), "outside", lb, "drop A3.10"},
		{"A3.10 before A3.5", pods, with(with(ranged, eL), func(s *svc) { s.endpoints = remote.endpoints }), "outside", lb, "drop A3.10"},
		{"A3.10 ranges of the other family only", pods, with(mixed, func(s *svc) { s.ranges = "2001:db8::/32" }), "outside", lb, "accept A3.3 node A3.8: " + both},
		{"A3.10 a zero range", pods, with(ranged, func(s *svc) { s.ranges += " 0.0.0.0/0" }), "outside", lb, "accept A3.3 node A3.8: " + both},
		{"A3.11 the node is in them", pods, nodeRanged, "node", lb, "accept A3.3 node A3.8: " + both},
		{"A3.11 another address of the node", anyNode, nodeRanged, "bridge", lb, "accept A3.3 node A3.8: " + both},
		{"A3.11 the load balancer IP itself", pods, nodeRanged, "balancer", lb, "accept A3.3 node A3.8: " + both},
		{"A3.11 the node is not in them", pods, ranged, "node", lb, "drop A3.10"},
		{"A3.11 from outside all the same", pods, nodeRanged, "outside", lb, "drop A3.10"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			client, ok := clients[tt.client]
			if !ok {
				t.Fatalf("no client %q", tt.client)
			}
			table := compile(t, tt.cfg, tt.svc)
			dst := netip.MustParseAddrPort(tt.dst)
			v := table.Resolve(service.TCP, client, dst)
			check.Equal(t, say(v), tt.want)
			check.Equalf(t, v.Port == nil, v.Rule == RuleUnknownPort || v.Rule == RuleNotOurs, "port: %v", v.Port)
			if got := table.Resolve(service.UDP, client, dst); got.Action == Accept {
				t.Errorf("UDP, which the service does not have: %s", say(got))
			}
		})
	}
}

func TestVerdictKind(t *testing.T) {
	table := compile(t, Config{}, svc{name: "web", clusterIPs: "10.96.0.1", externalIPs: "192.0.2.1", balancerIPs: "192.0.2.2", nodePort: 30000})
	for dst, want := range map[string]service.AddressKind{
		"10.96.0.1:80": service.ClusterIP, "192.0.2.1:80": service.ExternalIP, "192.0.2.2:80": service.LoadBalancer,
		"172.16.0.1:30000": service.NodePort, "10.96.0.1:81": service.ClusterIP,
	} {
		check.Equalf(t, table.Resolve(service.TCP, clients["outside"], netip.MustParseAddrPort(dst)).Kind, want, "A3.1 %s", dst)
	}
}

func TestSourceFor(t *testing.T) {
	pod, other := clients["pod"], netip.MustParseAddr("10.1.0.1")
	v := Verdict{Source: SourceClient}
	check.Equalf(t, v.SourceFor(pod, pod), SourceNode, "A3.8 hairpin")
	check.Equalf(t, v.SourceFor(pod, other), SourceClient, "A3.9 another endpoint")
}

func TestSteering(t *testing.T) {
	iL := svc{name: "a", clusterIPs: "10.96.0.1", internal: "Local", endpoints: []string{"10.1.0.1"}}
	eL := svc{name: "b", clusterIPs: "10.96.0.2", external: "Local", nodePort: 30000, externalIPs: "192.0.2.1", endpoints: []string{"10.1.0.1"}}
	none := svc{name: "c", clusterIPs: "10.96.0.3", externalIPs: "192.0.2.3"}
	draining := svc{name: "d", clusterIPs: "10.96.0.4", endpoints: []string{"10.1.0.1 draining"}}
	table := compile(t, Config{ServiceCIDRs: prefixes("10.96.0.0/16")}, iL, eL, none, draining)
	tests := []struct {
		name string
		dst  string
		want Action
	}{
		{"A3.5 nobody reaches it", "10.96.0.1:80", Drop},
		{"A3.2 a cluster IP", "10.96.0.2:80", Accept},
		{"A3.6 the node reaches it", "192.0.2.1:80", Accept},
		{"A3.6 the node reaches the node port", "172.16.0.1:30000", Accept},
		{"A3.4 cluster IP without endpoints", "10.96.0.3:80", Refuse},
		{"A3.4 external IP without endpoints", "192.0.2.3:80", Refuse},
		{"A2.4 draining", "10.96.0.4:80", Accept},
		{"A3.12 another port", "10.96.0.2:81", Refuse},
		{"A3.12 no service's address", "10.96.0.99:80", Drop},
		{"A3.13 not ours", "192.0.2.1:81", None},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ap := netip.MustParseAddrPort(tt.dst)
			check.Equal(t, table.Steering(service.Destination{Addr: ap.Addr(), Port: ap.Port(), Protocol: service.TCP}), tt.want)
		})
	}
}

func TestNodePortAddresses(t *testing.T) {
	web := svc{name: "web", clusterIPs: "10.96.0.1 fd00::1", nodePort: 30000, endpoints: []string{"10.1.0.1", "fd10::1"}}
	more := addresses("192.168.7.1", "fd07::1", "127.0.0.1", "::1")
	all := map[string]string{"a": "172.16.0.1", "b": "192.168.7.1", "c": "127.0.0.1", "d": "fd01::1", "e": "fd07::1", "f": "::1", "x": "198.51.100.1"}
	tests := []struct {
		name string
		cfg  Config
		want string // the letters of the addresses that have node ports
	}{
		{"A4.3 no ranges, all but loopback", Config{}, "abde"},
		{"A4.3 ranges of one family, the other has all", Config{NodePortAddresses: prefixes("172.16.0.0/12")}, "ade"},
		{"A4.3 a zero range makes the others idle", Config{NodePortAddresses: prefixes("172.16.0.0/12", "0.0.0.0/0")}, "abde"},
		{"A4.5 all, and loopback", Config{NodePortAddresses: prefixes("0.0.0.0/0", "127.0.0.0/8", "::/0", "::1/128")}, "abcdef"},
		{"A4.4 a range that holds loopback", Config{NodePortAddresses: prefixes("0.0.0.0/1", "fd01::/16")}, "cd"},
		{"A4.4 addresses within the ranges", Config{NodePortAddresses: prefixes("192.168.7.0/24", "fd07::/16")}, "be"},
		{"A4.2 primary", Config{NodePortPrimary: true}, "ad"},
		{"A4.1 primary and a range", Config{NodePortPrimary: true, NodePortAddresses: prefixes("192.168.7.1/32")}, "abd"},
		{"A4.2 localhost", Config{NodePortAddresses: prefixes("127.0.0.0/8", "::1/128")}, "cf"},
		{"A4.5 all, loopback asked for", Config{LocalhostNodePorts: true}, "abcde"},
		{"A4.5 all by zero ranges, loopback asked for", Config{LocalhostNodePorts: true, NodePortAddresses: prefixes("0.0.0.0/0", "::/0")}, "abcde"},
		{"A4.5 loopback asked for, but there are ranges", Config{LocalhostNodePorts: true, NodePortAddresses: prefixes("172.16.0.0/12", "fd01::/16")}, "ad"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.cfg.NodeAddresses = more
			table := compile(t, tt.cfg, web)
			got := ""
			for _, letter := range []string{"a", "b", "c", "d", "e", "f", "x"} {
				dst := netip.AddrPortFrom(netip.MustParseAddr(all[letter]), 30000)
				if table.Resolve(service.TCP, clients["outside"], dst).Action == Accept {
					got += letter
				}
			}
			check.Equal(t, got, tt.want)
		})
	}
}

// TestNodePortAndExternalIP: an external IP that is the node's own address, with
// the number of another service's node port, takes precedence.
func TestNodePortAndExternalIP(t *testing.T) {
	a := svc{name: "a", clusterIPs: "10.96.0.1", nodePort: 80, endpoints: []string{"10.1.0.1"}}
	b := svc{name: "b", clusterIPs: "10.96.0.2", externalIPs: "172.16.0.1", endpoints: []string{"10.1.0.2"}}
	v := compile(t, Config{}, a, b).Resolve(service.TCP, clients["outside"], netip.MustParseAddrPort("172.16.0.1:80"))
	if v.Kind != service.NodePort || v.Port.Name.Name.Name != "a" {
		t.Errorf("A3.1: got %s of %s", v.Kind, v.Port.Name)
	}
}

// TestNodeWithoutObject: without a Node object, the flags apply.
func TestNodeWithoutObject(t *testing.T) {
	c := change(t, svc{name: "web", clusterIPs: "10.96.0.1", nodePort: 30000, balancerIPs: "192.0.2.2", ranges: "172.16.0.0/24", endpoints: []string{"10.1.0.1"}})
	table := Compile(nil, newStore().Apply(c), Config{NodeIPs: addresses("172.16.0.1"), NodePortPrimary: true})
	check.Equalf(t, table.Resolve(service.TCP, clients["outside"], netip.MustParseAddrPort("172.16.0.1:30000")).Action, Accept, "A4.7 node port")
	check.Equalf(t, table.Resolve(service.TCP, clients["loopback"], netip.MustParseAddrPort("192.0.2.2:80")).Action, Accept, "A3.11 from loopback")
}

func TestDetectNodeCIDR(t *testing.T) {
	c := change(t, svc{name: "web", clusterIPs: "10.96.0.1", endpoints: []string{"10.1.0.1"}})
	n := nodeObject(ownNode, nil, "172.16.0.1")
	n.Spec.PodCIDRs = []string{"10.244.0.0/24"}
	c.Nodes = append(c.Nodes, n)
	table := Compile(nil, newStore().Apply(c), Config{NodeName: ownNode, DetectLocal: DetectNodeCIDR, ClusterCIDRs: prefixes("10.0.0.0/8")})
	for client, want := range map[string]Source{"10.244.0.5": SourceClient, "10.244.1.5": SourceNode} {
		check.Equalf(t, table.Resolve(service.TCP, netip.MustParseAddr(client), netip.MustParseAddrPort("10.96.0.1:80")).Source, want, "A4.6 %s", client)
	}
}

// TestDetectInterface: a client is a pod if the node routes its address to a pod
// interface. Without such routes, no client is (A4.6, A3.7).
func TestDetectInterface(t *testing.T) {
	web := svc{name: "web", clusterIPs: "10.96.0.1 fd00::1", external: "Local", nodePort: 30000, endpoints: []string{"10.1.0.1", "fd10::1"}}
	cfg := Config{DetectLocal: DetectInterface, ClusterCIDRs: prefixes("10.0.0.0/8"), PodRanges: prefixes("10.244.0.9/32", "10.244.0.5/32", "10.245.0.0/24", "10.245.0.0/24")}
	const pod, other = "accept A3.6 client A3.9: 10.1.0.1", "drop A3.5"
	for client, want := range map[string]string{"10.244.0.5": pod, "10.244.0.9": pod, "10.245.0.77": pod, "10.244.0.6": other, "10.244.0.1": other, "10.246.0.1": other} {
		check.Equalf(t, say(compile(t, cfg, web).Resolve(service.TCP, netip.MustParseAddr(client), netip.MustParseAddrPort("172.16.0.1:30000"))), want, "A4.6 %s", client)
	}
	for client, dst := range map[string]string{"10.244.0.6": "10.96.0.1:80", "fd44::5": "[fd00::1]:80"} {
		if got := compile(t, cfg, web).Resolve(service.TCP, netip.MustParseAddr(client), netip.MustParseAddrPort(dst)).Source; got != SourceNode {
			t.Errorf("A3.8 %s, which is no pod, to a cluster IP: %s", client, got)
		}
	}
}

// TestZoneChange: after a change of the node's zone label, all services are decided
// again.
func TestZoneChange(t *testing.T) {
	st := newStore()
	c := change(t, svc{name: "web", clusterIPs: "10.96.0.1", endpoints: []string{"10.1.0.1 zonehint=a", "10.1.0.2 zonehint=b"}})
	c.Nodes = []*corev1.Node{nodeObject(ownNode, map[string]string{"topology.kubernetes.io/zone": "a"})}
	dst := netip.MustParseAddrPort("10.96.0.1:80")
	first := Compile(nil, st.Apply(c), Config{NodeName: ownNode})
	check.Equalf(t, names(first.Resolve(service.TCP, clients["pod"], dst).Candidates), "10.1.0.1", "A2.9")
	moved := service.Change{Nodes: []*corev1.Node{nodeObject(ownNode, map[string]string{"topology.kubernetes.io/zone": "b"})}}
	second := Compile(first, st.Apply(moved), Config{NodeName: ownNode})
	check.Equalf(t, names(second.Resolve(service.TCP, clients["pod"], dst).Candidates), "10.1.0.2", "A2.13")
}

// TestCompileKeepsWhatDidNotChange: by the lists' own memory, and by chunks.
func TestCompileKeepsWhatDidNotChange(t *testing.T) {
	st := newStore()
	var list []svc
	for i := range 2*chunkSize + 1 { // three chunks
		list = append(list, svc{name: fmt.Sprintf("s%03d", i), clusterIPs: fmt.Sprintf("10.96.0.%d", i), endpoints: []string{"10.1.0.1", "10.1.0.2 unready"}})
	}
	listOf := func(table *Table, i int) *service.Endpoint {
		return &table.Resolve(service.TCP, clients["pod"], netip.MustParseAddrPort(list[i].clusterIPs+":80")).Candidates[0]
	}
	first := Compile(nil, st.Apply(change(t, list...)), Config{})
	list[1].endpoints = list[1].endpoints[:1]
	second := Compile(first, st.Apply(change(t, list[1])), Config{})
	if listOf(first, 0) != listOf(second, 0) || first.chunks[1] != second.chunks[1] || first.chunks[2] != second.chunks[2] {
		t.Error("an unchanged port was compiled again")
	}
	if listOf(first, 1) == listOf(second, 1) {
		t.Error("a changed port was not compiled again")
	}
	moved := Config{MasqueradeAll: true, DetectLocal: DetectInterface, PodRanges: prefixes("10.244.0.0/24"), NodeAddresses: addresses("172.16.0.9")}
	third := Compile(second, second.Snapshot(), moved)
	check.EqualSlicesf(t, third.chunks, second.chunks, "other addresses of pods and of the node compiled ports again")
	if got := third.Resolve(service.TCP, clients["pod"], netip.MustParseAddrPort("10.96.0.0:80")); got.Source != SourceNode {
		t.Errorf("and did not count: %s", say(got))
	}
	for _, cfg := range []Config{{NodeName: "other"}, {NodeIPs: addresses("172.16.0.1")}} {
		if again := Compile(third, second.Snapshot(), cfg); listOf(again, 0) == listOf(third, 0) {
			t.Errorf("%+v did not compile all again", cfg)
		}
	}
	last := len(list) - 1
	deleted := service.ObjectKey{Kind: service.KindService, Name: service.Name{Namespace: "default", Name: list[last].name}}
	gone := Compile(third, st.Apply(service.Change{Deleted: []service.ObjectKey{deleted}}), Config{MasqueradeAll: true})
	if gone.port(service.PortID(last)).port != nil || gone.chunks[0] != third.chunks[0] {
		t.Error("a deleted port is still there")
	}
	added := svc{name: "t", clusterIPs: "10.97.0.1", endpoints: []string{"10.1.0.1"}}
	more := Compile(gone, st.Apply(change(t, list[last], added)), Config{MasqueradeAll: true})
	for _, dst := range []string{list[last].clusterIPs + ":80", "10.97.0.1:80", "10.96.0.0:80"} {
		if got := more.Resolve(service.TCP, clients["pod"], netip.MustParseAddrPort(dst)); got.Action != Accept {
			t.Errorf("%s: %s", dst, say(got))
		}
	}
}

func TestRuleNames(t *testing.T) {
	for r := RuleNotOurs; r <= RuleUnknownPort; r++ {
		if !strings.HasPrefix(r.String(), "A") {
			t.Errorf("rule %d: %q", r, r)
		}
	}
	check.Equal(t, Rule(200).String(), "unknown")
}
