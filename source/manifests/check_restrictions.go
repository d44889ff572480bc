package manifests

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/internal/nearest"
	"github.com/sluice-proxy/sluice/service"
)

const (
	maxAffinitySeconds = 86400 // the API server's limit (A5.2)
	kubeletPort        = 10250
)

// restrictions checks what keeps clients out or binds them to endpoints. As with the API
// server, an invalid restriction makes the object invalid: nobody may get in because
// what was to keep them out could not be read.
func (c *checker) restrictions(s *corev1.Service) {
	spec := &s.Spec
	c.affinity(spec)
	if p := spec.InternalTrafficPolicy; p != nil {
		oneOf(c, at("spec.internalTrafficPolicy"), *p, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)
	}
	if p := spec.ExternalTrafficPolicy; p != "" {
		known := oneOf(c, at("spec.externalTrafficPolicy"), p, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
		if known && (spec.Type == corev1.ServiceTypeClusterIP || spec.Type == corev1.ServiceTypeExternalName) && !externallyAccessible(spec) {
			c.errorf(at("spec.externalTrafficPolicy"), "is for services with addresses outside of the cluster: leave it out, write type: NodePort or LoadBalancer, or give externalIPs; internalTrafficPolicy is for clients in the cluster")
		}
	}
	if p := spec.TrafficDistribution; p != nil {
		oneOf(c, at("spec.trafficDistribution"), *p,
			corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone, corev1.ServiceTrafficDistributionPreferSameNode)
	}
	if n := spec.HealthCheckNodePort; n != 0 {
		c.port(at("spec.healthCheckNodePort"), n)
		if spec.Type != corev1.ServiceTypeLoadBalancer || spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
			c.errorf(at("spec.healthCheckNodePort"), "is for services of type LoadBalancer with externalTrafficPolicy: Local")
		}
	}
	c.sourceRanges(s)
	c.loadBalancerOnly(at("spec.loadBalancerClass"), spec, spec.LoadBalancerClass != nil)
	c.loadBalancerOnly(at("spec.allocateLoadBalancerNodePorts"), spec, spec.AllocateLoadBalancerNodePorts != nil)
}

func (c *checker) affinity(spec *corev1.ServiceSpec) {
	oneOf(c, at("spec.sessionAffinity"), spec.SessionAffinity, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
	cfg := spec.SessionAffinityConfig
	if cfg == nil {
		return
	}
	if spec.SessionAffinity == corev1.ServiceAffinityNone {
		c.errorf(at("spec.sessionAffinityConfig"), "is for sessionAffinity: ClientIP only")
	}
	if cfg.ClientIP != nil && cfg.ClientIP.TimeoutSeconds != nil {
		if t := *cfg.ClientIP.TimeoutSeconds; t < 1 || t > maxAffinitySeconds {
			c.errorf(at("spec.sessionAffinityConfig.clientIP.timeoutSeconds"), "%d is not in 1..%d", t, maxAffinitySeconds)
		}
	}
}

// sourceRanges checks the ranges of clients (A3.10), and those of the annotation that
// cloud providers read. The annotation has no effect here, as with kube-proxy.
func (c *checker) sourceRanges(s *corev1.Service) {
	spec := &s.Spec
	c.loadBalancerOnly(at("spec.loadBalancerSourceRanges"), spec, len(spec.LoadBalancerSourceRanges) > 0)
	for i, r := range spec.LoadBalancerSourceRanges {
		c.cidr(at("spec.loadBalancerSourceRanges[%d]", i), r)
	}
	list, ok := s.Annotations[corev1.AnnotationLoadBalancerSourceRangesKey]
	if !ok || len(spec.LoadBalancerSourceRanges) > 0 {
		return
	}
	p := at("metadata.annotations[%s]", corev1.AnnotationLoadBalancerSourceRangesKey)
	c.loadBalancerOnly(p, spec, true)
	if list = strings.TrimSpace(list); list == "" {
		return
	}
	for r := range strings.SplitSeq(list, ",") {
		c.cidr(p, r)
	}
	c.warnf(p, "has no effect here: write spec.loadBalancerSourceRanges")
}

// loadBalancerOnly refuses a field that is set and is for services of type LoadBalancer.
func (c *checker) loadBalancerOnly(p place, spec *corev1.ServiceSpec, set bool) {
	if set && spec.Type != corev1.ServiceTypeLoadBalancer {
		c.errorf(p, "is for services of type LoadBalancer only")
	}
}

// annotations checks those that are ours.
func (c *checker) annotations(s *corev1.Service) {
	const prefix = "sluice.dev/"
	all := s.Annotations
	local := s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	for _, key := range slices.Sorted(maps.Keys(all)) {
		name, ours := strings.CutPrefix(key, prefix)
		if !ours {
			continue
		}
		p := at("metadata.annotations[%s]", key)
		if name == endpointsAnnotation {
			if _, err := askedOf(s, all[key]); err != nil {
				c.errorf(p, "%v", err)
			}
			continue
		}
		if !slices.Contains(service.Annotations, name) {
			known := append(slices.Clone(service.Annotations), endpointsAnnotation)
			hint := ": there are " + prefix + strings.Join(known, ", "+prefix)
			if near := nearest.Name(name, len(name)/3+2, slices.Values(known)); near != "" {
				hint = fmt.Sprintf("; did you mean %s%s?", prefix, near)
			}
			c.errorf(p, "is not known%s", hint)
			continue
		}
		err := service.CheckAnnotation(name, all[key], local)
		if c.d.annotation != nil {
			err = cmp.Or(err, c.d.annotation(name, all[key]))
		}
		if err != nil {
			c.errorf(p, "%v", err)
		}
	}
}
