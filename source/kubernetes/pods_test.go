package kubernetes

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/wait"
)

func pod(node, name string, ips ...string) *corev1.Pod {
	p := &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: map[string]string{"app": name}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, ip := range ips {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	return p
}

// expectPods waits until addresses have the names of pods.
func (f *follower) expectPods(want string, addresses ...string) {
	f.t.Helper()
	wait.For(f.t, "the pods' names", patience, func() error {
		var got []string
		for _, a := range addresses {
			got = append(got, f.source.PodAt(netip.MustParseAddr(a)).Name)
		}
		if text := strings.Join(got, " "); text != want {
			return fmt.Errorf("%q, want %q", text, want)
		}
		return nil
	})
}

// TestPodsOfThisNode: pods have their names by each of their own addresses, as long as they have them.
func TestPodsOfThisNode(t *testing.T) {
	api := newFakeAPI(t)
	host := pod("a", "host", "192.0.2.1")
	host.Spec.HostNetwork = true
	ended := pod("a", "ended", "10.1.0.9")
	ended.Status.Phase = corev1.PodFailed
	for _, p := range []*corev1.Pod{pod("a", "cart", "10.1.0.4", "fd00::4"), pod("b", "elsewhere", "10.2.0.4"), pod("a", "young"), pod("a", "wrong", "10.1.0.300"), host, ended} {
		api.put("pods", p)
	}
	f := follow(t, api, Options{NodeName: "a", Pods: true}, nil)
	f.expectPods("cart cart   ", "10.1.0.4", "fd00::4", "10.2.0.4", "192.0.2.1", "10.1.0.9")
	check.Equal(t, f.source.PodAt(netip.MustParseAddr("fd00::4")), service.Name{Namespace: "shop", Name: "cart"})
	check.Equal(t, fmt.Sprint(f.source.Pods()), "[shop/cart]")
	api.put("pods", pod("a", "cart", "10.1.0.5")) // a StatefulSet's, made anew
	f.expectPods(" cart", "10.1.0.4", "10.1.0.5")
	api.put("pods", pod("a", "next", "10.1.0.5")) // before cart is gone
	f.expectPods("next", "10.1.0.5")
	api.remove("pods", pod("a", "cart"), false)
	api.put("pods", pod("a", "young", "10.1.0.6"))
	f.expectPods("next young", "10.1.0.5", "10.1.0.6")
	done := pod("a", "next", "10.1.0.5")
	done.Status.Phase = corev1.PodSucceeded
	api.put("pods", done)
	f.expectPods("", "10.1.0.5")
	api.remove("pods", pod("a", "young"), true)
	api.expire()
	api.breakOff()
	f.expectPods("", "10.1.0.6")
	for _, q := range api.queries("pods") {
		check.Equal(t, query(t, q, "fieldSelector"), "spec.nodeName=a")
	}
	if f.source.pods.mu.Lock(); len(f.source.pods.of) != 0 || len(f.source.pods.names) != 0 {
		t.Errorf("kept: %v, %v", f.source.pods.of, f.source.pods.names)
	}
	f.source.pods.mu.Unlock()
}

// Without the right to pods, the log says so once, clients have no names, and nothing else is different.
func TestPodsMayBeForbidden(t *testing.T) {
	api := newFakeAPI(t)
	api.put("services", svc("web", "10.96.0.1"))
	api.put("pods", pod("a", "cart", "10.1.0.4"))
	api.setForbidden("pods", true)
	f := follow(t, api, Options{NodeName: "a", Pods: true}, nil)
	f.expect("default/web=")
	wait.True(t, "several attempts", func() bool { return len(api.queries("pods")) > 2 })
	check.Equal(t, strings.Count(f.log.String(), "the API server does not show us the pods of this node"), 1)
	if !f.source.Stats().Connected {
		t.Error("the API server passes for lost")
	}
	f.expectPods("", "10.1.0.4")
	api.setForbidden("pods", false)
	f.expectPods("cart", "10.1.0.4")
}

// Nobody asks for pods unless their names are wanted.
func TestPodsAreNotAskedFor(t *testing.T) {
	api := newFakeAPI(t)
	f := follow(t, api, Options{NodeName: "a"}, nil)
	f.expect("")
	check.Equal(t, len(api.queries("pods")), 0)
	f.expectPods("", "10.1.0.4")
}

// What is kept is bounded.
func TestMostPods(t *testing.T) {
	p := &pods{names: make(map[netip.Addr]service.Name), of: make(map[service.Name][]netip.Addr)}
	for i := range mostPods + 10 {
		p.set(service.Name{Name: fmt.Sprint(i)}, pod("a", "", netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}).String()))
	}
	check.Equal(t, len(p.names), mostPods)
	check.Equal(t, len(p.of), mostPods)
}
