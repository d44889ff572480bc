package service

import (
	"fmt"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/test/check"
)

// cluster builds a whole cluster: each service has two ports and one slice.
func cluster(services, endpointsEach int) Change {
	var c Change
	for i := range services {
		svc := newService(fmt.Sprintf("s%05d", i), fmt.Sprintf("10.%d.%d.%d", 96+i>>16, i>>8&255, i&255),
			withPorts(servicePort("http", "TCP", 80, 0), servicePort("metrics", "TCP", 9090, 0)), withCreated(int64(i+1)))
		c.Services = append(c.Services, svc)
		c.EndpointSlices = append(c.EndpointSlices, clusterSlice(i, endpointsEach))
	}
	return c
}

func clusterSlice(i, endpoints int) *discoveryv1.EndpointSlice {
	service := fmt.Sprintf("s%05d", i)
	es := newSlice(service+"-x", service, 0, slicePorts(endpointPort("http", "TCP", 8080), endpointPort("metrics", "TCP", 9090)))
	for j := range endpoints {
		k := i*endpoints + j
		es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.%d.%d.%d", 128+k>>16, k>>8&255, k&255)},
			NodeName:  ptr(fmt.Sprintf("node-%d", k%1000)),
			Zone:      ptr(fmt.Sprintf("zone-%d", k%3)),
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: fmt.Sprintf("%s-%d", service, j)},
		})
	}
	return es
}

// BenchmarkApplyOneSlice changes one slice of a loaded cluster by one endpoint. The
// target is at most 5 ms.
func BenchmarkApplyOneSlice(b *testing.B) {
	for _, size := range []struct{ services, endpoints int }{{100, 10}, {1000, 10}, {10000, 10}, {30000, 10}, {100, 1000}} {
		b.Run(fmt.Sprintf("services=%d/endpoints=%d", size.services, size.services*size.endpoints), func(b *testing.B) {
			s := NewStore(StoreOptions{NodeName: "node-1"})
			s.Apply(cluster(size.services, size.endpoints))
			changes := []Change{
				endpointSlices(clusterSlice(size.services/2, size.endpoints+1)),
				endpointSlices(clusterSlice(size.services/2, size.endpoints)),
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				before := s.Snapshot()
				if s.Apply(changes[i%2]) == before {
					b.Fatal("nothing changed")
				}
				i++
			}
		})
	}
}

// BenchmarkApplyOneService adds and removes a service with new addresses.
func BenchmarkApplyOneService(b *testing.B) {
	for _, n := range []int{100, 10000, 30000} {
		b.Run(fmt.Sprintf("services=%d/endpoints=%d", n, n*10), func(b *testing.B) {
			s := NewStore(StoreOptions{NodeName: "node-1"})
			s.Apply(cluster(n, 10))
			changes := []Change{services(newService("new", "10.200.0.1", withExternalIPs("192.0.2.1"))), deleted(KindService, "new")}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				s.Apply(changes[i%2])
				i++
			}
		})
	}
}

func BenchmarkApplyAll(b *testing.B) {
	for _, n := range []int{100, 10000} {
		b.Run(fmt.Sprintf("services=%d/endpoints=%d", n, n*10), func(b *testing.B) {
			c := cluster(n, 10)
			b.ReportAllocs()
			for b.Loop() {
				NewStore(StoreOptions{NodeName: "node-1"}).Apply(c)
			}
		})
	}
}

func TestFindingAllocatesNothing(t *testing.T) {
	snap := NewStore(StoreOptions{}).Apply(cluster(1000, 1))
	known := netip.MustParseAddr("10.96.1.1")
	allocs := testing.AllocsPerRun(100, func() {
		snap.FindNodePort(TCP, 30000)
		snap.HasClusterIP(known)
	})
	check.Equalf(t, allocs, 0, "allocations")
}
