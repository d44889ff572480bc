package kubernetes

import (
	"maps"
	"slices"
	"strings"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/service"
)

// An API object has some kilobytes of managed fields, selectors and conditions
// besides the few fields that the model reads. These functions empty the other
// fields in place: at the start, all objects of a large cluster are in memory at
// once, and copies would double that. A field that package service reads must be
// kept here (TestTrimKeepsWhatTheModelReads fails otherwise). Trimming twice is
// harmless.

const (
	proxyNameLabel     = "service.kubernetes.io/service-proxy-name"
	annotationPrefix   = "sluice.dev/"
	topologyAnnotation = annotationPrefix + "topology-keys"
)

func trimMeta(m *metav1.ObjectMeta, label, annotation func(key string) bool) {
	*m = metav1.ObjectMeta{
		Name:              m.Name,
		Namespace:         unique.Make(m.Namespace).Value(),
		UID:               m.UID,
		ResourceVersion:   m.ResourceVersion,
		CreationTimestamp: m.CreationTimestamp,
		DeletionTimestamp: m.DeletionTimestamp,
		Labels:            keep(m.Labels, label),
		Annotations:       keep(m.Annotations, annotation),
	}
}

func all(string) bool  { return true }
func none(string) bool { return false }

// keep deletes the entries of m whose key is not wanted; the result is nil if none
// is left.
func keep(m map[string]string, wanted func(key string) bool) map[string]string {
	maps.DeleteFunc(m, func(k, _ string) bool { return !wanted(k) })
	if len(m) == 0 {
		return nil
	}
	return m
}

func trimService(svc *corev1.Service) {
	svc.TypeMeta = metav1.TypeMeta{}
	trimMeta(&svc.ObjectMeta, func(k string) bool { return k == proxyNameLabel },
		func(k string) bool {
			return strings.HasPrefix(k, annotationPrefix) || slices.Contains(service.Foreign, k)
		})
	s := &svc.Spec
	*s = corev1.ServiceSpec{
		ClusterIP:                s.ClusterIP,
		ClusterIPs:               s.ClusterIPs,
		Type:                     s.Type,
		Ports:                    exact(s.Ports),
		ExternalIPs:              s.ExternalIPs,
		SessionAffinity:          s.SessionAffinity,
		SessionAffinityConfig:    s.SessionAffinityConfig,
		LoadBalancerSourceRanges: s.LoadBalancerSourceRanges,
		ExternalTrafficPolicy:    s.ExternalTrafficPolicy,
		HealthCheckNodePort:      s.HealthCheckNodePort,
		IPFamilies:               s.IPFamilies,
		InternalTrafficPolicy:    s.InternalTrafficPolicy,
		ExternalName:             s.ExternalName,
		PublishNotReadyAddresses: s.PublishNotReadyAddresses,
	}
	for i, p := range s.Ports {
		s.Ports[i] = corev1.ServicePort{Name: p.Name, Protocol: p.Protocol, Port: p.Port, NodePort: p.NodePort}
	}
	ingress := svc.Status.LoadBalancer.Ingress
	svc.Status = corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: ingress}}
	for i, in := range ingress {
		ingress[i] = corev1.LoadBalancerIngress{IP: in.IP, IPMode: in.IPMode}
	}
}

func trimSlice(s *discoveryv1.EndpointSlice) {
	s.TypeMeta = metav1.TypeMeta{}
	trimMeta(&s.ObjectMeta, func(k string) bool { return k == discoveryv1.LabelServiceName || k == corev1.IsHeadlessService },
		func(k string) bool {
			return k == corev1.EndpointsLastChangeTriggerTime || k == service.WeightAnnotation
		})
	for i, p := range s.Ports {
		s.Ports[i] = discoveryv1.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port}
	}
	s.Endpoints = exact(s.Endpoints)
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		*e = discoveryv1.Endpoint{
			Addresses: e.Addresses,
			Conditions: discoveryv1.EndpointConditions{
				Ready: truth(e.Conditions.Ready), Serving: truth(e.Conditions.Serving), Terminating: truth(e.Conditions.Terminating),
			},
			TargetRef: e.TargetRef,
			Hostname:  e.Hostname,
			NodeName:  shared(e.NodeName),
			Zone:      shared(e.Zone),
			Hints:     e.Hints,
		}
		if r := e.TargetRef; r != nil {
			*r = corev1.ObjectReference{Kind: unique.Make(r.Kind).Value(), Namespace: unique.Make(r.Namespace).Value(), Name: r.Name, UID: r.UID}
		}
	}
}

// exact returns a list without the spare capacity that decoding left.
func exact[T any](list []T) []T {
	if cap(list) == len(list) {
		return list
	}
	out := make([]T, len(list))
	copy(out, list)
	return out
}

var yes, no = true, false

// truth returns a shared pointer to an equal value; nil stays nil.
func truth(p *bool) *bool {
	switch {
	case p == nil:
		return nil
	case *p:
		return &yes
	}
	return &no
}

// shared keeps a name that many objects have in memory once.
func shared(name *string) *string {
	if name != nil {
		*name = unique.Make(*name).Value()
	}
	return name
}

func trimNode(n *corev1.Node) {
	n.TypeMeta = metav1.TypeMeta{}
	trimMeta(&n.ObjectMeta, all, none)
	n.Spec = corev1.NodeSpec{PodCIDR: n.Spec.PodCIDR, PodCIDRs: n.Spec.PodCIDRs, Taints: n.Spec.Taints}
	for i, t := range n.Spec.Taints {
		n.Spec.Taints[i] = corev1.Taint{Key: t.Key, Effect: t.Effect}
	}
	n.Status = corev1.NodeStatus{Addresses: n.Status.Addresses}
}

func trimServiceCIDR(c *networkingv1.ServiceCIDR) {
	c.TypeMeta = metav1.TypeMeta{}
	trimMeta(&c.ObjectMeta, none, none)
	c.Status = networkingv1.ServiceCIDRStatus{}
}

// trimMetadata is for the nodes whose labels count.
func trimMetadata(m *metav1.PartialObjectMetadata) {
	m.TypeMeta = metav1.TypeMeta{}
	trimMeta(&m.ObjectMeta, all, none)
}
