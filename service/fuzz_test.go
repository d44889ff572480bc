package service

import (
	"encoding/json"
	"net"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	netutils "k8s.io/utils/net"

	"github.com/sluice-proxy/sluice/test/must"
)

// FuzzAddress: parseAddr accepts exactly the addresses that Kubernetes accepts,
// with the same result.
func FuzzAddress(f *testing.F) {
	for _, s := range []string{"10.0.0.1", "010.000.000.001", "::1", "fe80::1%eth0", "::ffff:1.2.3.4", "256.0.0.1", "", "1.2.3", "0:0:0::1:2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, ok := parseAddr(s)
		want := netutils.ParseIPSloppy(s)
		if ok != (want != nil) {
			t.Fatalf("parseAddr(%q) = %v, %t; Kubernetes says %v", s, got, ok, want)
		}
		if ok && !net.IP(got.AsSlice()).Equal(want) {
			t.Fatalf("parseAddr(%q) = %v; Kubernetes says %v", s, got, want)
		}
		if ok && (got.Is4In6() || got.Zone() != "") {
			t.Fatalf("parseAddr(%q) = %v", s, got)
		}
	})
}

// FuzzPrefix: as FuzzAddress, for CIDRs.
func FuzzPrefix(f *testing.F) {
	for _, s := range []string{"10.0.0.0/8", "010.0.0.0/08", "fd00::/64", "::ffff:10.0.0.0/104", "10.0.0.0/33", "10.0.0.0/", "0.0.0.0/0", "::/0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, ok := parsePrefix(s)
		_, want, err := netutils.ParseCIDRSloppy(s)
		if strings.Contains(strings.ToLower(s), "ffff") {
			return // IPv4 in IPv6, of which Kubernetes keeps the bits of IPv6
		}
		if ok != (err == nil) {
			t.Fatalf("parsePrefix(%q) = %v, %t; Kubernetes says %v", s, got, ok, want)
		}
		if ok && got.String() != want.String() {
			t.Fatalf("parsePrefix(%q) = %v; Kubernetes says %v", s, got, want)
		}
	})
}

// FuzzApply: no object makes the Store panic, and deletion leaves nothing behind.
func FuzzApply(f *testing.F) {
	for _, c := range []Change{cluster(1, 2), services(newService("web", "10.96.0.1", withExternalIPs("192.0.2.1"), withIngress("192.0.2.2")))} {
		svc, err := json.Marshal(c.Services[0])
		must.OK(f, err)
		es := []byte("{}")
		if len(c.EndpointSlices) > 0 {
			if es, err = json.Marshal(c.EndpointSlices[0]); err != nil {
				f.Fatal(err)
			}
		}
		f.Add(svc, es)
	}
	f.Fuzz(func(t *testing.T, svcText, sliceText []byte) {
		var svc corev1.Service
		var es discoveryv1.EndpointSlice
		if json.Unmarshal(svcText, &svc) != nil || json.Unmarshal(sliceText, &es) != nil {
			return
		}
		s := NewStore(StoreOptions{NodeName: "node-1"})
		s.Apply(services(newService("other", "10.96.0.1", withPorts(servicePort("http", "TCP", 80, 30000)))))
		before := dump(s.Snapshot())
		c := Change{Services: []*corev1.Service{&svc}, EndpointSlices: []*discoveryv1.EndpointSlice{&es}}
		snap := s.Apply(c)
		destinations(t, snap)
		if s.Apply(c) != snap {
			t.Error("the same objects gave another snapshot")
		}
		if svc.Name == "other" && svc.Namespace == "default" {
			return
		}
		after := s.Apply(Change{Deleted: []ObjectKey{
			{KindService, Name{svc.Namespace, svc.Name}}, {KindEndpointSlice, Name{es.Namespace, es.Name}},
		}})
		if got := dump(after); got != before {
			t.Errorf("left over:\n%s\nwas\n%s", got, before)
		}
	})
}
