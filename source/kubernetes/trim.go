package kubernetes

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// An object of the API is some kilobytes of managed fields, selectors and
// conditions around the few fields that the model reads. What follows keeps
// those only: whoever reads more of an object in package service adds it here
// (TestTrimKeepsWhatTheModelReads tells when that is forgotten).

const (
	proxyNameLabel     = "service.kubernetes.io/service-proxy-name"
	annotationPrefix   = "sluice.dev/"
	topologyAnnotation = annotationPrefix + "topology-keys"
)

func trimMeta(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name:              m.Name,
		Namespace:         m.Namespace,
		UID:               m.UID,
		ResourceVersion:   m.ResourceVersion,
		CreationTimestamp: m.CreationTimestamp,
		DeletionTimestamp: m.DeletionTimestamp,
	}
}

// keep gives the entries of m whose key is wanted; nil if there are none.
func keep(m map[string]string, wanted func(key string) bool) map[string]string {
	var out map[string]string
	for k, v := range m {
		if wanted(k) {
			if out == nil {
				out = make(map[string]string)
			}
			out[k] = v
		}
	}
	return out
}

func trimService(in *corev1.Service) *corev1.Service {
	out := &corev1.Service{ObjectMeta: trimMeta(&in.ObjectMeta)}
	out.Labels = keep(in.Labels, func(k string) bool { return k == proxyNameLabel })
	out.Annotations = keep(in.Annotations, func(k string) bool { return strings.HasPrefix(k, annotationPrefix) })
	s := &in.Spec
	out.Spec = corev1.ServiceSpec{
		ClusterIP:                s.ClusterIP,
		ClusterIPs:               s.ClusterIPs,
		Type:                     s.Type,
		ExternalIPs:              s.ExternalIPs,
		SessionAffinity:          s.SessionAffinity,
		SessionAffinityConfig:    s.SessionAffinityConfig,
		LoadBalancerSourceRanges: s.LoadBalancerSourceRanges,
		ExternalTrafficPolicy:    s.ExternalTrafficPolicy,
		HealthCheckNodePort:      s.HealthCheckNodePort,
		IPFamilies:               s.IPFamilies,
		InternalTrafficPolicy:    s.InternalTrafficPolicy,
	}
	out.Spec.Ports = make([]corev1.ServicePort, len(s.Ports))
	for i, p := range s.Ports {
		out.Spec.Ports[i] = corev1.ServicePort{Name: p.Name, Protocol: p.Protocol, Port: p.Port, NodePort: p.NodePort}
	}
	for _, ingress := range in.Status.LoadBalancer.Ingress {
		out.Status.LoadBalancer.Ingress = append(out.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: ingress.IP, IPMode: ingress.IPMode})
	}
	return out
}

func trimSlice(in *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	out := &discoveryv1.EndpointSlice{ObjectMeta: trimMeta(&in.ObjectMeta), AddressType: in.AddressType}
	out.Labels = keep(in.Labels, func(k string) bool {
		return k == discoveryv1.LabelServiceName || k == corev1.IsHeadlessService
	})
	out.Annotations = keep(in.Annotations, func(k string) bool { return k == corev1.EndpointsLastChangeTriggerTime })
	out.Ports = make([]discoveryv1.EndpointPort, len(in.Ports))
	for i, p := range in.Ports {
		out.Ports[i] = discoveryv1.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port}
	}
	out.Endpoints = make([]discoveryv1.Endpoint, len(in.Endpoints))
	for i := range in.Endpoints {
		e := &in.Endpoints[i]
		out.Endpoints[i] = discoveryv1.Endpoint{
			Addresses:  e.Addresses,
			Conditions: e.Conditions,
			NodeName:   e.NodeName,
			Zone:       e.Zone,
			Hints:      e.Hints,
		}
		if r := e.TargetRef; r != nil {
			out.Endpoints[i].TargetRef = &corev1.ObjectReference{Kind: r.Kind, Namespace: r.Namespace, Name: r.Name, UID: r.UID}
		}
	}
	return out
}

func trimNode(in *corev1.Node) *corev1.Node {
	out := &corev1.Node{ObjectMeta: trimMeta(&in.ObjectMeta)}
	out.Labels = in.Labels
	out.Spec.PodCIDR, out.Spec.PodCIDRs = in.Spec.PodCIDR, in.Spec.PodCIDRs
	for _, t := range in.Spec.Taints {
		out.Spec.Taints = append(out.Spec.Taints, corev1.Taint{Key: t.Key, Effect: t.Effect})
	}
	out.Status.Addresses = in.Status.Addresses
	return out
}

func trimServiceCIDR(in *networkingv1.ServiceCIDR) *networkingv1.ServiceCIDR {
	out := &networkingv1.ServiceCIDR{ObjectMeta: trimMeta(&in.ObjectMeta)}
	out.Spec.CIDRs = in.Spec.CIDRs
	return out
}
