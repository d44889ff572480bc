package kubernetes

import (
	"maps"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/sluice-proxy/sluice/service"
)

const (
	podsKind = "pods of this node"
	// mostPods bounds the pods that are kept. Nodes have some hundred.
	mostPods = 1 << 14
)

// pods knows the pods of this node by their addresses. Safe for concurrent use.
type pods struct {
	mu    sync.RWMutex
	names map[netip.Addr]service.Name
	of    map[service.Name][]netip.Addr
}

// addPods watches the pods of this node. Nothing waits for them.
func (s *Source) addPods() {
	s.pods.names, s.pods.of = make(map[netip.Addr]service.Name), make(map[service.Name][]netip.Addr)
	w := &watcher{kind: podsKind, optional: true, object: &corev1.Pod{}, from: resource(s.client.core, "pods"), settled: make(chan struct{})}
	w.selector.fields = fields.OneTermEqualSelector("spec.nodeName", s.options.NodeName).String()
	w.into = newBox(trimmed(trimPod), s.pods.set, s.listed(w))
	s.add(w)
}

// PodAt returns the name of this node's pod that has an address; the zero Name if there is none, or
// without Options.Pods. Safe for concurrent use.
func (s *Source) PodAt(a netip.Addr) service.Name {
	s.pods.mu.RLock()
	defer s.pods.mu.RUnlock()
	return s.pods.names[a]
}

// Pods returns the names of the pods that PodAt knows. Safe for concurrent use.
func (s *Source) Pods() []service.Name {
	s.pods.mu.RLock()
	defer s.pods.mu.RUnlock()
	return slices.Collect(maps.Keys(s.pods.of))
}

// set keeps the addresses that a pod has now; none if it is nil. Of two pods with an address, the one
// that came last has it: addresses of pods that end are given to others.
func (p *pods) set(name service.Name, pod *corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.of[name] {
		if p.names[a] == name {
			delete(p.names, a)
		}
	}
	delete(p.of, name)
	if pod == nil || len(p.of) >= mostPods {
		return
	}
	for _, ip := range pod.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			p.names[a.Unmap()] = name
			p.of[name] = append(p.of[name], a.Unmap())
		}
	}
}

// trimPod leaves a pod its name and its own addresses. A pod that has ended has none, nor has one with
// its node's network.
func trimPod(p *corev1.Pod) {
	ips := p.Status.PodIPs
	if p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		ips = nil
	}
	p.TypeMeta = metav1.TypeMeta{}
	trimMeta(&p.ObjectMeta, none, none)
	p.Spec, p.Status = corev1.PodSpec{}, corev1.PodStatus{PodIPs: ips[:min(len(ips), 2)]} // one of each family
}
