package policy

import (
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// TestCategorize goes through what upstream's table of the same purpose goes
// through, and more. A list is "unused" if no policy of the port uses it; then
// it is empty, whatever endpoints there are.
func TestCategorize(t *testing.T) {
	const unused = "unused"
	zones := []string{"10.1.2.3 zonehint=a", "10.1.2.4 zonehint=b", "10.1.2.5 zonehint=c", "10.1.2.6 zonehint=a"}
	localZones := []string{"10.1.2.3 local zonehint=a", "10.1.2.4 local zonehint=b", "10.1.2.5 zonehint=c", "10.1.2.6 zonehint=a"}
	const all = "10.1.2.3 10.1.2.4 10.1.2.5 10.1.2.6"
	ports := map[string]service.Port{
		"":               {},
		"iL":             {InternalLocal: true},
		"eL":             {ExternalLocal: true},
		"nodePort":       {NodePort: 30000},
		"iL nodePort":    {InternalLocal: true, NodePort: 30000},
		"eL nodePort":    {ExternalLocal: true, NodePort: 30000},
		"iL eL nodePort": {InternalLocal: true, ExternalLocal: true, NodePort: 30000},
	}
	tests := []struct {
		name      string
		port      string
		zone      string
		endpoints []string
		cluster   string
		local     string
		any       bool
	}{
		{"A2.9 zone hints", "", "a", zones, "10.1.2.3 10.1.2.6", unused, true},
		{"A2.9 two hints for one endpoint", "", "c", []string{
			"10.1.2.3 zonehint=a zonehint=b zonehint=c", "10.1.2.4 zonehint=b zonehint=c", "10.1.2.5 zonehint=b zonehint=d", "10.1.2.6 zonehint=c"},
			"10.1.2.3 10.1.2.4 10.1.2.6", unused, true},
		{"A2.10 no zone label", "", "", zones[:1], "10.1.2.3", unused, true},
		{"A2.10 no zone label, and a hint without a name", "", "", []string{"10.1.2.3 zonehint=", "10.1.2.4 zonehint=a"}, "10.1.2.3 10.1.2.4", unused, true},
		{"A2.10 a zone that no hint names", "", "d", zones, all, unused, true},
		{"A2.10 one without a hint", "", "a", []string{"10.1.2.3 zonehint=a", "10.1.2.4 zonehint=b", "10.1.2.5", "10.1.2.6 zonehint=a"}, all, unused, true},
		{"A2.10 no hints at all", "", "a", []string{"10.1.2.3", "10.1.2.4"}, "10.1.2.3 10.1.2.4", unused, true},
		{"A2.8 an unready one does not count", "", "a", []string{"10.1.2.3 zonehint=a", "10.1.2.4 zonehint=b", "10.1.2.6 zonehint=a unready"}, "10.1.2.3", unused, true},
		{"A2.8 an unready one without a hint does not count", "", "a", []string{"10.1.2.3 zonehint=a", "10.1.2.4 zonehint=b", "10.1.2.6 unready"}, "10.1.2.3", unused, true},
		{"A2.8 only unready ones in the zone", "", "a", []string{"10.1.2.3 zonehint=a unready", "10.1.2.4 zonehint=b", "10.1.2.5 zonehint=c"}, "10.1.2.4 10.1.2.5", unused, true},
		{"A2.8 node hints", "", "a", []string{"10.1.2.3 nodehint=n0 zonehint=a", "10.1.2.4 nodehint=n1 zonehint=a"}, "10.1.2.3", unused, true},
		{"A2.8 node hints without zone hints", "", "", []string{"10.1.2.3 nodehint=n0", "10.1.2.4 nodehint=n1"}, "10.1.2.3", unused, true},
		{"A2.9 no node hint for us, then the zone", "", "a", []string{"10.1.2.3 nodehint=n1 zonehint=a", "10.1.2.4 nodehint=n2 zonehint=b"}, "10.1.2.3", unused, true},
		{"A2.9 one without a node hint, then the zone", "", "a", []string{"10.1.2.3 nodehint=n0 zonehint=a", "10.1.2.4 zonehint=a", "10.1.2.5 zonehint=b"}, "10.1.2.3 10.1.2.4", unused, true},
		{"A2.10 neither", "", "a", []string{"10.1.2.3 nodehint=n1 zonehint=b", "10.1.2.4 nodehint=n2 zonehint=b"}, "10.1.2.3 10.1.2.4", unused, true},

		{"A2.5 no hints for policy Local, external", "eL nodePort", "a", localZones, "10.1.2.3 10.1.2.6", "10.1.2.3 10.1.2.4", true},
		{"A2.5 no hints for policy Local, internal", "iL nodePort", "a", localZones, "10.1.2.3 10.1.2.6", "10.1.2.3 10.1.2.4", true},
		{"A2.5 hints and place contradict", "eL nodePort", "a", []string{
			"10.0.0.0 local zonehint=a", "10.0.0.1 local zonehint=b", "10.0.0.2 zonehint=a", "10.0.0.3 zonehint=b"}, "10.0.0.0 10.0.0.2", "10.0.0.0 10.0.0.1", true},

		{"A2.3 internal Local alone uses no cluster list", "iL", "", []string{"10.0.0.0", "10.0.0.1 local"}, unused, "10.0.0.1", true},
		{"A2.3 internal Local, no endpoints", "iL", "", nil, unused, "", false},
		{"A2.6 internal Local, all elsewhere", "iL", "", []string{"10.0.0.0", "10.0.0.1"}, unused, "", true},
		{"A2.3 internal Local, all here", "iL", "", []string{"10.0.0.0 local", "10.0.0.1 local"}, unused, "10.0.0.0 10.0.0.1", true},
		{"A2.1 external Local without an external address", "eL", "", []string{"10.0.0.0", "10.0.0.1 local"}, "10.0.0.0 10.0.0.1", unused, true},
		{"A2.3 internal Local, external Cluster", "iL nodePort", "", []string{"10.0.0.0 local", "10.0.0.1"}, "10.0.0.0 10.0.0.1", "10.0.0.0", true},
		{"A2.3 internal Cluster, external Local", "eL nodePort", "", []string{"10.0.0.0 local", "10.0.0.1"}, "10.0.0.0 10.0.0.1", "10.0.0.0", true},
		{"A2.3 both Local", "iL eL nodePort", "", []string{"10.0.0.0 local", "10.0.0.1"}, "10.0.0.0 10.0.0.1", "10.0.0.0", true},
		{"A2.3 both Local, all elsewhere", "iL eL nodePort", "", []string{"10.0.0.0", "10.0.0.1"}, "10.0.0.0 10.0.0.1", "", true},
		{"A2.3 both Cluster", "nodePort", "", []string{"10.0.0.0 local", "10.0.0.1"}, "10.0.0.0 10.0.0.1", unused, true},

		{"A2.7 none ready", "", "", []string{"10.0.0.0 unready", "10.0.0.1 unready"}, "", unused, false},
		{"A2.7 serving but not terminating is not enough", "", "", []string{"10.0.0.0 serving"}, "", unused, false},
		{"A2.4 some ready", "", "", []string{"10.0.0.0 unready", "10.0.0.1"}, "10.0.0.1", unused, true},
		{"A2.4 all draining", "", "", []string{"10.0.0.0 draining local", "10.0.0.1 draining"}, "10.0.0.0 10.0.0.1", unused, true},
		{"A2.4 draining only as the last resort", "", "", []string{"10.0.0.0 draining", "10.0.0.1"}, "10.0.0.1", unused, true},
		{"A2.4 hints do not narrow draining ones", "", "a", []string{"10.0.0.0 draining zonehint=a", "10.0.0.1 draining zonehint=b"}, "10.0.0.0 10.0.0.1", unused, true},
		{"A2.6 both Local, draining elsewhere", "iL eL nodePort", "", []string{"10.0.0.0 draining", "10.0.0.1 draining"}, "10.0.0.0 10.0.0.1", "", true},
		{"A2.5 local draining while others are ready", "eL nodePort", "", []string{
			"10.0.0.0", "10.0.0.1 unready local", "10.0.0.2 draining local", "10.0.0.3 draining"}, "10.0.0.0", "10.0.0.2", true},
		{"A2.5 local ready before local draining", "iL", "", []string{"10.0.0.0 local", "10.0.0.1 draining local"}, unused, "10.0.0.0", true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			port, ok := ports[tt.port]
			if !ok {
				t.Fatalf("no port %q", tt.port)
			}
			v := service.FamilyView{Exists: true}
			for _, text := range tt.endpoints {
				v.Endpoints = append(v.Endpoints, parseEndpoint(t, text))
			}
			n := &node{name: ownNode, zone: tt.zone}
			got := categorize(&port, &v, n)
			check := func(what, want string, list []service.Endpoint) {
				t.Helper()
				if want == unused {
					want = ""
				}
				check.Equalf(t, names(list), want, "%s", what)
			}
			check("cluster", tt.cluster, got.cluster)
			check("local", tt.local, got.local)
			if got.usable != tt.any {
				t.Errorf("any: got %t", got.usable)
			}
		})
	}
}

func TestExternallyAccessible(t *testing.T) {
	tests := []struct {
		name string
		port service.Port
		view service.FamilyView
		want bool
	}{
		{"A2.1 cluster IP only", service.Port{}, service.FamilyView{}, false},
		{"A2.1 node port", service.Port{NodePort: 30000}, service.FamilyView{}, true},
		{"A2.1 load balancer IP", service.Port{}, service.FamilyView{LoadBalancerIPs: addresses("192.0.2.1")}, true},
		{"A2.1 external IP", service.Port{}, service.FamilyView{ExternalIPs: addresses("192.0.2.1")}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			check.Equal(t, externallyAccessible(&tt.port, &tt.view), tt.want)
		})
	}
}

// TestTopologyKeys is the table of the proposal that topology keys come from:
// no keys, one, "*" alone, several, several and "*", each over endpoints that
// are near, further away and far. The nodes are n0 (this one), n1 in its rack,
// n2 in its zone, n3 in another zone, and n4, which has no labels.
func TestTopologyKeys(t *testing.T) {
	const host, rack, zone = "kubernetes.io/hostname", "rack", "topology.kubernetes.io/zone"
	labels := func(h, r, z string) map[string]string { return map[string]string{host: h, rack: r, zone: z} }
	nodes := []*corev1.Node{
		nodeObject(ownNode, labels(ownNode, "r0", "z0"), "172.16.0.1"), nodeObject("n1", labels("n1", "r0", "z0")),
		nodeObject("n2", labels("n2", "r1", "z0")), nodeObject("n3", labels("n3", "r2", "z1")), nodeObject("n4", nil),
	}
	const (
		here, inRack, inZone, far = "10.1.0.1 node=n0 local", "10.1.0.2 node=n1", "10.1.0.3 node=n2", "10.1.0.4 node=n3"
		bare, unknown, nowhere    = "10.1.0.5 node=n4", "10.1.0.6 node=n9", "10.1.0.7"
	)
	everywhere := []string{here, inRack, inZone, far, bare, unknown, nowhere}
	const all = "10.1.0.1 10.1.0.2 10.1.0.3 10.1.0.4 10.1.0.5 10.1.0.6 10.1.0.7"
	tests := []struct {
		name      string
		keys      string
		endpoints []string
		want      string
	}{
		{"no keys", "", everywhere, all},
		{"no keys, far", "", []string{far}, "10.1.0.4"},

		{"one key, here", host, everywhere, "10.1.0.1"},
		{"one key, not here", host, []string{inRack, inZone, far, bare, unknown, nowhere}, ""},
		{"one key, zone", zone, everywhere, "10.1.0.1 10.1.0.2 10.1.0.3"},
		{"one key, not in the zone", zone, []string{far, bare}, ""},
		{"one key that this node does not have", "region", everywhere, ""},

		{"any", "*", everywhere, all},
		{"any, far", "*", []string{far, nowhere}, "10.1.0.4 10.1.0.7"},

		{"several keys, here", host + "," + rack + "," + zone, everywhere, "10.1.0.1"},
		{"several keys, in the rack", host + "," + rack + "," + zone, []string{inRack, inZone, far}, "10.1.0.2"},
		{"several keys, in the zone", host + "," + rack + "," + zone, []string{inZone, far}, "10.1.0.3"},
		{"several keys, far", host + "," + rack + "," + zone, []string{far, bare, unknown, nowhere}, ""},
		{"several keys, one that nobody has", "region," + zone, everywhere, "10.1.0.1 10.1.0.2 10.1.0.3"},

		{"several and any, here", host + "," + zone + ",*", everywhere, "10.1.0.1"},
		{"several and any, in the zone", host + "," + zone + ",*", []string{inRack, inZone, far}, "10.1.0.2 10.1.0.3"},
		{"several and any, far", host + "," + zone + ",*", []string{far, unknown}, "10.1.0.4 10.1.0.6"},
		{"keys after any are not used", "*," + host, everywhere, all},

		{"only ready ones", host + "," + zone, []string{here + " unready", inZone}, "10.1.0.3"},
		{"A2.4 draining ones as the last resort", zone, []string{inRack + " draining", far + " draining"}, "10.1.0.2"},
		{"A2.4 draining ones do not stand in for ready ones far away", zone, []string{inRack + " draining", far}, ""},
		{"keys take the place of hints", "*", []string{inRack + " nodehint=n1", here + " nodehint=n0"}, "10.1.0.1 10.1.0.2"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			web := svc{name: "web", clusterIPs: "10.96.0.1", nodePort: 30000, annotations: map[string]string{"sluice.dev/topology-keys": tt.keys}, endpoints: tt.endpoints}
			c := change(t, web)
			c.Nodes = nodes
			table := Compile(nil, newStore().Apply(c), Config{NodeName: ownNode})
			for _, dst := range []string{"10.96.0.1:80", "172.16.0.1:30000"} {
				ap := netip.MustParseAddrPort(dst)
				v := table.Resolve(service.TCP, clients["outside"], ap)
				check.Equalf(t, names(v.Candidates), tt.want, "%s", dst)
				want := Accept
				if tt.want == "" {
					want = Refuse // as if the service had no endpoints
				}
				if steering := table.Steering(service.Destination{Addr: ap.Addr(), Port: ap.Port(), Protocol: service.TCP}); v.Action != want || steering != want {
					t.Errorf("%s: %s, steering %s", dst, v.Action, steering)
				}
			}
		})
	}
}

// TestTopologyKeysAndPolicies: internal Local has its own list, external Local
// excludes keys.
func TestTopologyKeysAndPolicies(t *testing.T) {
	web := svc{name: "web", clusterIPs: "10.96.0.1", nodePort: 30000, annotations: map[string]string{"sluice.dev/topology-keys": "rack"},
		endpoints: []string{"10.1.0.1 local", "10.1.0.2"}}
	ask := func(dst string) string {
		return say(compile(t, Config{}, web).Resolve(service.TCP, clients["outside"], netip.MustParseAddrPort(dst)))
	}
	web.internal = "Local"
	check.Equalf(t, ask("10.96.0.1:80"), "accept A3.2 client A3.9: 10.1.0.1", "internal Local, cluster IP")
	check.Equalf(t, ask("172.16.0.1:30000"), "refuse A3.4", "internal Local, node port")
	web.internal, web.external = "", "Local"
	check.Equalf(t, ask("172.16.0.1:30000"), "accept A3.3 client A3.9: 10.1.0.1", "external Local, node port")
	check.Equalf(t, ask("10.96.0.1:80"), "accept A3.2 client A3.9: 10.1.0.1 10.1.0.2", "external Local, cluster IP")
}

// TestTopologyKeysFollowLabels: another node's labels change, and this one's.
func TestTopologyKeysFollowLabels(t *testing.T) {
	st := newStore()
	c := change(t, svc{name: "keyed", clusterIPs: "10.96.0.1", annotations: map[string]string{"sluice.dev/topology-keys": "rack"},
		endpoints: []string{"10.1.0.1 node=n1", "10.1.0.2 node=n2"}}, svc{name: "plain", clusterIPs: "10.96.0.2", endpoints: []string{"10.1.0.3", "10.1.0.4 unready"}})
	var table *Table
	var plain *service.Endpoint
	step := func(what, want string, nodes ...*corev1.Node) {
		t.Helper()
		c.Nodes = nodes
		table = Compile(table, st.Apply(c), Config{NodeName: ownNode})
		c = service.Change{}
		got := table.Resolve(service.TCP, clients["pod"], netip.MustParseAddrPort("10.96.0.1:80"))
		check.Equalf(t, names(got.Candidates), want, "%s", what)
		other := &table.Resolve(service.TCP, clients["pod"], netip.MustParseAddrPort("10.96.0.2:80")).Candidates[0]
		if plain != nil && other != plain {
			t.Errorf("%s: a service without keys was compiled again", what)
		}
		plain = other
	}
	rack := func(name, r string) *corev1.Node { return nodeObject(name, map[string]string{"rack": r}) }
	step("two racks", "10.1.0.1", rack(ownNode, "a"), rack("n1", "a"), rack("n2", "b"))
	step("another node moves", "10.1.0.1 10.1.0.2", rack("n2", "a"))
	step("another node goes out of it", "10.1.0.2", rack("n1", "b"))
	step("this node moves", "10.1.0.1", rack(ownNode, "b"))
}
