package serve

import (
	"fmt"
	"net/netip"
	"net/url"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Connections name the client's pod if it serves something and has its address alone, or is one of
// this node's, and the filter selects by it.
func TestClientPods(t *testing.T) {
	s := newSite(t, slice("web-1", 80,
		discoveryv1.Endpoint{Addresses: []string{"10.1.0.4"}, TargetRef: pod("web-a")},
		discoveryv1.Endpoint{Addresses: []string{"10.1.0.5"}},
		discoveryv1.Endpoint{Addresses: []string{"10.1.0.6"}, TargetRef: pod("web-b")},
		discoveryv1.Endpoint{Addresses: []string{"192.0.2.1"}, TargetRef: pod("host-a")},
	), slice("web-2", 81, discoveryv1.Endpoint{Addresses: []string{"192.0.2.1"}, TargetRef: pod("host-b")},
		discoveryv1.Endpoint{Addresses: []string{"10.1.0.6"}, TargetRef: pod("web-b")}))
	s.podAt = map[string]string{"10.1.0.7": "asks", "10.1.0.6": "web-c"} // the second has its address since a moment
	clients := []string{"10.1.0.4:1000", "10.1.0.5:1000", "10.1.0.6:1000", "192.0.2.1:1000", "10.1.0.7:1000"}
	for _, c := range clients {
		s.open(c)
	}
	for filter, want := range map[string][]string{
		"": {
			"shop/web-a", "", "shop/web-c", "shop/asks", "",
		},
		"client_pod=web-a":     {"shop/web-a"},
		"client_pod=shop/web*": {"shop/web-a", "shop/web-c"},
		"client_pod=asks":      {"shop/asks"},
		"client_pod=shop/host": nil,
	} {
		var page api.Connections
		s.ask(t, "/v1/connections?sort=client&filter="+filter, 200, &page)
		var got []string
		for _, c := range page.Connections {
			got = append(got, c.ClientPod)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("filter %q: %q, want %q", filter, got, want)
		}
	}
}

// Both kinds of pods are suggested for the filter, each once.
func TestClientPodsAreSuggested(t *testing.T) {
	s := newSite(t, slice("web-1", 80,
		discoveryv1.Endpoint{Addresses: []string{"10.1.0.4"}, TargetRef: pod("web-a")},
		discoveryv1.Endpoint{Addresses: []string{"10.1.0.5"}, TargetRef: pod("web-b")}))
	s.podAt = map[string]string{"10.1.0.7": "asks", "10.1.0.5": "web-b"}
	for filter, want := range map[string]string{
		"client_pod=": "[{shop/asks } {shop/web-a } {shop/web-b }]",
		"pod=":        "[{shop/web-a } {shop/web-b }]",
	} {
		var found api.Completions
		s.ask(t, "/v1/complete?filter="+url.QueryEscape(filter), 200, &found)
		check.Equalf(t, fmt.Sprint(found.Suggestions), want, "%s", filter)
	}
}

// snapshotOf has a port with so many endpoints, each a pod's.
func snapshotOf(endpoints int, pod string) *service.Snapshot {
	port := new(service.Port)
	for i := range endpoints {
		addr := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		port.Families[service.IPv4].Endpoints = append(port.Families[service.IPv4].Endpoints,
			service.Endpoint{Addr: netip.AddrPortFrom(addr, 80), Pod: service.Name{Namespace: "shop", Name: fmt.Sprintf("%s-%d", pod, i)}})
	}
	return &service.Snapshot{Ports: []*service.Port{nil, port}}
}

// A pod that gets another one's address is found without a new question, as a tap lasts; an
// index that nobody uses goes.
func TestPodsFollowTheConfiguration(t *testing.T) {
	a := netip.MustParseAddr("10.0.0.1")
	snap := snapshotOf(2, "old")
	p := &pods{snapshot: func() *service.Snapshot { return snap }}
	p.prepare()
	if pod := p.At(a); pod.String() != "shop/old-1" {
		t.Fatalf("%v", pod)
	}
	snap = snapshotOf(2, "new")
	wait.For(t, "the new pod's name", 10*time.Second, func() error {
		if pod := p.At(a); pod.String() != "shop/new-1" {
			return fmt.Errorf("%v", pod)
		}
		return nil
	})
	p.forget() // it was used
	if p.current.Load() == nil {
		t.Error("the index went while somebody used it")
	}
	if p.forget(); p.current.Load() != nil {
		t.Error("the index stays though nobody uses it")
	}
}

func BenchmarkPodIndex(b *testing.B) {
	for _, n := range []int{1_000, 1_000_000} {
		snap := snapshotOf(n, "pod")
		b.Run(fmt.Sprintf("make/endpoints=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				newPodIndex(snap)
			}
		})
		p := &pods{snapshot: func() *service.Snapshot { return snap }}
		p.prepare()
		a := netip.MustParseAddr("10.0.2.1")
		b.Run(fmt.Sprintf("find/endpoints=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p.At(a)
			}
		})
	}
}
