//go:build cluster

package cluster

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/test/netns"
)

// affinityCases test session affinity.
var affinityCases = []testCase{
	{"session affinity for cluster IP and NodePort, switched on and off", func(w *world) {
		svc := w.service("sticky", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.SessionAffinity = corev1.ServiceTypeNodePort, corev1.ServiceAffinityClientIP
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "p-udp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP})
		})
		w.slice("sticky", w.all()...)
		for i, network := range []string{"tcp", "udp"} {
			addresses := []string{at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[i].NodePort)}
			for _, from := range []*netns.Host{w.hosts.Outside, w.hosts.Pods[1], w.hosts.Node} {
				for _, address := range addresses {
					w.expectOne(from, network, address)
				}
			}
		}
		for _, affinity := range []corev1.ServiceAffinity{corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP} {
			w.change("sticky", func(s *corev1.Service) { s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = affinity, nil })
			for i, network := range []string{"tcp", "udp"} {
				for _, address := range []string{at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[i].NodePort)} {
					if affinity == corev1.ServiceAffinityNone {
						w.expect(w.hosts.Outside, network, address, fmtPods(1, 2, 3))
					} else {
						w.expectOne(w.hosts.Outside, network, address)
					}
				}
			}
		}
	}},
	{"all addresses of a port share session affinity, which moves when its endpoint is removed", func(w *world) {
		svc := w.service("moves", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.SessionAffinity = corev1.ServiceTypeNodePort, corev1.ServiceAffinityClientIP
		})
		w.slice("moves", w.pod1(), w.pod3())
		inside, node := at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort)
		first := w.expectOne(w.hosts.Outside, "tcp", inside)
		if got := w.expectOne(w.hosts.Outside, "tcp", node); got != first { // A5.1
			w.t.Errorf("the node port leads to %s, the cluster IP to %s", got, first)
		}
		stays, want := w.pod3(), fmtPods(3)
		if first == want {
			stays, want = w.pod1(), fmtPods(1)
		}
		w.slice("moves", stays)
		w.expect(w.hosts.Outside, "tcp", inside, want) // A5.4
		w.slice("moves", w.pod1(), w.pod3())
		w.expect(w.hosts.Outside, "tcp", inside, want)
	}},
	{"session affinity timeout", func(w *world) {
		svc := w.service("brief", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.SessionAffinity = corev1.ServiceTypeNodePort, corev1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(1))}}
		})
		w.slice("brief", w.all()...)
		for _, address := range []string{at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort)} {
			first := ""
			w.until("another endpoint serves "+address+" after a time without connections", func() error {
				name, _ := meet(patience, w.hosts.Outside, "tcp", address)
				if first == "" && strings.HasPrefix(name, "pod-") {
					first = name
				}
				if name == first || !strings.HasPrefix(name, "pod-") {
					time.Sleep(1100 * time.Millisecond) // the timeout is of a whole second
					return fmt.Errorf("served by %s", name)
				}
				return nil
			})
		}
	}},
	{"session affinity with policy Local at a load balancer's address", func(w *world) {
		vip := w.vip()
		w.service("lb", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.SessionAffinity = corev1.ServiceTypeLoadBalancer, corev1.ServiceAffinityClientIP
			s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: vip}}
		})
		w.slice("lb", w.all()...)
		first := w.expectOne(w.hosts.Outside, "tcp", at(vip, 80))
		if first == fmtPods(3) {
			w.t.Errorf("policy Local leads to %s", first)
		}
		w.change("lb", func(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityNone })
		w.expect(w.hosts.Outside, "tcp", at(vip, 80), fmtPods(1, 2))
	}},
}

// expectOne waits until one endpoint serves 15 consecutive connections (A5.8), and
// returns its name.
func (w *world) expectOne(from *netns.Host, network, address string) (name string) {
	w.t.Helper()
	w.until("one endpoint for 15 in a row, "+network+" from "+from.Name()+" to "+address, func() error {
		name, _ = meet(patience, from, network, address)
		for range 14 {
			if again, _ := meet(patience, from, network, address); again != name || !strings.HasPrefix(name, "pod-") {
				return fmt.Errorf("served by %s and %s", name, again)
			}
		}
		return nil
	})
	return name
}
