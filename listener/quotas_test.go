package listener

import (
	"fmt"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// greedy returns a namespace's Service with many ports at external IPs, and node
// ports from first on, if that is not 0.
func greedy(namespace, clusterIP string, ports int, protocol corev1.Protocol, first int, externalIPs ...string) service.Change {
	c := web("greedy", clusterIP, "10.2.1.2")
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

// TestNoNamespaceTakesAllBoundPorts: whatever one namespace asks for, by external IPs
// or node ports, over TCP or UDP, another one's node port is served; and what a
// namespace gives back it can have again.
func TestNoNamespaceTakesAllBoundPorts(t *testing.T) {
	own := netip.MustParseAddr("10.1.0.1")
	for name, first := range map[string]int{"external IPs": 0, "node ports": 30000} {
		for _, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
			t.Run(fmt.Sprintf("%s %s", name, protocol), func(t *testing.T) {
				p := newPlane(t, func(p *plane, o *Options) {
					p.host = []netip.Addr{own}
					o.HostAddresses = func() []netip.Addr { return p.host }
				})
				p.apply(service.Change{Host: &service.Host{Addresses: p.host}})
				var external []string
				if first == 0 {
					external = []string{own.String()}
				}
				bound := &p.manager.bound
				for round := range 2 {
					p.apply(greedy("evil", "10.96.0.1", 150, protocol, first, external...))
					p.apply(greedy("worse", "10.96.0.2", 150, protocol, first+1000*min(first, 1), external...))
					if held := bound.quotas.namespaces["evil"]; held > 50 || first == 0 && held > 25 || held < 20 {
						t.Errorf("evil holds %d of 100", held)
					}
					p.apply(nodePort(web("web", "10.96.0.3", "10.2.1.2"), 32000))
					if at := (service.Destination{Addr: own, Port: 32000, Protocol: service.TCP}); !bound.has(at) {
						t.Errorf("round %d: the node port of another namespace has no socket, beside %v", round, bound.quotas.namespaces)
					}
					for _, namespace := range []string{"evil", "worse"} {
						c := gone("greedy")
						for i := range c.Deleted {
							c.Deleted[i].Name.Namespace = namespace
						}
						p.apply(c)
					}
					p.apply(gone("web"))
					if held := p.manager.Stats().Claims; held != 0 || len(bound.quotas.namespaces) != 0 || bound.quotas.external != 0 {
						t.Errorf("round %d: %d are held, %v", round, held, bound.quotas.namespaces)
					}
					check.Equalf(t, len(p.tcp.bound)+len(p.udp.bound), 0, "round %d: still bound: %v %v", round, p.tcp.bound, p.udp.bound)
				}
			})
		}
	}
}
