//go:build cluster

package cluster

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/test/must"
)

// loadBalancerCases test load balancers. The tests do what a cloud's controller
// does.
var loadBalancerCases = []testCase{
	{"only source ranges", func(w *world) {
		vip := w.vip()
		svc := w.service("ranged", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.LoadBalancerSourceRanges = corev1.ServiceTypeLoadBalancer, []string{"10.1.0.3/32"}
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: vip}}
		})
		w.slice("ranged", w.pod1())
		w.everybody("tcp", at(vip, 80), "silent") // A3.10
		for _, address := range []string{at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort)} {
			w.everybody("tcp", address, fmtPods(1)) // source ranges apply only to the load balancer's address
		}
		w.change("ranged", func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.1.0.0/24"} })
		w.expect(w.hosts.Outside, "tcp", at(vip, 80), fmtPods(1))
	}},
	{"a load balancer's address with ipMode Proxy is not steered", func(w *world) {
		taken, left := w.vip(), w.vip()
		w.service("mode", func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeLoadBalancer
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{
				{IP: taken, IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)}, {IP: left, IPMode: ptr.To(corev1.LoadBalancerIPModeProxy)}, {Hostname: "lb.example.com"},
			}
		})
		w.slice("mode", w.pod1(), w.pod3())
		w.everybody("tcp", at(taken, 80), fmtPods(1, 3))
		w.everybody("tcp", at(left, 80), "world:80") // A1.9
		w.setIngress("mode", corev1.LoadBalancerIngress{IP: left, IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)})
		w.everybody("tcp", at(left, 80), fmtPods(1, 3))
		w.expect(w.hosts.Outside, "tcp", at(taken, 80), "world:80")
		w.setIngress("mode")
		w.everybody("tcp", at(left, 80), "world:80") // A3.13: the address is not ours
	}},
	{"a load balancer without node ports", func(w *world) {
		vip := w.vip()
		svc := w.service("bare", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.AllocateLoadBalancerNodePorts = corev1.ServiceTypeLoadBalancer, ptr.To(false)
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: vip}}
		})
		must.Equalf(w.t, svc.Spec.Ports[0].NodePort, 0, "it has the node port")
		w.everybody("tcp", at(vip, 80), "refused")
		w.slice("bare", w.pod1(), w.pod3())
		w.everybody("tcp", at(vip, 80), fmtPods(1, 3))
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 3))
	}},
	{"change the type and ports of a TCP and UDP service", func(w *world) {
		vip, first, second := w.vip(), w.nodePort(), w.nodePort()
		svc := w.service("types", func(s *corev1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "p-udp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP})
		})
		w.slice("types", w.pod1(), w.pod3())
		node := w.hosts.Node.IPv4.String()
		both := func(address, want string) {
			w.t.Helper()
			w.everybody("tcp", address, want)
			w.everybody("udp", address, want)
		}
		both(at(svc.Spec.ClusterIP, 80), fmtPods(1, 3))
		setNodePort := func(port int32) func(*corev1.Service) {
			return func(s *corev1.Service) {
				if s.Spec.Type == corev1.ServiceTypeClusterIP {
					s.Spec.Type = corev1.ServiceTypeNodePort
				}
				s.Spec.Ports[0].NodePort, s.Spec.Ports[1].NodePort = port, port
			}
		}
		w.change("types", setNodePort(first))
		both(at(node, first), fmtPods(1, 3))
		w.change("types", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeLoadBalancer })
		w.setIngress("types", corev1.LoadBalancerIngress{IP: vip})
		both(at(vip, 80), fmtPods(1, 3))
		w.change("types", setNodePort(second))
		both(at(node, second), fmtPods(1, 3))
		both(at(node, first), "refused")
		w.change("types", func(s *corev1.Service) { s.Spec.Ports[0].Port, s.Spec.Ports[1].Port = 81, 81 })
		both(at(vip, 81), fmtPods(1, 3))
		w.expect(w.hosts.Outside, "tcp", at(vip, 80), "world:80")
		w.change("types", func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeClusterIP
			s.Spec.Ports[0].NodePort, s.Spec.Ports[1].NodePort = 0, 0
		})
		both(at(node, second), "refused")
		w.expect(w.hosts.Outside, "tcp", at(vip, 81), "refused") // by the world, which has the address
		both(at(svc.Spec.ClusterIP, 81), fmtPods(1, 3))
	}},
	{"no disruption during a rolling update, policies Cluster and Local", func(w *world) {
		vip := w.vip()
		w.service("rolls", func(s *corev1.Service) {
			s.Spec.Type, s.Status.LoadBalancer.Ingress = corev1.ServiceTypeLoadBalancer, []corev1.LoadBalancerIngress{{IP: vip}}
		})
		old, young := w.pod1(), w.pod2()
		w.slice("rolls", old)
		w.expect(w.hosts.Outside, "tcp", at(vip, 80), fmtPods(1))
		for _, policy := range []corev1.ServiceExternalTrafficPolicy{corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal} {
			w.change("rolls", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = policy })
			done, ended := make(chan struct{}), make(chan string)
			go func() {
				for {
					select {
					case <-done:
						ended <- ""
						return
					default:
					}
					if got, _ := meet(patience, w.hosts.Outside, "tcp", at(vip, 80)); !strings.HasPrefix(got, "pod-") {
						ended <- got
						return
					}
				}
			}()
			for range 3 {
				w.slice("rolls", old, young)
				w.expect(w.hosts.Outside, "tcp", at(vip, 80), fmtPods(1, 2))
				w.slice("rolls", withTerminating(old), young)
				w.expect(w.hosts.Outside, "tcp", at(vip, 80), young.host.Name()+":8080")
				w.slice("rolls", young)
				old, young = young, old
			}
			close(done)
			if got := <-ended; got != "" && w.proxy == "sluice" {
				w.t.Errorf("policy %s: a connection met %q", policy, got)
			} else if got != "" {
				// kube-proxy is the reference, not the product. Once in some hundred runs a packet
				// passes its tables unchanged; the cause is not known.
				w.t.Logf("policy %s: with kube-proxy a connection met %q", policy, got)
			}
		}
	}},
}

// setIngress changes a Service's status like a load balancer's controller.
func (w *world) setIngress(name string, ingress ...corev1.LoadBalancerIngress) {
	w.t.Helper()
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}}
	w.admin.read(svc)
	svc.Status.LoadBalancer.Ingress = ingress
	w.admin.update(svc, "status")
}
