package service

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestSliceIntake applies slices beside one Service "web" with the TCP port 80
// and both families. want are the endpoints of IPv4, then of IPv6.
func TestSliceIntake(t *testing.T) {
	edit := func(f func(*discoveryv1.EndpointSlice)) func(*discoveryv1.EndpointSlice) { return f }
	terminating := func(addr string, zone string) func(*discoveryv1.EndpointSlice) {
		return withEndpoint(addr, func(e *discoveryv1.Endpoint) {
			e.Conditions = discoveryv1.EndpointConditions{Ready: ptr(false), Serving: ptr(true), Terminating: ptr(true)}
			e.Zone = &zone
		})
	}
	inZone := func(addr, zone string) func(*discoveryv1.EndpointSlice) {
		return withEndpoint(addr, func(e *discoveryv1.Endpoint) { e.Zone = &zone })
	}
	notReady := func(addr, zone string) func(*discoveryv1.EndpointSlice) {
		return withEndpoint(addr, func(e *discoveryv1.Endpoint) {
			e.Conditions = discoveryv1.EndpointConditions{Ready: ptr(false), Serving: ptr(false)}
			e.Zone = &zone
		})
	}
	tests := []struct {
		name     string
		slices   []*discoveryv1.EndpointSlice
		want     []string // "address" or "address zone"
		problems []string
	}{
		{"A1.3 headless label", []*discoveryv1.EndpointSlice{newSlice("a", "web", 8080, withAddresses("10.0.0.1"),
			edit(func(es *discoveryv1.EndpointSlice) { es.Labels[corev1.IsHeadlessService] = "" }))}, nil, nil},
		{"A1.10 no service label", []*discoveryv1.EndpointSlice{newSlice("a", "web", 8080, withAddresses("10.0.0.1"),
			edit(func(es *discoveryv1.EndpointSlice) { es.Labels = nil }))}, nil, nil},
		{"A1.10 another service", []*discoveryv1.EndpointSlice{newSlice("a", "other", 8080, withAddresses("10.0.0.1"))}, nil, nil},
		{"A1.10 another namespace", []*discoveryv1.EndpointSlice{newSlice("a", "web", 8080, withAddresses("10.0.0.1"),
			edit(func(es *discoveryv1.EndpointSlice) { es.Namespace = "elsewhere" }))}, nil, nil},
		{"A1.10 FQDN", []*discoveryv1.EndpointSlice{newSlice("a", "web", 8080, withAddresses("example.com"), withType("FQDN"))}, nil, nil},
		{"A1.10 an IPv6 address in an IPv4 slice", []*discoveryv1.EndpointSlice{newSlice("a", "web", 8080, withAddresses("fd00::5", "10.0.0.1"))},
			[]string{"10.0.0.1:8080"}, []string{"EndpointSlice default/a: address fd00::5 is not of the slice's addressType IPv4"}},
		{"A1.19 both families", []*discoveryv1.EndpointSlice{
			newSlice("a", "web", 8080, withAddresses("10.0.0.1")),
			newSlice("b", "web", 8080, withAddresses("fd00::5"), withType("IPv6"))},
			[]string{"10.0.0.1:8080", "[fd00::5]:8080"}, nil},

		{"A1.11 nil port", []*discoveryv1.EndpointSlice{newSlice("a", "web", 0, withAddresses("10.0.0.1"), slicePorts(discoveryv1.EndpointPort{}))}, nil, nil},
		{"A1.11 port 0", []*discoveryv1.EndpointSlice{newSlice("a", "web", 0, withAddresses("10.0.0.1"))}, nil, nil},
		{"A1.11 no addresses", []*discoveryv1.EndpointSlice{newSlice("a", "web", 8080, withEndpoint("", func(e *discoveryv1.Endpoint) { e.Addresses = nil }))}, nil, nil},
		{"A1.11 only the first address", []*discoveryv1.EndpointSlice{newSlice("a", "web", 8080, withEndpoint("10.0.0.1", func(e *discoveryv1.Endpoint) {
			e.Addresses = append(e.Addresses, "10.0.0.2")
		}))}, []string{"10.0.0.1:8080"}, nil},
		{"A1.11 a nil name is the name \"\"", []*discoveryv1.EndpointSlice{newSlice("a", "web", 8080, withAddresses("10.0.0.1"))}, []string{"10.0.0.1:8080"}, nil},
		{"the name \"\"", []*discoveryv1.EndpointSlice{newSlice("a", "web", 0, withAddresses("10.0.0.1"), slicePorts(endpointPort("", "TCP", 8080)))},
			[]string{"10.0.0.1:8080"}, nil},
		{"A1.6 another port name", []*discoveryv1.EndpointSlice{newSlice("a", "web", 0, withAddresses("10.0.0.1"), slicePorts(endpointPort("x", "TCP", 8080)))}, nil, nil},
		{"A1.6 another protocol", []*discoveryv1.EndpointSlice{newSlice("a", "web", 0, withAddresses("10.0.0.1"), slicePorts(endpointPort("", "UDP", 8080)))}, nil, nil},
		{"a port out of range", []*discoveryv1.EndpointSlice{newSlice("a", "web", 70000, withAddresses("10.0.0.1"))}, nil, []string{"number 70000"}},
		{"an unknown protocol", []*discoveryv1.EndpointSlice{newSlice("a", "web", 0, withAddresses("10.0.0.1"), slicePorts(endpointPort("", "QUIC", 1)))}, nil, []string{"QUIC"}},
		{"A1.7 a bad address", []*discoveryv1.EndpointSlice{newSlice("a", "web", 8080, withAddresses("10.0.0.256", "010.000.000.001"))},
			[]string{"10.0.0.1:8080"}, []string{`address "10.0.0.256" is not an IP address`}},

		{"A1.13 one that stays wins, first", []*discoveryv1.EndpointSlice{
			newSlice("a", "web", 8080, inZone("10.0.0.1", "stays")), newSlice("b", "web", 8080, terminating("10.0.0.1", "ends"))},
			[]string{"10.0.0.1:8080 stays"}, nil},
		{"A1.13 one that stays wins, second", []*discoveryv1.EndpointSlice{
			newSlice("a", "web", 8080, terminating("10.0.0.1", "ends")), newSlice("b", "web", 8080, inZone("10.0.0.1", "stays"))},
			[]string{"10.0.0.1:8080 stays"}, nil},
		{"A1.13 of two that stay the last by slice name", []*discoveryv1.EndpointSlice{
			newSlice("b", "web", 8080, inZone("10.0.0.1", "b")), newSlice("a", "web", 8080, inZone("10.0.0.1", "a"))},
			[]string{"10.0.0.1:8080 b"}, nil},

		{"A1.13 ready wins over not ready, first", []*discoveryv1.EndpointSlice{
			newSlice("a", "web", 8080, inZone("10.0.0.1", "ready")), newSlice("b", "web", 8080, notReady("10.0.0.1", "not"))},
			[]string{"10.0.0.1:8080 ready"}, []string{"endpoint 10.0.0.1:8080/TCP is ready by one entry of its slices, and not ready by another: it is used"}},
		{"A1.13 ready wins over not ready, second", []*discoveryv1.EndpointSlice{
			newSlice("a", "web", 8080, notReady("10.0.0.1", "not")), newSlice("b", "web", 8080, inZone("10.0.0.1", "ready"))},
			[]string{"10.0.0.1:8080 ready"}, []string{"is ready by one entry"}},
		{"A1.13 in one slice", []*discoveryv1.EndpointSlice{
			newSlice("a", "web", 8080, inZone("10.0.0.1", "ready"), notReady("10.0.0.1", "not"))},
			[]string{"10.0.0.1:8080 ready"}, []string{"is ready by one entry"}},
		{"A1.13 an old pod's address at a new one that is not ready", []*discoveryv1.EndpointSlice{
			newSlice("a", "web", 8080, notReady("10.0.0.1", "new")), newSlice("b", "web", 8080, terminating("10.0.0.1", "ends"))},
			[]string{"10.0.0.1:8080 new"}, nil},

		{"A1.14 sorted as text, once each", []*discoveryv1.EndpointSlice{
			newSlice("a", "web", 8080, withAddresses("10.0.0.9", "10.0.0.1", "10.0.0.10")),
			newSlice("b", "web", 8080, withAddresses("10.0.0.1", "10.0.0.2"))},
			[]string{"10.0.0.10:8080", "10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.9:8080"}, nil},
		{"A1.15 a port of its own in each slice", []*discoveryv1.EndpointSlice{
			newSlice("a", "web", 8080, withAddresses("10.0.0.1")), newSlice("b", "web", 9090, withAddresses("10.0.0.2", "10.0.0.1"))},
			[]string{"10.0.0.1:8080", "10.0.0.1:9090", "10.0.0.2:9090"}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := services(newService("web", "10.96.0.1", withClusterIPs("10.96.0.1", "fd00::1")))
			c.EndpointSlices = tt.slices
			snap := NewStore(StoreOptions{}).Apply(c)
			var got []string
			for _, f := range only(t, snap).Families {
				for _, e := range f.Endpoints {
					got = append(got, strings.TrimSpace(e.Addr.String()+" "+e.Zone()))
				}
			}
			check.EqualSlices(t, got, tt.want)
			texts := problemTexts(snap)
			must.Equalf(t, len(texts), len(tt.problems), "problems: got %q, want %q", texts, tt.problems)
			for i, want := range tt.problems {
				check.Containsf(t, texts[i], want, "problem %d", i)
			}
		})
	}
}

func TestEndpointDetails(t *testing.T) {
	apply := func(node string, edit func(*discoveryv1.Endpoint)) Endpoint {
		t.Helper()
		c := services(newService("web", "10.96.0.1"))
		c.EndpointSlices = []*discoveryv1.EndpointSlice{newSlice("a", "web", 8080, withEndpoint("10.0.0.1", edit))}
		return only(t, NewStore(StoreOptions{NodeName: node}).Apply(c)).Families[IPv4].Endpoints[0]
	}
	conditions := []struct {
		name                        string
		in                          discoveryv1.EndpointConditions
		ready, serving, terminating bool
	}{
		{"A1.12 nothing said", discoveryv1.EndpointConditions{}, true, true, false},
		{"A1.12 all false", discoveryv1.EndpointConditions{Ready: ptr(false), Serving: ptr(false), Terminating: ptr(false)}, false, false, false},
		{"A1.12 all true", discoveryv1.EndpointConditions{Ready: ptr(true), Serving: ptr(true), Terminating: ptr(true)}, true, true, true},
		{"A1.12 ready alone", discoveryv1.EndpointConditions{Ready: ptr(false)}, false, true, false},
	}
	for _, tt := range conditions {
		t.Run(tt.name, func(t *testing.T) {
			e := apply("", func(e *discoveryv1.Endpoint) { e.Conditions = tt.in })
			if e.Ready != tt.ready || e.Serving != tt.serving || e.Terminating != tt.terminating {
				t.Errorf("got %+v", e)
			}
		})
	}
	locals := []struct {
		name     string
		own      string
		nodeName *string
		want     bool
	}{
		{"A1.12 own node", "a", ptr("a"), true},
		{"A1.12 another node", "a", ptr("b"), false},
		{"A1.12 no node", "a", nil, false},
		{"A1.12 own name unknown", "", ptr(""), false},
	}
	for _, tt := range locals {
		t.Run(tt.name, func(t *testing.T) {
			e := apply(tt.own, func(e *discoveryv1.Endpoint) { e.NodeName = tt.nodeName })
			check.Equalf(t, e.Local, tt.want, "local")
		})
	}
	t.Run("pod and hints", func(t *testing.T) {
		e := apply("", func(e *discoveryv1.Endpoint) {
			e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Name: "web-0", UID: "u"}
			e.Hints = &discoveryv1.EndpointHints{
				ForZones: []discoveryv1.ForZone{{Name: "z1"}, {Name: "z2"}}, ForNodes: []discoveryv1.ForNode{{Name: "n"}},
			}
		})
		if e.Pod != (Name{"default", "web-0"}) || e.PodUID != UIDOf("u") {
			t.Errorf("pod: %v %q", e.Pod, e.PodUID)
		}
		if !slices.Equal(e.ZoneHints(), []string{"z1", "z2"}) || !slices.Equal(e.NodeHints(), []string{"n"}) {
			t.Errorf("hints: %v %v", e.ZoneHints(), e.NodeHints())
		}
	})
}

// A big cluster's endpoints are not in memory twice, once by slice and once by
// service port.
func TestEndpointsOfALoneSliceAreShared(t *testing.T) {
	s := NewStore(StoreOptions{})
	c := services(newService("web", "10.96.0.1"))
	c.EndpointSlices = append(c.EndpointSlices, newSlice("a", "web", 8080, withAddresses("10.0.0.2", "10.0.0.10")))
	merged := only(t, s.Apply(c)).Families[IPv4].Endpoints
	name := Name{Namespace: "default", Name: "a"}
	held := s.services[s.owners[name]].slices[name.Name].endpoints
	if len(held) != 2 || &held[0] != &merged[0] {
		t.Errorf("the slice holds %v, the port %v", held, merged)
	}
	// One more slice: the port has a list of its own, and the first slice's stays.
	both := only(t, s.Apply(Change{EndpointSlices: []*discoveryv1.EndpointSlice{newSlice("b", "web", 8081, withAddresses("10.0.0.2"))}}))
	if got := len(both.Families[IPv4].Endpoints); got != 3 || len(held) != 2 || len(merged) != 2 {
		t.Errorf("%d endpoints of two slices", got)
	}
}
