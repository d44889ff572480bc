package service

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestEndpointsThatLeadAstray: the Store leaves out and names endpoints that no
// Service may have, and marks those that may be another Service's address.
func TestEndpointsThatLeadAstray(t *testing.T) {
	host := &Host{
		Addresses:  []netip.Addr{netip.MustParseAddr("172.16.0.1"), netip.MustParseAddr("fd01::1")},
		Broadcasts: []netip.Addr{netip.MustParseAddr("172.16.0.255")},
	}
	other := newService("other", "10.96.0.9", withExternalIPs("192.0.2.1", "2001:db8::1"), withIngress("192.0.2.2"),
		withPorts(servicePort("a", "TCP", 8080, 30000), servicePort("b", "UDP", 53, 30053)))
	other.Spec.ClusterIPs = []string{"10.96.0.9", "fd00::9"}
	for _, tt := range []struct {
		address string
		port    int32
		node    string // of the endpoint
		want    string // ok, returns, or what the problem says
	}{
		{"10.1.0.1", 8080, "", "ok"},
		{"127.0.0.1", 8080, "n0", "it is a loopback address"},
		{"127.83.76.1", 8080, "n0", "it is a loopback address"},
		{"169.254.169.254", 80, "", "it is a link-local address"},
		{"0.0.0.0", 8080, "", "no host has"},
		{"255.255.255.255", 67, "", "it is the broadcast address"},
		{"224.0.0.1", 8080, "", "it is a multicast address"},
		{"172.16.0.255", 8080, "", "is the broadcast address of a link"},
		{"172.16.0.1", 10250, "", "is an address of this node"},
		{"172.16.0.1", 10250, "n1", "is an address of this node"},
		{"172.16.0.1", 8080, "n0", "ok"},
		{"::1", 8080, "n0", "no other host has"},
		{"fe80::1", 8080, "", "it is a link-local address"},
		{"fd01::1", 10250, "", "is an address of this node"},
		{"10.96.0.1", 8080, "", "is a cluster IP"}, // its own
		{"10.96.0.9", 9999, "", "is a cluster IP"},
		{"192.0.2.1", 8080, "", "returns"},
		{"192.0.2.2", 8080, "n1", "returns"},
		{"2001:db8::1", 8080, "", "returns"},
		{"192.0.2.1", 53, "", "ok"}, // that is UDP's
		{"10.1.0.1", 30000, "", "returns"},
		{"10.1.0.1", 30053, "", "ok"},
	} {
		es := newSlice("e", "web", tt.port, withAddresses(tt.address))
		if strings.Contains(tt.address, ":") {
			es.AddressType = discoveryv1.AddressTypeIPv6
		}
		if tt.node != "" {
			es.Endpoints[0].NodeName = &tt.node
		}
		web := newService("web", "10.96.0.1")
		web.Spec.ClusterIPs = []string{"10.96.0.1", "fd00::1"}
		slicesOnly := Change{EndpointSlices: []*discoveryv1.EndpointSlice{es}}
		for name, steps := range map[string][]Change{
			"in order":   {{Host: host}, services(web, other), slicesOnly},
			"backwards":  {slicesOnly, services(other), services(web), {Host: host}},
			"and undone": {{Host: host}, services(web, other), slicesOnly, deleted(KindService, "other"), {Host: &Host{}}, {Host: host}, services(other)},
		} {
			s := NewStore(StoreOptions{NodeName: "n0"})
			for _, c := range steps {
				s.Apply(c)
			}
			snap := s.Snapshot()
			got := ""
			for _, p := range snap.Ports {
				if p == nil || p.Name.Name.Name != "web" {
					continue
				}
				for _, v := range p.Families {
					for _, e := range v.Endpoints {
						got = "ok"
						if e.MayReturn {
							got = "returns"
						}
					}
				}
			}
			if problems := strings.Join(problemTexts(snap), "; "); got == "" {
				got = problems
			} else if problems != "" {
				t.Errorf("%s:%d, %s: problems %s", tt.address, tt.port, name, problems)
			}
			check.Containsf(t, got, tt.want, "%s:%d on %q, %s", tt.address, tt.port, tt.node, name)
		}
	}
}

// TestAPIServersEndpoint: the API server's endpoint has its node's address and no
// nodeName.
func TestAPIServersEndpoint(t *testing.T) {
	s := NewStore(StoreOptions{NodeName: "n0"})
	snap := s.Apply(Change{
		Services:       services(newService("kubernetes", "10.96.0.1")).Services,
		EndpointSlices: []*discoveryv1.EndpointSlice{newSlice("kubernetes", "kubernetes", 6443, withAddresses("172.16.0.1"))},
		Host:           &Host{Addresses: []netip.Addr{netip.MustParseAddr("172.16.0.1")}},
	})
	if len(snap.Ports[0].Families[IPv4].Endpoints) != 1 || len(snap.Problems) > 0 {
		t.Errorf("endpoints %v, problems %v", snap.Ports[0].Families[IPv4].Endpoints, snap.Problems)
	}
}

// TestExternalIPThatIsTheEndpointsOwn: if the endpoint itself has the external IP,
// on this node or another, its own socket serves the port.
func TestExternalIPThatIsTheEndpointsOwn(t *testing.T) {
	web := newService("web", "10.96.0.1", withExternalIPs("172.16.0.1", "172.16.0.2"), withIngress("172.16.0.1"))
	es := newSlice("e", "web", 80, withAddresses("172.16.0.1"))
	host := &Host{Addresses: []netip.Addr{netip.MustParseAddr("172.16.0.1"), netip.MustParseAddr("172.16.0.2")}}
	slicesOnly := Change{EndpointSlices: []*discoveryv1.EndpointSlice{es}}
	for name, steps := range map[string][]Change{
		"in order":          {{Host: host}, services(web), slicesOnly},
		"backwards":         {slicesOnly, services(web), {Host: host}},
		"on another node":   {services(web), slicesOnly},
		"the service again": {services(web), slicesOnly, deleted(KindService, "web"), services(web)},
	} {
		s := NewStore(StoreOptions{NodeName: "n0"})
		for _, c := range steps {
			s.Apply(c)
		}
		here, next := found(s.Snapshot(), "172.16.0.1:80", TCP), found(s.Snapshot(), "172.16.0.2:80", TCP)
		if here != "" || next != "ExternalIP default/web" {
			t.Errorf("%s: got %q and %q", name, here, next)
		}
		s.Apply(deleted(KindEndpointSlice, "e"))
		check.Equalf(t, found(s.Snapshot(), "172.16.0.1:80", TCP), "LoadBalancer default/web", "%s, without the endpoint", name)
	}
}

// TestBroadcastAddressesAreNotServed: as external and as load balancer IPs.
func TestBroadcastAddressesAreNotServed(t *testing.T) {
	s := NewStore(StoreOptions{})
	snap := s.Apply(Change{
		Services: services(newService("web", "10.96.0.1", withExternalIPs("172.16.0.255", "255.255.255.255", "0.1.2.3"), withIngress("172.16.0.255", "224.0.0.9"))).Services,
		Host:     &Host{Broadcasts: []netip.Addr{netip.MustParseAddr("172.16.0.255")}},
	})
	if v := snap.Ports[0].Families[IPv4]; len(v.ExternalIPs)+len(v.LoadBalancerIPs) > 0 || len(snap.Problems) != 5 {
		t.Errorf("%+v, problems %q", v, problemTexts(snap))
	}
	if !slices.ContainsFunc(problemTexts(snap), func(s string) bool { return strings.Contains(s, "172.16.0.255 is the broadcast address of a link") }) {
		t.Errorf("%q", problemTexts(snap))
	}
}

// TestExternalIPsThatAreNotAllowed: the Store leaves them out and names them. The
// restriction does not apply to load balancer IPs.
func TestExternalIPsThatAreNotAllowed(t *testing.T) {
	web := newService("web", "10.96.0.1", withExternalIPs("192.0.2.1", "198.51.100.1"), withIngress("198.51.100.2"))
	for _, tt := range []struct {
		allowed ExternalIPs
		want    int
	}{
		{ExternalIPs{}, 2},
		{ExternalIPs{None: true}, 0},
		{ExternalIPs{Ranges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}, 1},
	} {
		snap := NewStore(StoreOptions{ExternalIPs: tt.allowed}).Apply(services(web))
		v := snap.Ports[0].Families[IPv4]
		if len(v.ExternalIPs) != tt.want || len(v.LoadBalancerIPs) != 1 || len(snap.Problems) != 2-tt.want {
			t.Errorf("%+v: %+v, problems %q", tt.allowed, v, problemTexts(snap))
		}
	}
}
