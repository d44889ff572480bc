package stream

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
)

// greedy gives a namespace's Service with many ports at external IPs, and node
// ports from first on, if that is not 0.
func greedy(namespace string, clusterIP string, ports int, protocol corev1.Protocol, first int, externalIPs ...string) service.Change {
	c := web("greedy", clusterIP, netip.MustParseAddrPort("10.2.1.2:8080"))
	s := c.Services[0]
	s.Namespace, s.Spec.Ports, s.Spec.ExternalIPs = namespace, nil, externalIPs
	c.EndpointSlices[0].Namespace = namespace
	for i := range ports {
		p := corev1.ServicePort{Name: fmt.Sprint(i), Port: int32(20000 + i), Protocol: protocol}
		if first != 0 {
			s.Spec.Type = corev1.ServiceTypeNodePort
			p.NodePort = int32(first + i)
		}
		s.Spec.Ports = append(s.Spec.Ports, p)
	}
	return c
}

// TestHealthCheckPortsShareClaims: health check node ports and node ports of a
// namespace have one bound, as both take descriptors from connections, and what is
// left for these is not one namespace's alone.
func TestHealthCheckPortsShareClaims(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	host := []netip.Addr{lab.Node.IPv4}
	n := newNode(t, lab, func(o *setup) {
		o.HostAddresses = func() []netip.Addr { return host }
		o.MaxBound, o.MaxConnections, o.Config.Descriptors = 200, 400, 800
		o.MaxServiceConnections, o.MaxNamespaceConnections = 388, 388
	})
	n.apply(service.Change{Host: &service.Host{Addresses: host}})
	m, s := n.manager, n.server
	n.apply(greedy("evil", "10.96.0.1", 60, corev1.ProtocolTCP, 30000))
	var taken atomic.Int64
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 100 {
				if m.TakeSockets("evil", 1) == nil {
					taken.Add(1)
				}
			}
		})
	}
	all.Wait()
	if held := m.Stats().Claims; taken.Load() != 40 || held != 100 {
		t.Errorf("evil has %d health check ports and %d sockets in all, want 40 and 100 of 200", taken.Load(), held)
	}
	if limit, most := s.limit.Load(), s.mostOf(388, 32); limit != 350 || most != 340 {
		t.Errorf("%d connections are possible, %d for one namespace; want 350, 340", limit, most)
	}
	check.OKf(t, m.TakeSockets("web", 2), "another namespace")
	m.ReturnSockets("web", 2)

	s.open.Add(340) // as if a namespace had them
	free := 0
	for m.TakeSockets("web", 1) == nil {
		free++
	}
	if limit := s.limit.Load(); free == 0 || limit <= 340 {
		t.Errorf("%d sockets beside 340 connections, of which %d are possible; want some, and more connections", free, limit)
	}
	s.open.Add(-340)
	m.ReturnSockets("web", free)
	m.ReturnSockets("evil", 40)
	n.apply(greedy("evil", "10.96.0.1", 0, corev1.ProtocolTCP, 30000))
	if held := m.Stats().Claims; held != 0 || s.limit.Load() != 400 {
		t.Errorf("%d are held; %d connections are possible", held, s.limit.Load())
	}
}
