package manifests

import (
	"net"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
)

// defaultService sets the API server's defaults, except a cluster IP, which nothing
// here allocates.
//
// It ignores a file's creation time: its author could otherwise take an address
// from another Service by an early one.
func defaultService(s *corev1.Service) {
	s.CreationTimestamp = metav1.Time{}
	spec := &s.Spec
	if spec.Type == "" {
		spec.Type = corev1.ServiceTypeClusterIP
	}
	if spec.SessionAffinity == "" {
		spec.SessionAffinity = corev1.ServiceAffinityNone
	}
	if spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		if spec.SessionAffinityConfig == nil {
			spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{}
		}
		if spec.SessionAffinityConfig.ClientIP == nil {
			spec.SessionAffinityConfig.ClientIP = &corev1.ClientIPConfig{}
		}
		if spec.SessionAffinityConfig.ClientIP.TimeoutSeconds == nil {
			spec.SessionAffinityConfig.ClientIP.TimeoutSeconds = new(corev1.DefaultClientIPServiceAffinitySeconds)
		}
	}
	for i := range spec.Ports {
		p := &spec.Ports[i]
		if p.Protocol == "" {
			p.Protocol = corev1.ProtocolTCP
		}
		if p.TargetPort == intstr.FromInt32(0) || p.TargetPort == intstr.FromString("") {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	if len(spec.ClusterIPs) == 0 && spec.ClusterIP != "" {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
	if spec.ClusterIP == "" && len(spec.ClusterIPs) > 0 {
		spec.ClusterIP = spec.ClusterIPs[0]
	}
	if spec.InternalTrafficPolicy == nil && spec.Type != corev1.ServiceTypeExternalName {
		spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyCluster)
	}
	if spec.ExternalTrafficPolicy == "" && externallyAccessible(spec) {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	}
}

func externallyAccessible(spec *corev1.ServiceSpec) bool {
	return spec.Type == corev1.ServiceTypeLoadBalancer || spec.Type == corev1.ServiceTypeNodePort ||
		spec.Type == corev1.ServiceTypeClusterIP && len(spec.ExternalIPs) > 0
}

func (c *checker) service(s *corev1.Service) {
	spec := &s.Spec
	oneOf(c, at("spec.type"), spec.Type, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort,
		corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName)
	if spec.Type == corev1.ServiceTypeExternalName {
		if name := strings.TrimSuffix(spec.ExternalName, "."); len(validation.IsDNS1123Subdomain(name)) > 0 {
			c.errorf(at("spec.externalName"), "%s is not a name such as db.example.com", quotedText(spec.ExternalName))
		}
	}
	c.restrictions(s)
	c.annotations(s)
	c.servicePorts(spec)
	c.clusterIPs(spec)
	for i, a := range spec.ExternalIPs {
		c.optionalIP(at("spec.externalIPs[%d]", i), a)
	}
}

func (c *checker) servicePorts(spec *corev1.ServiceSpec) {
	if len(spec.Ports) == 0 && spec.ClusterIP != corev1.ClusterIPNone && spec.Type != corev1.ServiceTypeExternalName {
		c.errorf(at("spec.ports"), "is missing: a service needs at least one port")
	}
	if len(spec.Ports) > maxPorts {
		c.errorf(at("spec.ports"), "has %d ports: %d is the limit", len(spec.Ports), maxPorts)
		return
	}
	type number struct {
		port  int32
		proto corev1.Protocol
	}
	names, numbers, nodePorts := map[string]int{}, map[number]int{}, map[number]int{}
	for i := range spec.Ports {
		p := &spec.Ports[i]
		c.port(at("spec.ports[%d].port", i), p.Port)
		if p.Port == kubeletPort && spec.Type == corev1.ServiceTypeLoadBalancer {
			c.errorf(at("spec.ports[%d].port", i), "%d is the kubelet's port: a service of type LoadBalancer must not open it", p.Port)
		}
		c.protocol(at("spec.ports[%d].protocol", i), p.Protocol)
		c.portName(at("spec.ports[%d].name", i), p.Name, i, len(spec.Ports), names)
		n := number{p.Port, p.Protocol}
		if first, ok := numbers[n]; ok {
			c.errorf(at("spec.ports[%d]", i), "%d/%s is here already, as ports[%d]", p.Port, p.Protocol, first)
		} else {
			numbers[n] = i
		}
		if p.TargetPort != intstr.FromInt32(p.Port) {
			c.targetPort(i, p.TargetPort)
		}
		if p.NodePort == 0 {
			continue
		}
		c.port(at("spec.ports[%d].nodePort", i), p.NodePort)
		if spec.Type == corev1.ServiceTypeClusterIP || spec.Type == corev1.ServiceTypeExternalName {
			c.errorf(at("spec.ports[%d].nodePort", i), "a service of type %s has no node ports: leave it out, or write type: NodePort", spec.Type)
		}
		n = number{p.NodePort, p.Protocol}
		if first, ok := nodePorts[n]; ok {
			c.errorf(at("spec.ports[%d].nodePort", i), "%d/%s is the node port of ports[%d] already", p.NodePort, p.Protocol, first)
		} else {
			nodePorts[n] = i
		}
	}
}

func (c *checker) targetPort(i int, t intstr.IntOrString) {
	p := at("spec.ports[%d].targetPort", i)
	if t.Type == intstr.Int {
		c.port(p, t.IntVal)
	} else if len(validation.IsValidPortName(t.StrVal)) > 0 {
		c.errorf(p, `%s is not a port's name: use lower-case letters, digits and "-", at least one letter, at most 15 characters`, quotedText(t.StrVal))
	}
}

// portName checks the name of one of count ports: with more than one, each must
// have a name of its own.
func (c *checker) portName(p place, name string, i, count int, names map[string]int) {
	switch {
	case name != "":
		c.label(p, name)
	case count > 1:
		c.errorf(p, "is missing: where there is more than one port each needs a name")
		return
	}
	if first, ok := names[name]; ok {
		c.errorf(p, "%s is the name of ports[%d] already", quotedText(name), first)
		return
	}
	names[name] = i
}

func (c *checker) clusterIPs(spec *corev1.ServiceSpec) {
	ips := spec.ClusterIPs
	switch {
	case spec.Type == corev1.ServiceTypeExternalName:
		return // no proxy's affair (A1.4)
	case len(ips) == 0:
		if !c.d.allocates {
			c.warnf(at("spec.clusterIP"), "is missing: nothing hands out addresses here, so the service is not served until it has one; --allocate-cluster-ips 10.96.0.0/16 hands them out")
		}
		return
	case spec.ClusterIP != ips[0]:
		c.errorf(at("spec.clusterIPs[0]"), "%s is not the clusterIP %s", quotedText(ips[0]), quotedText(spec.ClusterIP))
		return
	case spec.ClusterIP == corev1.ClusterIPNone:
		if spec.Type != corev1.ServiceTypeClusterIP {
			c.errorf(at("spec.clusterIP"), "is None: a service of type %s needs an address", spec.Type)
		}
		return
	case len(ips) > 2:
		c.errorf(at("spec.clusterIPs"), "has %d addresses: give one, or one of each IP family", len(ips))
		return
	}
	var parsed []net.IP
	for i, a := range ips {
		p := at("spec.clusterIPs[%d]", i)
		if i == 0 && c.line("spec.clusterIP") != c.line("spec") {
			p = at("spec.clusterIP")
		}
		ip := c.ip(p, a)
		if ip == nil {
			return
		}
		parsed = append(parsed, ip)
	}
	if len(parsed) == 2 && isIPv4(parsed[0]) == isIPv4(parsed[1]) {
		c.errorf(at("spec.clusterIPs"), "both addresses are of the same IP family: give one of each")
		return
	}
	if p := spec.IPFamilyPolicy; p != nil {
		oneOf(c, at("spec.ipFamilyPolicy"), *p, corev1.IPFamilyPolicySingleStack, corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicyRequireDualStack)
		if *p == corev1.IPFamilyPolicySingleStack && len(ips) > 1 {
			c.errorf(at("spec.clusterIPs"), "has %d addresses: one is the limit of ipFamilyPolicy SingleStack", len(ips))
		}
	}
	if f := spec.IPFamilies; len(f) > 2 || len(f) == 2 && f[0] == f[1] {
		c.errorf(at("spec.ipFamilies"), "names a family twice")
		return
	}
	for i, f := range spec.IPFamilies {
		if !oneOf(c, at("spec.ipFamilies[%d]", i), f, corev1.IPv4Protocol, corev1.IPv6Protocol) {
			return
		}
		if i < len(parsed) && isIPv4(parsed[i]) != (f == corev1.IPv4Protocol) {
			c.errorf(at("spec.ipFamilies[%d]", i), "is %s, but clusterIPs[%d] is %s", f, i, ips[i])
		}
	}
}

func isIPv4(ip net.IP) bool { return ip.To4() != nil }
