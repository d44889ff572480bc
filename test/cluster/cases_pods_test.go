//go:build cluster

package cluster

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

// podCases test Pods, for which the real controller creates slices. Other cases
// create slices themselves, with content that no controller would produce in time.
var podCases = []testCase{
	{"endpoints of Pods from the real controller", func(w *world) {
		svc := w.service("web", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "web"} })
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "pod-1", Labels: map[string]string{"app": "web"}},
			Spec: corev1.PodSpec{NodeName: "node", Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
		w.admin.create(pod)
		ip := w.hosts.Pods[0].IPv4.String()
		pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
		w.admin.update(pod, "status")
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
		pod.Status.Conditions[0].Status = corev1.ConditionFalse
		w.admin.update(pod, "status")
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), "refused")
	}},
	{"trafficDistribution PreferSameZone and PreferClose, hints from the real controller", func(w *world) {
		for _, distribution := range []string{corev1.ServiceTrafficDistributionPreferSameZone, corev1.ServiceTrafficDistributionPreferClose} {
			name := strings.ToLower(distribution)
			svc := w.service(name, func(s *corev1.Service) {
				s.Spec.Selector, s.Spec.TrafficDistribution = map[string]string{"app": "web"}, &distribution
				s.Spec.Type = corev1.ServiceTypeNodePort
			})
			inside, node := at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort)
			var pods []*corev1.Pod
			for i, e := range w.all() {
				pods = append(pods, w.pod(fmt.Sprintf("%s-%d", name, i+1), e))
			}
			w.everybody("tcp", inside, fmtPods(1, 2))
			w.everybody("tcp", node, fmtPods(1, 2))
			w.setReady(pods[0], false)
			w.everybody("tcp", inside, fmtPods(2))
			w.setReady(pods[1], false)
			w.everybody("tcp", inside, fmtPods(3)) // the zone has none left
			w.setReady(pods[0], true)
			w.everybody("tcp", inside, fmtPods(1))
			for _, p := range pods {
				w.deleteNow(p)
			}
		}
	}},
	{"trafficDistribution PreferSameNode, hints from the real controller", func(w *world) {
		svc := w.service("near", func(s *corev1.Service) {
			s.Spec.Selector, s.Spec.TrafficDistribution = map[string]string{"app": "web"}, ptr.To(corev1.ServiceTrafficDistributionPreferSameNode)
		})
		inside := at(svc.Spec.ClusterIP, 80)
		pod := w.pod("pod-1", w.pod1())
		w.pod("pod-3", w.pod3())
		w.everybody("tcp", inside, fmtPods(1))
		w.setReady(pod, false)
		w.everybody("tcp", inside, fmtPods(3))
		w.setReady(pod, true)
		w.everybody("tcp", inside, fmtPods(1))
	}},
	{"connect to terminating and unready endpoints if PublishNotReadyAddresses is true", func(w *world) {
		svc := w.service("all", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.Selector, s.Spec.PublishNotReadyAddresses = corev1.ServiceTypeNodePort, map[string]string{"app": "web"}, true
		})
		inside, node := at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort)
		w.setReady(w.pod("pod-1", w.pod1()), false)
		w.everybody("tcp", inside, fmtPods(1))
		leaving := w.pod("pod-3", w.pod3())
		w.setReady(leaving, false)
		w.admin.delete(leaving) // it terminates
		w.everybody("tcp", inside, fmtPods(1, 3))
		w.everybody("tcp", node, fmtPods(1, 3))
	}},
	{"not connect to terminating and unready endpoints if PublishNotReadyAddresses is false", func(w *world) {
		svc := w.service("ready", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.Selector = corev1.ServiceTypeNodePort, map[string]string{"app": "web"}
		})
		inside, node := at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort)
		leaving := w.pod("pod-3", w.pod3())
		w.everybody("tcp", inside, fmtPods(3))
		w.admin.delete(leaving)
		w.everybody("tcp", inside, fmtPods(3)) // it still serves, and no other endpoint does (A2.4)
		w.setReady(leaving, false)
		w.setReady(w.pod("pod-1", w.pod1()), false)
		w.everybody("tcp", inside, "refused")
		w.everybody("tcp", node, "refused")
		w.pod("pod-2", w.pod2())
		w.everybody("tcp", inside, fmtPods(2))
	}},
	{"named targetPorts that pods resolve to different ports", func(w *world) {
		svc := w.service("resolve", func(s *corev1.Service) {
			s.Spec.Selector, s.Spec.Ports[0].TargetPort = map[string]string{"app": "web"}, intstr.FromString("http")
		})
		w.pod("pod-1", w.pod1())
		other := w.pod3()
		other.port = 9090
		w.pod("pod-3", other)
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), "pod-1:8080 pod-3:9090")
	}},
}
