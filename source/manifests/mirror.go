package manifests

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	netutils "k8s.io/utils/net"
)

// The API deprecates Endpoints, but clusters still have them.
type (
	endpoints       = corev1.Endpoints       //nolint:staticcheck // see above
	endpointSubset  = corev1.EndpointSubset  //nolint:staticcheck // see above
	endpointAddress = corev1.EndpointAddress //nolint:staticcheck // see above
)

// mirrorManager is the value of the label endpointslice.kubernetes.io/managed-by
// that Kubernetes' own mirroring controller gives to its slices.
const mirrorManager = "endpointslicemirroring-controller.k8s.io"

// leaderAnnotation marks Endpoints that serve leader election only.
const leaderAnnotation = "control-plane.alpha.kubernetes.io/leader"

// mirror makes EndpointSlices of Endpoints the way Kubernetes' endpointslice
// mirroring controller does: one slice for each IP family and set of ports,
// into which the subsets with those ports are merged. At most 1,000 addresses
// of a subset are taken; left is how many were not. The slices' names depend on
// nothing but the Endpoints' name, the family and the ports, so that a change
// of addresses changes a slice and does not replace it.
//
// The controller skips services with a selector, because another controller makes
// their slices. Here they are mirrored too, unless the manifests have slices.
func mirror(e *endpoints) (mirrored []*discoveryv1.EndpointSlice, left int) {
	if e.Labels[discoveryv1.LabelSkipMirror] == "true" || e.DeletionTimestamp != nil {
		return nil, 0
	}
	if _, ok := e.Annotations[leaderAnnotation]; ok {
		return nil, 0
	}
	m := mirroring{endpoints: e, slices: make(map[string]*mirroredSlice)}
	for i := range e.Subsets {
		left += m.subset(&e.Subsets[i])
	}
	for _, name := range slices.Sorted(maps.Keys(m.slices)) {
		mirrored = append(mirrored, m.slices[name].slice)
	}
	return mirrored, left
}

type mirroring struct {
	endpoints *endpoints
	slices    map[string]*mirroredSlice // by name
}

type mirroredSlice struct {
	slice *discoveryv1.EndpointSlice
	seen  map[string]bool // addresses
}

// subset adds a subset's addresses and returns how many were too many.
func (m *mirroring) subset(s *endpointSubset) int {
	ports := mirrorPorts(s.Ports)
	taken := 0
	add := func(addresses []endpointAddress, ready bool) {
		for i := range addresses {
			if taken < maxEndpoints {
				m.address(&addresses[i], ready, ports)
				taken++
			}
		}
	}
	add(s.Addresses, true)
	add(s.NotReadyAddresses, false)
	return len(s.Addresses) + len(s.NotReadyAddresses) - taken
}

func (m *mirroring) address(a *endpointAddress, ready bool, ports []discoveryv1.EndpointPort) {
	ip := netutils.ParseIPSloppy(a.IP)
	if ip == nil {
		return // checked before
	}
	family := discoveryv1.AddressTypeIPv6
	if isIPv4(ip) {
		family = discoveryv1.AddressTypeIPv4
	}
	ms := m.slice(family, ports)
	text := ip.String()
	if ms.seen[text] {
		return
	}
	ms.seen[text] = true
	endpoint := discoveryv1.Endpoint{
		Addresses:  []string{text},
		Conditions: discoveryv1.EndpointConditions{Ready: new(ready)},
		TargetRef:  a.TargetRef,
		NodeName:   a.NodeName,
	}
	if a.Hostname != "" {
		endpoint.Hostname = new(a.Hostname)
	}
	ms.slice.Endpoints = append(ms.slice.Endpoints, endpoint)
}

// slice returns the slice of a family and a set of ports.
func (m *mirroring) slice(family discoveryv1.AddressType, ports []discoveryv1.EndpointPort) *mirroredSlice {
	name := mirrorName(m.endpoints.Name, family, ports)
	if ms, ok := m.slices[name]; ok {
		return ms
	}
	labels := maps.Clone(m.endpoints.Labels)
	if labels == nil {
		labels = make(map[string]string, 2)
	}
	labels[discoveryv1.LabelServiceName] = m.endpoints.Name
	labels[discoveryv1.LabelManagedBy] = mirrorManager
	annotations := maps.Clone(m.endpoints.Annotations)
	delete(annotations, corev1.EndpointsLastChangeTriggerTime)
	delete(annotations, corev1.LastAppliedConfigAnnotation)
	ms := &mirroredSlice{
		slice: &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name:              name,
				Namespace:         m.endpoints.Namespace,
				Labels:            labels,
				Annotations:       annotations,
				CreationTimestamp: m.endpoints.CreationTimestamp,
			},
			AddressType: family,
			Ports:       ports,
		},
		seen: make(map[string]bool),
	}
	m.slices[name] = ms
	return ms
}

// mirrorName returns "web-mirror-ipv4-1f2e3d4c".
func mirrorName(endpoints string, family discoveryv1.AddressType, ports []discoveryv1.EndpointPort) string {
	h := fnv.New32a()
	for i := range ports {
		fmt.Fprintf(h, "%s %d %s\n", *ports[i].Name, *ports[i].Port, *ports[i].Protocol)
	}
	return fmt.Sprintf("%s-mirror-%s-%08x", endpoints, strings.ToLower(string(family)), h.Sum32())
}

// mirrorPorts returns a slice's ports, sorted, as the order of a subset's ports has
// no meaning.
func mirrorPorts(ports []corev1.EndpointPort) []discoveryv1.EndpointPort {
	out := make([]discoveryv1.EndpointPort, len(ports))
	for i, p := range ports {
		out[i] = discoveryv1.EndpointPort{
			Name: new(p.Name), Port: new(p.Port), Protocol: new(p.Protocol), AppProtocol: p.AppProtocol,
		}
	}
	slices.SortFunc(out, func(a, b discoveryv1.EndpointPort) int {
		return cmp.Or(cmp.Compare(*a.Name, *b.Name), cmp.Compare(*a.Port, *b.Port), cmp.Compare(*a.Protocol, *b.Protocol))
	})
	return out
}
