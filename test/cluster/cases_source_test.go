//go:build cluster

package cluster

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/sluice-proxy/sluice/test/netns"
)

// sourceCases test the client's address that endpoints see.
var sourceCases = []testCase{
	{"preserve source pod IP for traffic through a cluster IP", func(w *world) {
		svc := w.tcpAndUDP("see", nil)
		w.slice("see", w.pod2(), w.pod3())
		w.expectSeen(w.hosts.Pods[0], at(svc.Spec.ClusterIP, 80), "pod-1") // A3.9
		w.expectSeen(w.hosts.Outside, at(svc.Spec.ClusterIP, 80), "node")  // A3.8
		w.expectSeen(w.hosts.Node, at(svc.Spec.ClusterIP, 80), "node")
	}},
	{"source addresses behind node ports, external IPs and load balancers", func(w *world) {
		vip, external := w.vip(), w.vip()
		svc := w.tcpAndUDP("out", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalIPs = corev1.ServiceTypeLoadBalancer, []string{external}
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: vip}}
		})
		w.slice("out", w.pod1(), w.pod3())
		addresses := []string{at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort), at(vip, 80), at(external, 80)}
		for _, address := range addresses {
			for _, from := range []*netns.Host{w.hosts.Outside, w.hosts.Pods[1], w.hosts.Node} {
				w.expectSeen(from, address, "node") // A3.8
			}
		}
		w.change("out", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
		for _, address := range addresses {
			w.expectSeen(w.hosts.Outside, address, "outside") // A3.9
			w.expectSeen(w.hosts.Pods[1], address, "pod-2")   // A3.6
			w.expectSeen(w.hosts.Node, address, "node")
		}
	}},
	{"pods hairpin back to themselves through services", func(w *world) {
		svc := w.tcpAndUDP("self", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
		w.slice("self", w.pod1())
		for _, network := range []string{"tcp", "udp"} {
			w.expect(w.hosts.Pods[0], network, at(svc.Spec.ClusterIP, 80), fmtPods(1))
		}
		w.expectSeen(w.hosts.Pods[0], at(svc.Spec.ClusterIP, 80), "node") // A3.8
		w.expectSeen(w.hosts.Pods[0], at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort), "node")
	}},
	{"endpoints of the nodes' own network", func(w *world) {
		svc := w.tcpAndUDP("own", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
		w.slice("own", w.hostPod1(), w.hostPod2())
		for i, network := range []string{"tcp", "udp"} {
			w.everybody(network, at(svc.Spec.ClusterIP, 80), "node2:7070 node:7070")
			w.everybody(network, at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[i].NodePort), "node2:7070 node:7070")
		}
		w.slice("own", w.hostPod2())
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), "node2:7070")
		w.expectSeen(w.hosts.Pods[0], at(svc.Spec.ClusterIP, 80), "pod-1")
		w.expectSeen(w.hosts.Outside, at(svc.Spec.ClusterIP, 80), "node")
		w.expectSeen(w.hosts.Node, at(svc.Spec.ClusterIP, 80), "node")
		// No proxy masquerades packets to this node itself; a proxy that accepts
		// connections would not get the replies.
		w.slice("own", w.hostPod1())
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), "node:7070")
		w.expectSeen(w.hosts.Pods[0], at(svc.Spec.ClusterIP, 80), w.relayed("node", "pod-1"))
		w.expectSeen(w.hosts.Outside, at(svc.Spec.ClusterIP, 80), w.relayed("node", "outside"))
	}},
}

// tcpAndUDP is service with a port of each protocol on one number, also as node
// ports.
func (w *world) tcpAndUDP(name string, edit func(*corev1.Service)) *corev1.Service {
	w.t.Helper()
	return w.service(name, func(s *corev1.Service) {
		if edit != nil {
			edit(s)
		}
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "p-udp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP})
		if t := s.Spec.Type; t == corev1.ServiceTypeNodePort || t == corev1.ServiceTypeLoadBalancer {
			s.Spec.Ports[0].NodePort = w.nodePort()
			s.Spec.Ports[1].NodePort = s.Spec.Ports[0].NodePort
		}
	})
}
