package policy

import (
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// TestOnlyHintsCount shows A2.11: the Service's spec and annotations have no effect
// without hints; and A2.12: the hints that the slice controller derives from them
// do.
func TestOnlyHintsCount(t *testing.T) {
	for _, tt := range []struct {
		distribution *string
		annotation   string
		hints        [2]string // of the endpoint here, and of the other
		want         string
	}{
		{nil, "", [2]string{}, "10.1.0.1 10.1.0.2"},
		{ptr.To(corev1.ServiceTrafficDistributionPreferClose), "", [2]string{}, "10.1.0.1 10.1.0.2"},
		{nil, "Auto", [2]string{}, "10.1.0.1 10.1.0.2"},
		{nil, "", [2]string{" zonehint=a", " zonehint=b"}, "10.1.0.1"},
		{ptr.To(corev1.ServiceTrafficDistributionPreferClose), "", [2]string{" zonehint=a", " zonehint=b"}, "10.1.0.1"},
		{ptr.To(corev1.ServiceTrafficDistributionPreferSameZone), "", [2]string{" zonehint=b", " zonehint=b"}, "10.1.0.1 10.1.0.2"},
		{ptr.To(corev1.ServiceTrafficDistributionPreferSameNode), "", [2]string{" zonehint=a nodehint=n0", " zonehint=a nodehint=n1"}, "10.1.0.1"},
		{ptr.To(corev1.ServiceTrafficDistributionPreferSameNode), "", [2]string{" zonehint=b nodehint=n2", " zonehint=a nodehint=n1"}, "10.1.0.2"},
	} {
		c := change(t, svc{name: "web", clusterIPs: "10.96.0.1", annotations: map[string]string{"service.kubernetes.io/topology-mode": tt.annotation},
			endpoints: []string{"10.1.0.1 local" + tt.hints[0], "10.1.0.2 node=n1" + tt.hints[1]}})
		c.Services[0].Spec.TrafficDistribution = tt.distribution
		c.Nodes = []*corev1.Node{nodeObject(ownNode, map[string]string{"topology.kubernetes.io/zone": "a"})}
		table := Compile(nil, newStore().Apply(c), Config{NodeName: ownNode})
		check.Equalf(t, names(table.Resolve(service.TCP, clients["pod"], netip.MustParseAddrPort("10.96.0.1:80")).Candidates), tt.want, "A2.11, A2.12 %+v", tt)
	}
}

// TestNothingButTheTwoListsIsReached shows A2.14: for all clients and destinations,
// the candidates come from the cluster list or the local list.
func TestNothingButTheTwoListsIsReached(t *testing.T) {
	c := change(t, svc{name: "web", clusterIPs: "10.96.0.1", internal: "Local", external: "Local", balancerIPs: "192.0.2.1", externalIPs: "192.0.2.2", nodePort: 30000,
		endpoints: []string{"10.1.0.1 zonehint=a", "10.1.0.2 zonehint=b", "10.1.0.3 draining zonehint=a", "10.1.0.4 local zonehint=b", "10.1.0.5 unready local"}})
	c.Nodes = []*corev1.Node{nodeObject(ownNode, map[string]string{"topology.kubernetes.io/zone": "a"}, "172.16.0.1")}
	table := Compile(nil, newStore().Apply(c), Config{NodeName: ownNode, ClusterCIDRs: prefixes("10.244.0.0/16")})
	reached := map[string]bool{}
	for _, dst := range []string{"10.96.0.1:80", "192.0.2.1:80", "192.0.2.2:80", "172.16.0.1:30000"} {
		for _, client := range addresses("10.244.0.5", "172.16.0.1", "127.0.0.1", "198.51.100.7") {
			for _, e := range table.Resolve(service.TCP, client, netip.MustParseAddrPort(dst)).Candidates {
				reached[e.Addr.Addr().String()] = true
			}
		}
	}
	if len(reached) != 2 || !reached["10.1.0.1"] || !reached["10.1.0.4"] {
		t.Errorf("A2.14: reached %v", reached)
	}
}

// TestNoLocalEndpoints shows A3.16: it counts the service ports that A3.5 drops.
func TestNoLocalEndpoints(t *testing.T) {
	remote, here := []string{"10.1.0.1 node=n1"}, []string{"10.1.0.1 local"}
	for _, tt := range []struct {
		name               string
		svc                svc
		internal, external int
	}{
		{"policy Cluster", svc{endpoints: remote, nodePort: 30000}, 0, 0},
		{"internal", svc{endpoints: remote, internal: "Local"}, 1, 0},
		{"external", svc{endpoints: remote, external: "Local", nodePort: 30000}, 0, 1},
		{"both", svc{endpoints: remote, internal: "Local", external: "Local", balancerIPs: "192.0.2.1"}, 1, 1},
		{"local", svc{endpoints: here, internal: "Local", external: "Local", nodePort: 30000}, 0, 0},
		{"no endpoints at all", svc{internal: "Local", external: "Local", nodePort: 30000}, 0, 0},
		{"none that can serve", svc{endpoints: []string{"10.1.0.1 unready"}, internal: "Local"}, 0, 0},
	} {
		tt.svc.name, tt.svc.clusterIPs = "web", "10.96.0.1"
		table := Compile(nil, newStore().Apply(change(t, tt.svc)), Config{NodeName: ownNode})
		if internal, external := table.NoLocalEndpoints(service.IPv4); internal != tt.internal || external != tt.external {
			t.Errorf("A3.16 %s: %d, %d", tt.name, internal, external)
		}
		if internal, external := table.NoLocalEndpoints(service.IPv6); internal+external > 0 {
			t.Errorf("A3.16 %s: %d, %d for a family that it does not have", tt.name, internal, external)
		}
	}
}

// TestKeepsClients shows A3.9 for a whole table.
func TestKeepsClients(t *testing.T) {
	for _, tt := range []struct {
		name string
		svc  svc
		all  bool // MasqueradeAll
		want bool
	}{
		{"a cluster IP", svc{}, false, true},
		{"a cluster IP, all masqueraded", svc{}, true, false},
		{"a node port", svc{nodePort: 30000}, true, false},
		{"a node port, policy Local", svc{nodePort: 30000, external: "Local"}, true, true},
		{"policy Local for nothing", svc{external: "Local"}, true, false},
	} {
		tt.svc.name, tt.svc.clusterIPs, tt.svc.endpoints = "web", "10.96.0.1", []string{"10.1.0.1"}
		table := Compile(nil, newStore().Apply(change(t, tt.svc)), Config{NodeName: ownNode, MasqueradeAll: tt.all})
		check.Equalf(t, table.KeepsClients(), tt.want, "A3.9 %s", tt.name)
	}
}

// TestPodCIDRsComeAndChange shows A4.8: nothing waits for a node's podCIDRs, and
// they apply as soon as they are known.
func TestPodCIDRsComeAndChange(t *testing.T) {
	st := newStore()
	dst := netip.MustParseAddrPort("10.96.0.1:80")
	c := change(t, svc{name: "web", clusterIPs: "10.96.0.1", endpoints: []string{"10.1.0.1"}})
	cfg := Config{NodeName: ownNode, DetectLocal: DetectNodeCIDR}
	table := Compile(nil, st.Apply(c), cfg)
	check.Equalf(t, table.Resolve(service.TCP, clients["outside"], dst).Source, SourceClient, "A4.8, A3.7 without podCIDRs")
	for _, cidr := range []string{"10.244.0.0/24", "10.244.7.0/24"} {
		n := nodeObject(ownNode, nil)
		n.Spec.PodCIDRs = []string{cidr}
		table = Compile(table, st.Apply(service.Change{Nodes: []*corev1.Node{n}}), cfg)
		pod := netip.MustParsePrefix(cidr).Addr().Next()
		check.Equalf(t, table.Resolve(service.TCP, pod, dst).Source, SourceClient, "A4.8 pod in %s", cidr)
		check.Equalf(t, table.Resolve(service.TCP, clients["outside"], dst).Source, SourceNode, "A4.8 outside of %s", cidr)
	}
}

// TestNodePortAddressesOfTheTable shows A4.3 and A4.4 for who opens sockets.
func TestNodePortAddressesOfTheTable(t *testing.T) {
	local := addresses("172.16.0.2", "172.16.0.1", "127.0.0.1", "192.168.0.1", "fd01::1")
	snap := newStore().Apply(change(t, svc{name: "web", clusterIPs: "10.96.0.1"}))
	for _, tt := range []struct {
		ranges []netip.Prefix
		want   []netip.Addr
		all    bool
	}{
		{nil, addresses("172.16.0.1", "172.16.0.2", "192.168.0.1"), true},
		{prefixes("172.16.0.0/12"), addresses("172.16.0.1", "172.16.0.2"), false},
		{prefixes("172.16.0.0/12", "0.0.0.0/0"), addresses("172.16.0.1", "172.16.0.2", "192.168.0.1"), true},
		{prefixes("127.0.0.0/8"), nil, false},
	} {
		got, all := Compile(nil, snap, Config{NodeAddresses: local, NodePortAddresses: tt.ranges}).NodePortAddresses(service.IPv4)
		if !slices.Equal(got, tt.want) || all != tt.all {
			t.Errorf("A4.3, A4.4 %v: %v, %v", tt.ranges, got, all)
		}
	}
}
