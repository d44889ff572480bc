//go:build cluster

package cluster

import (
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestBringUp starts on a node without objects, and continues with changes that
// occur in long-lived clusters.
func TestBringUp(t *testing.T) {
	w := setUp(t)
	w.namespace = "default"
	nodes := []*corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "node"}}, {ObjectMeta: metav1.ObjectMeta{Name: "node2"}}}
	for _, n := range nodes {
		w.admin.read(n)
		w.admin.delete(n)
	}
	start := func() *netns.Cmd {
		return w.start("sluice", os.Getenv("SLUICE_BIN"), "run", "--kubeconfig", w.kubeconfig("system:kube-proxy"), "--hostname-override", "node", "--access-log", "off",
			"--detect-local-mode", "NodeCIDR")
	}
	svc := w.service("web", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	address, nodePort := at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort)
	near, far := w.pod1(), w.pod3()
	near.zones, far.zones = []string{"zone-a"}, []string{"zone-b"}
	w.slice("web", near, far)
	cmd := start()
	w.awaitProxy()

	play := func(name string, f func(*testing.T)) {
		t.Run(name, func(t *testing.T) {
			w.t, w.admin.t = t, t
			f(t)
		})
	}
	health := func(page, status string) {
		w.t.Helper()
		w.until(page+" says "+status, func() error { return w.wantStatus("http://127.0.0.1:10256/"+page, status) })
	}
	play("no Node object: everything is served, the node is not eligible", func(*testing.T) {
		w.everybody("tcp", address, fmtPods(1, 3)) // its zone is unknown (A2.9)
		w.expect(w.hosts.Outside, "tcp", nodePort, fmtPods(1, 3))
		health("healthz", "503") // A7.3
		health("livez", "200")
	})
	play("the Node object appears", func(*testing.T) {
		w.createNodes()
		w.everybody("tcp", address, fmtPods(1))
		health("healthz", "200")
	})
	play("its labels and addresses change", func(*testing.T) {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}
		w.admin.read(n)
		n.Labels["topology.kubernetes.io/zone"] = "zone-b"
		w.admin.update(n)
		w.everybody("tcp", address, fmtPods(3))
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: netns.OwnIPs[0].String()}}
		w.admin.update(n, "status")
		w.expect(w.hosts.Outside, "tcp", nodePort, fmtPods(3))
		w.everybody("tcp", address, fmtPods(3))
	})
	play("the Node object is recreated, with other pod ranges", func(t *testing.T) {
		steady := w.watch(address)
		for _, n := range nodes {
			w.admin.delete(n)
		}
		health("healthz", "503")
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{"topology.kubernetes.io/zone": "zone-b"}}}
		n.Spec.PodCIDR, n.Spec.PodCIDRs = "10.244.9.0/24", []string{"10.244.9.0/24", "fd00:244:9::/64"}
		w.admin.create(n)
		health("healthz", "200")
		w.everybody("tcp", address, fmtPods(3))
		steady.end()
		if len(steady.errors) > 0 {
			t.Error(steady.errors)
		}
	})
	play("a Service recreated under its name has another address", func(*testing.T) {
		first := w.service("again", nil)
		w.slice("again", w.pod1())
		w.expect(w.hosts.Outside, "tcp", at(first.Spec.ClusterIP, 80), fmtPods(1))
		w.admin.delete(first)
		second := w.service("again", nil)
		w.slice("again", w.pod2())
		w.expect(w.hosts.Outside, "tcp", at(second.Spec.ClusterIP, 80), fmtPods(2))
		w.expect(w.hosts.Outside, "tcp", at(first.Spec.ClusterIP, 80), "silent") // A3.12
		w.dropSlice("again-4")
		w.expect(w.hosts.Outside, "tcp", at(second.Spec.ClusterIP, 80), "refused")
		w.slice("again", w.pod3()) // a slice of the same name, with another UID
		w.expect(w.hosts.Outside, "tcp", at(second.Spec.ClusterIP, 80), fmtPods(3))
	})
	play("a slice moves from one Service to another by its label", func(*testing.T) {
		from, to := w.service("from", nil), w.service("to", nil)
		w.slice("from", w.pod2())
		w.expect(w.hosts.Outside, "tcp", at(from.Spec.ClusterIP, 80), fmtPods(2))
		w.expect(w.hosts.Outside, "tcp", at(to.Spec.ClusterIP, 80), "refused")
		s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "from-4"}}
		w.admin.read(s)
		s.Labels[discoveryv1.LabelServiceName] = "to"
		w.admin.update(s)
		w.expect(w.hosts.Outside, "tcp", at(to.Spec.ClusterIP, 80), fmtPods(2))
		w.expect(w.hosts.Outside, "tcp", at(from.Spec.ClusterIP, 80), "refused")
		delete(s.Labels, discoveryv1.LabelServiceName) // of no Service
		w.admin.update(s)
		w.expect(w.hosts.Outside, "tcp", at(to.Spec.ClusterIP, 80), "refused")
	})
	play("an endpoint in two slices, ready in one of them", func(*testing.T) {
		svc := w.service("twice", nil)
		leaving := w.pod1()
		leaving.terminating = true
		w.sliceOf("twice", "twice-a", false, 8080, w.pod1(), w.pod2())
		w.sliceOf("twice", "twice-b", false, 8080, leaving)
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 2)) // A1.13
		w.dropSlice("twice-b")
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 2))
		w.sliceOf("twice", "twice-b", false, 8080, w.pod1())
		w.dropSlice("twice-a")
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
	})
	play("Endpoints that the controller mirrors", func(*testing.T) {
		svc := w.service("mirrored", func(s *corev1.Service) { s.Spec.Ports[0].TargetPort = intstr.FromString("named") })
		e := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "mirrored"}} //nolint:staticcheck // old, and in use
		e.Subsets = []corev1.EndpointSubset{                                                            //nolint:staticcheck // as above
			{Addresses: []corev1.EndpointAddress{{IP: w.hosts.Pods[0].IPv4.String()}}, Ports: []corev1.EndpointPort{{Name: "p", Port: 8080}}},
			{Addresses: []corev1.EndpointAddress{{IP: w.hosts.Pods[1].IPv4.String()}}, Ports: []corev1.EndpointPort{{Name: "p", Port: 9090}}},
		}
		w.admin.create(e)
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), "pod-1:8080 pod-2:9090")
	})
	play("a second program exits; after the end of the first a new one serves at once", func(t *testing.T) {
		if err := start().Wait(); err == nil || !strings.Contains(w.said("sluice"), "another sluice serves this node") {
			t.Errorf("a second one beside the first: %v", err)
		}
		w.expect(w.hosts.Outside, "tcp", address, fmtPods(3))
		_ = cmd.Process.Signal(os.Interrupt)
		check.OKf(t, cmd.Wait(), "the old one")
		w.t = t
		start()
		w.expect(w.hosts.Outside, "tcp", address, fmtPods(3))
		w.expect(w.hosts.Outside, "tcp", nodePort, fmtPods(3))
	})
	if n := strings.Count(w.said("sluice"), " ERR "); n > 0 {
		t.Errorf("%d errors in the log:\n%s", n, w.said("sluice"))
	}
}
