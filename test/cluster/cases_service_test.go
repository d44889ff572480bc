//go:build cluster

package cluster

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/test/netns"
)

// serviceCases test a Service's type, ports, addresses and slices.
var serviceCases = []testCase{
	{"serve a basic endpoint, change and lose endpoints", func(w *world) {
		svc := w.service("web", nil)
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), "refused")
		w.slice("web", w.all()...)
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 2, 3))
		w.slice("web", w.pod2())
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(2))
		w.slice("web")
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), "refused")
	}},
	{"same port and different protocols", func(w *world) {
		svc := w.service("dns", func(s *corev1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "p-udp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP})
		})
		w.slice("dns", w.pod1(), w.pod3())
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 3))
		w.everybody("udp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 3))
		w.slice("dns")
		w.expect(w.hosts.Outside, "udp", at(svc.Spec.ClusterIP, 80), "refused")
	}},
	{"NodePort, changes of type, listening on the same number for another protocol", func(w *world) {
		svc := w.service("np", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.Ports[0].NodePort, s.Spec.ClusterIP = corev1.ServiceTypeNodePort, w.nodePort(), w.clusterIP()
		})
		w.slice("np", w.all()...)
		port := svc.Spec.Ports[0].NodePort
		w.everybody("tcp", at(w.hosts.Node.IPv4.String(), port), fmtPods(1, 2, 3))
		w.change("np", func(s *corev1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "p-udp", Port: 80, NodePort: port, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP})
		})
		w.expect(w.hosts.Outside, "udp", at(w.hosts.Node.IPv4.String(), port), fmtPods(1, 2, 3))
		w.change("np", func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeClusterIP
			for i := range s.Spec.Ports {
				s.Spec.Ports[i].NodePort = 0
			}
		})
		w.expect(w.hosts.Outside, "tcp", at(w.hosts.Node.IPv4.String(), port), "refused")
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 2, 3))
		w.change("np", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName, s.Spec.ClusterIP, s.Spec.ClusterIPs = corev1.ServiceTypeExternalName, "example.com", "", nil
		})
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), "silent") // A3.12
	}},
	{"named targetPorts that are different numbers on different endpoints", func(w *world) {
		svc := w.service("named", nil)
		w.slice("named", w.pod1())
		w.sliceOf("named", "named-other", false, 9090, w.pod2())
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), "pod-1:8080 pod-2:9090")
	}},
	{"dual stack", func(w *world) {
		svc := w.service("dual", func(s *corev1.Service) {
			s.Spec.IPFamilyPolicy, s.Spec.Type = ptr.To(corev1.IPFamilyPolicyRequireDualStack), corev1.ServiceTypeNodePort
		})
		w.slice("dual", w.pod1(), w.pod3())
		w.sliceOf("dual", "dual-6", true, 8080, w.pod2(), w.pod3())
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIPs[0], 80), fmtPods(1, 3))
		w.everybody("tcp", at(svc.Spec.ClusterIPs[1], 80), fmtPods(2, 3))
		w.expect(w.hosts.Outside, "tcp", at(w.hosts.Node.IPv6.String(), svc.Spec.Ports[0].NodePort), fmtPods(2, 3))
	}},
	{"up and down, recreated, ports added and removed", func(w *world) {
		svc := w.service("again", func(s *corev1.Service) { s.Spec.ClusterIP = w.clusterIP() })
		w.slice("again", w.pod1())
		ip := svc.Spec.ClusterIP
		w.expect(w.hosts.Outside, "tcp", at(ip, 80), fmtPods(1))
		w.admin.delete(svc)
		w.expect(w.hosts.Outside, "tcp", at(ip, 80), "silent")
		w.service("again", func(s *corev1.Service) { s.Spec.ClusterIP = ip })
		w.slice("again", w.pod2()) // the controller may have deleted the old one
		w.expect(w.hosts.Outside, "tcp", at(ip, 80), fmtPods(2))
		w.change("again", func(s *corev1.Service) { s.Spec.Ports[0].Port = 81 })
		w.expect(w.hosts.Outside, "tcp", at(ip, 81), fmtPods(2))
		w.expect(w.hosts.Outside, "tcp", at(ip, 80), "refused")
	}},
	{"implement service.kubernetes.io/service-proxy-name", func(w *world) {
		svc := w.service("labelled", nil)
		w.slice("labelled", w.pod1())
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
		w.change("labelled", func(s *corev1.Service) {
			s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "somebody"}
		})
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), "silent")
		w.change("labelled", func(s *corev1.Service) { s.Labels = nil })
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
	}},
	{"connect by ExternalIP", func(w *world) {
		w.service("external", func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"198.51.100.10"} })
		w.slice("external", w.pod2(), w.pod3())
		w.everybody("tcp", "198.51.100.10:80", fmtPods(2, 3))
	}},
	{"implement service.kubernetes.io/headless", func(w *world) {
		svc := w.service("head", nil)
		w.slice("head", w.pod1())
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
		w.labelSlice("head-4", corev1.IsHeadlessService, "")
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), "refused") // A1.3
		// If the Service has a cluster IP, the label has no effect: the controller
		// does not copy it to the slices.
		w.pod("pod-1", w.pod1())
		labelled := w.service("labelled", func(s *corev1.Service) {
			s.Spec.Selector = map[string]string{"name": "pod-1"}
			s.Labels = map[string]string{corev1.IsHeadlessService: ""}
		})
		w.everybody("tcp", at(labelled.Spec.ClusterIP, 80), fmtPods(1))
	}},
	{"headless Services and ExternalNames are not steered until their type changes", func(w *world) {
		w.service("none", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone })
		w.slice("none", w.pod1())
		w.service("name", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "example.com"
		})
		w.slice("name", w.pod1(), w.pod3())
		ip := w.clusterIP()
		w.expect(w.hosts.Outside, "tcp", at(ip, 80), "silent")
		w.change("name", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName, s.Spec.ClusterIP = corev1.ServiceTypeClusterIP, "", ip
		})
		w.everybody("tcp", at(ip, 80), fmtPods(1, 3))
		port := w.nodePort()
		w.change("name", func(s *corev1.Service) { s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, port })
		w.everybody("tcp", at(w.hosts.Node.IPv4.String(), port), fmtPods(1, 3))
		w.change("name", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName, s.Spec.ClusterIP, s.Spec.ClusterIPs = corev1.ServiceTypeExternalName, "example.com", "", nil
			s.Spec.Ports[0].NodePort = 0
		})
		w.everybody("tcp", at(w.hosts.Node.IPv4.String(), port), "refused")
		w.expect(w.hosts.Outside, "tcp", at(ip, 80), "silent")
	}},
	{"multiple ports and endpoint IPs specified in multiple EndpointSlices", func(w *world) {
		svc := w.service("many", func(s *corev1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "q", Port: 81, TargetPort: intstr.FromInt32(9090), Protocol: corev1.ProtocolTCP})
		})
		w.slice("many", w.pod1())
		w.sliceOf("many", "many-more", false, 8080, w.pod3())
		w.sliceOf("many", "many-q", false, 9090, w.pod2())
		w.namePort("many-q", "q")
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 3))
		w.everybody("tcp", at(svc.Spec.ClusterIP, 81), "pod-2:9090")
		w.dropSlice("many-4")
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(3))
	}},
	{"a Service of a hundred ports", func(w *world) {
		svc := w.service("wide", func(s *corev1.Service) {
			s.Spec.Ports, s.Spec.ClusterIP = nil, w.clusterIP()
			for i := range int32(100) {
				s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprintf("p%d", i), Port: 1000 + i, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolTCP})
			}
		})
		w.slice("wide", w.pod1(), w.pod3())
		w.widen("wide-4", 100)
		for _, i := range []int32{0, 1, 50, 99} {
			w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 1000+i), fmtPods(1, 3))
		}
		w.change("wide", func(s *corev1.Service) { s.Spec.Ports = s.Spec.Ports[:50] })
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 1099), "refused")
		w.expect(w.hosts.Pods[0], "tcp", at(svc.Spec.ClusterIP, 1050), "refused")
		w.expect(w.hosts.Pods[0], "tcp", at(svc.Spec.ClusterIP, 1049), fmtPods(1, 3))
	}},
	{"several Services with the same endpoints", func(w *world) {
		one, two := w.service("one", nil), w.service("two", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
		for _, name := range []string{"one", "two"} {
			w.slice(name, w.pod2(), w.pod3())
		}
		w.everybody("tcp", at(one.Spec.ClusterIP, 80), fmtPods(2, 3))
		w.everybody("tcp", at(two.Spec.ClusterIP, 80), fmtPods(2, 3))
		w.admin.delete(one)
		w.everybody("tcp", at(two.Spec.ClusterIP, 80), fmtPods(2, 3))
		w.everybody("tcp", at(w.hosts.Node.IPv4.String(), two.Spec.Ports[0].NodePort), fmtPods(2, 3))
	}},
	{"function for large requests and answers", func(w *world) {
		svc := w.service("large", func(s *corev1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "p-udp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP})
		})
		w.slice("large", w.pod1(), w.pod3())
		w.everybody("udp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 3))
		for _, from := range []*netns.Host{w.hosts.Outside, w.hosts.Pods[1], w.hosts.Node} {
			w.large(from, "tcp", at(svc.Spec.ClusterIP, 80), 4<<20)
			for _, size := range []int{1400, 4096, 20000, 60000} { // most of them are fragmented
				w.large(from, "udp", at(svc.Spec.ClusterIP, 80), size)
			}
		}
	}},
	{"an SCTP port does not affect other ports of its number", func(w *world) {
		svc := w.service("sctp", func(s *corev1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "p-sctp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolSCTP})
		})
		w.slice("sctp", w.pod1())
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
		w.expect(w.hosts.Outside, "udp", at(svc.Spec.ClusterIP, 80), "refused")
	}},
	{"the secondary IP family: node ports, UDP, affinity, endpoints", func(w *world) {
		svc := w.service("second", func(s *corev1.Service) {
			s.Spec.IPFamilyPolicy, s.Spec.Type = ptr.To(corev1.IPFamilyPolicyRequireDualStack), corev1.ServiceTypeNodePort
			s.Spec.Ports[0].NodePort = w.nodePort()
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "p-udp", Port: 80, NodePort: s.Spec.Ports[0].NodePort, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP})
		})
		ip, node := svc.Spec.ClusterIPs[1], at(w.hosts.Node.IPv6.String(), svc.Spec.Ports[0].NodePort)
		w.slice("second", w.pod1())
		// kube-proxy's ICMPv6 messages do not reach all clients of a port without
		// endpoints, so only Sluice is tested.
		refused := func(addresses ...string) {
			w.t.Helper()
			if w.proxy != "sluice" {
				return
			}
			for _, address := range addresses {
				w.everybody("tcp", address, "refused")
				w.everybody("udp", address, "refused")
			}
		}
		refused(at(ip, 80), node) // no endpoint of this family
		w.sliceOf("second", "second-6", true, 8080, w.pod1(), w.pod2(), w.pod3())
		for _, address := range []string{at(ip, 80), node} {
			w.everybody("tcp", address, fmtPods(1, 2, 3))
			w.everybody("udp", address, fmtPods(1, 2, 3))
		}
		w.expectSeen(w.hosts.Outside, at(ip, 80), "node")
		w.change("second", func(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP })
		w.expectOne(w.hosts.Outside, "tcp", at(ip, 80))
		w.expectOne(w.hosts.Outside, "udp", node)
		w.change("second", func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeClusterIP
			s.Spec.Ports[0].NodePort, s.Spec.Ports[1].NodePort = 0, 0
		})
		refused(node)
	}},
	{"be rejected when no endpoints exist, also for evicted pods", func(w *world) {
		svc := w.service("void", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.Selector = corev1.ServiceTypeNodePort, map[string]string{"name": "pod-1"}
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "p-udp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP})
		})
		rejected := func() {
			w.t.Helper()
			for i, network := range []string{"tcp", "udp"} {
				w.everybody(network, at(svc.Spec.ClusterIP, 80), "refused")
				w.everybody(network, at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[i].NodePort), "refused")
			}
		}
		rejected()
		pod := w.pod("pod-1", w.pod1())
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
		pod.Status.Phase, pod.Status.Reason = corev1.PodFailed, "Evicted"
		pod.Status.Conditions[0].Status = corev1.ConditionFalse
		w.admin.update(pod, "status")
		rejected()
	}},
}
