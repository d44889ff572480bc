//go:build cluster

package cluster

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/test/netns"
)

// policyCases test which endpoints may serve: policies, conditions, hints.
var policyCases = []testCase{
	{"internalTrafficPolicy Local", func(w *world) {
		svc := w.service("local", func(s *corev1.Service) {
			s.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
		})
		w.slice("local", w.pod1(), w.pod3())
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
		w.slice("local", w.pod3())
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), "silent") // A3.5
	}},
	{"externalTrafficPolicy Local, its health check port", func(w *world) {
		vip := w.vip()
		svc := w.service("lb", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: vip}}
		})
		w.slice("lb", w.pod1(), w.pod3())
		node := w.hosts.Node.IPv4.String()
		w.expect(w.hosts.Outside, "tcp", at(node, svc.Spec.Ports[0].NodePort), fmtPods(1))
		w.expect(w.hosts.Outside, "tcp", at(vip, 80), fmtPods(1))
		w.expect(w.hosts.Pods[1], "tcp", at(vip, 80), fmtPods(1, 3)) // A3.6
		health := fmt.Sprintf("http://%s:%d/", node, svc.Spec.HealthCheckNodePort)
		w.until("the health check port says 200", func() error { return w.wantStatus(health, "200") })
		w.slice("lb", w.pod3())
		w.expect(w.hosts.Outside, "tcp", at(node, svc.Spec.Ports[0].NodePort), "silent")
		w.expect(w.hosts.Outside, "tcp", at(vip, 80), "silent")
		for _, from := range []*netns.Host{w.hosts.Pods[1], w.hosts.Node} {
			w.expect(from, "tcp", at(vip, 80), fmtPods(3))
			w.expect(from, "tcp", at(node, svc.Spec.Ports[0].NodePort), fmtPods(3))
		}
		w.until("the health check port says 503", func() error { return w.wantStatus(health, "503") })
	}},
	{"unready and terminating endpoints", func(w *world) {
		svc := w.service("end", nil)
		address := at(svc.Spec.ClusterIP, 80)
		unready, leaving := w.pod1(), w.pod2()
		unready.notReady, unready.notServing = true, true
		leaving.terminating = true
		w.slice("end", unready, leaving, w.pod3())
		w.everybody("tcp", address, fmtPods(3))
		w.slice("end", unready, leaving)
		w.everybody("tcp", address, fmtPods(2)) // A2.4
		leaving.notServing = true
		w.slice("end", unready, leaving)
		w.everybody("tcp", address, "refused") // A2.7
	}},
	{"topology hints", func(w *world) {
		svc := w.service("zoned", nil)
		near, far := w.pod1(), w.pod3()
		near.zones, far.zones = []string{"zone-a"}, []string{"zone-b"}
		w.slice("zoned", near, far)
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1)) // A2.9
		far.zones = nil
		w.slice("zoned", near, far)
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 3)) // A2.10
	}},
	{"fallback to terminating endpoints, by each policy", func(w *world) {
		vip := w.vip()
		svc := w.service("fall", func(s *corev1.Service) {
			s.Spec.Type, s.Status.LoadBalancer.Ingress = corev1.ServiceTypeLoadBalancer, []corev1.LoadBalancerIngress{{IP: vip}}
		})
		inside, node := at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort)
		near, far := w.pod1(), w.pod3()
		near.terminating = true
		w.slice("fall", near, far)
		for _, address := range []string{inside, node, at(vip, 80)} {
			w.expect(w.hosts.Outside, "tcp", address, fmtPods(3)) // policy Cluster: ready suffices
		}
		w.change("fall", func(s *corev1.Service) {
			s.Spec.InternalTrafficPolicy, s.Spec.ExternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal), corev1.ServiceExternalTrafficPolicyLocal
		})
		for _, address := range []string{inside, node, at(vip, 80)} {
			w.expect(w.hosts.Outside, "tcp", address, fmtPods(1)) // A2.5: no other endpoint is local
		}
		local := w.pod2()
		w.slice("fall", near, local, far)
		for _, address := range []string{inside, node, at(vip, 80)} {
			w.expect(w.hosts.Outside, "tcp", address, fmtPods(2))
		}
		w.slice("fall", near, withTerminating(far))
		w.change("fall", func(s *corev1.Service) {
			s.Spec.InternalTrafficPolicy, s.Spec.ExternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyCluster), corev1.ServiceExternalTrafficPolicyCluster
			s.Spec.HealthCheckNodePort = 0
		})
		for _, address := range []string{inside, node, at(vip, 80)} {
			w.expect(w.hosts.Outside, "tcp", address, fmtPods(1, 3)) // A2.4
		}
	}},
	{"fail health check node port if there are only terminating endpoints", func(w *world) {
		svc := w.service("ends", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
		})
		health := fmt.Sprintf("http://%s:%d/healthz", w.hosts.Node.IPv4, svc.Spec.HealthCheckNodePort)
		node := at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort)
		w.slice("ends", w.pod1())
		w.until("the health check port says 200", func() error { return w.wantStatus(health, "200") })
		w.slice("ends", withTerminating(w.pod1()))
		w.until("the health check port says 503", func() error { return w.wantStatus(health, "503") })
		w.expect(w.hosts.Outside, "tcp", node, fmtPods(1)) // it is still served (A6.3)
	}},
	{"internalTrafficPolicy Local, pods of the nodes' own network", func(w *world) {
		svc := w.service("own", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.InternalTrafficPolicy = corev1.ServiceTypeNodePort, ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
		})
		inside := at(svc.Spec.ClusterIP, 80)
		w.slice("own", w.hostPod1(), w.hostPod2())
		w.everybody("tcp", inside, "node:7070")
		w.expect(w.hosts.Outside, "tcp", at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort), "node2:7070 node:7070") // A3.3
		w.slice("own", w.hostPod2())
		w.everybody("tcp", inside, "silent")
	}},
	{"externalTrafficPolicy Local and NodePort; change of policy and of the health check port", func(w *world) {
		vip := w.vip()
		svc := w.service("changes", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
			s.Spec.HealthCheckNodePort, s.Spec.Ports[0].NodePort = w.nodePort(), w.nodePort()
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "p-udp", Port: 80, NodePort: s.Spec.Ports[0].NodePort, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP})
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: vip}}
		})
		w.slice("changes", w.pod1(), w.pod3())
		node := at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort)
		check := at(w.hosts.Node.IPv4.String(), svc.Spec.HealthCheckNodePort)
		w.until("the health check port says 200", func() error { return w.wantStatus("http://"+check+"/", "200") })
		w.expect(w.hosts.Outside, "tcp", node, fmtPods(1))
		for _, address := range []string{node, at(vip, 80)} {
			w.expectSeen(w.hosts.Outside, address, "outside")
		}
		w.change("changes", func(s *corev1.Service) {
			s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = corev1.ServiceExternalTrafficPolicyCluster, 0
		})
		w.expect(w.hosts.Outside, "tcp", check, "refused")
		for _, address := range []string{node, at(vip, 80)} {
			w.expect(w.hosts.Outside, "tcp", address, fmtPods(1, 3))
			w.expectSeen(w.hosts.Outside, address, "node")
		}
		w.change("changes", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
		for _, address := range []string{node, at(vip, 80)} {
			w.expect(w.hosts.Outside, "tcp", address, fmtPods(1))
			w.expectSeen(w.hosts.Outside, address, "outside")
		}
	}},
	{"hints for nodes come before hints for zones", func(w *world) {
		svc := w.service("hinted", nil)
		near, same, far := w.pod1(), w.pod2(), w.pod3()
		for _, e := range []*endpoint{&near, &same, &far} {
			e.zones, e.nodes = []string{"zone-a"}, []string{"node2"}
		}
		near.nodes = []string{"node"}
		inside := at(svc.Spec.ClusterIP, 80)
		w.slice("hinted", near, same, far)
		w.everybody("tcp", inside, fmtPods(1)) // A2.8
		near.nodes = []string{"node2"}
		far.zones = []string{"zone-b"}
		w.slice("hinted", near, same, far)
		w.everybody("tcp", inside, fmtPods(1, 2)) // A2.9
		same.nodes, same.zones = []string{"node"}, nil
		w.slice("hinted", near, same, far)
		w.everybody("tcp", inside, fmtPods(2))
		near.nodes = nil
		w.slice("hinted", near, same, far)
		w.everybody("tcp", inside, fmtPods(1, 2, 3)) // A2.10
	}},
}

func withTerminating(e endpoint) endpoint {
	e.terminating = true
	return e
}
