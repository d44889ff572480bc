package policy

import (
	"testing"

	"github.com/sluice-proxy/sluice/service"
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
				if names(list) != want {
					t.Errorf("%s: got %q, want %q", what, names(list), want)
				}
			}
			check("cluster", tt.cluster, got.cluster)
			check("local", tt.local, got.local)
			if got.any != tt.any {
				t.Errorf("any: got %t", got.any)
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
			if got := externallyAccessible(&tt.port, &tt.view); got != tt.want {
				t.Errorf("got %t", got)
			}
		})
	}
}
