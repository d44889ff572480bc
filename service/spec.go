package service

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Annotations are the names of a Service's annotations that have an effect, without
// the prefix "sluice.dev/".
var Annotations = []string{acceptProxyProtocol, accessLog, "balancer", "balancer-hash", "datapath", "dial-timeouts", drain, "eject-after",
	halfClosedTimeout, hold, idleTimeout, maxConnections, maxPerEndpoint, proxyProtocol, queueTimeout, rebalance, "sctp-streams",
	slowStart, topologyKeys, "udp-responses", "udp-timeout"}

// Foreign are annotations of other proxies that have an effect, with their whole names.
var Foreign = []string{"kube-router.io/service.scheduler", "service.cilium.io/lb-algorithm"}

// AccessLogValues are the values of the annotation access-log: which connections of
// the Service leave a record.
var AccessLogValues = []string{"all", "failed", "off"}

const (
	accessLog        = "access-log"
	proxyNameLabel   = "service.kubernetes.io/service-proxy-name"
	annotationPrefix = "sluice.dev/"

	// topologyKeys is the annotation that holds topology keys. anyTopology is the
	// key that every endpoint matches.
	topologyKeys = "topology-keys"
	anyTopology  = "*"

	defaultAffinity = 3 * time.Hour // A5.2
	maximumAffinity = 24 * time.Hour
)

// spec is a parsed Service. A Service of another proxy, or one that proxies ignore,
// has no ports.
type spec struct {
	created             int64 // Unix seconds; 0 for an object that does not come from an API server
	kind                Type
	internalLocal       bool
	externalLocal       bool
	affinityTimeout     time.Duration
	idleTimeout         time.Duration
	halfClosedTimeout   time.Duration
	hold                time.Duration
	drain               time.Duration
	rebalance           time.Duration
	slowStart           time.Duration
	limits              Limits
	sendProxy           uint8
	acceptProxy         []netip.Prefix
	healthCheckNodePort uint16
	topologyKeys        []string
	annotations         map[string]string
	ports               []portSpec
	other               *otherSpec // not nil if another proxy serves it
	families            [2]familySpec
	problems            []string
}

type portSpec struct {
	name     string
	protocol Protocol
	port     uint16
	nodePort uint16
}

// familySpec is the part of a spec for one address family. It is empty if clusterIP
// is invalid (A1.5).
type familySpec struct {
	clusterIP       netip.Addr
	externalIPs     []netip.Addr
	loadBalancerIPs []netip.Addr
	sourceRanges    []netip.Prefix
}

func (s *spec) problemf(format string, args ...any) {
	s.problems = append(s.problems, fmt.Sprintf(format, args...))
}

// parseService parses a Service by the rules of intake. Without a ServiceProxyName,
// Services with the label belong to another proxy.
func parseService(svc *corev1.Service, o *StoreOptions) *spec {
	proxyName := o.ServiceProxyName
	s := &spec{}
	if t := svc.CreationTimestamp.Time; !t.IsZero() {
		s.created = t.Unix()
	}
	value, labelled := svc.Labels[proxyNameLabel]
	if labelled != (proxyName != "") || value != proxyName {
		if !hasNoClusterIP(svc) {
			s.other = parseOther(svc, value, labelled) // A1.1, A1.2
		}
		return s
	}
	if hasNoClusterIP(svc) {
		return s // A1.4
	}
	if svc.Spec.ClusterIP == "" {
		s.problemf("has no clusterIP: not served (A1.4)")
		return s
	}
	s.parseClusterIPs(svc)
	if !s.families[IPv4].clusterIP.IsValid() && !s.families[IPv6].clusterIP.IsValid() {
		return s
	}
	s.parsePorts(svc)
	s.parsePolicy(svc)
	s.parseAnnotations(svc, o.Annotation)
	s.parseExternal(svc, &o.ExternalIPs)
	return s
}

// hasNoClusterIP reports whether the Service's type has no cluster IP, so that
// proxies ignore it.
func hasNoClusterIP(svc *corev1.Service) bool {
	return svc.Spec.Type == corev1.ServiceTypeExternalName || svc.Spec.ClusterIP == corev1.ClusterIPNone
}

// parseClusterIPs finds the cluster IP of each family (A1.5). Missing fields get
// the API server's defaults: without ipFamilies, each address determines its
// family; without clusterIPs, clusterIP is the only address.
func (s *spec) parseClusterIPs(svc *corev1.Service) {
	texts := svc.Spec.ClusterIPs
	if len(texts) == 0 {
		texts = []string{svc.Spec.ClusterIP}
	}
	for i, text := range texts {
		a, ok := s.parseAddress("clusterIP", text)
		if !ok {
			continue
		}
		f := FamilyOf(a)
		if families := svc.Spec.IPFamilies; len(families) > 0 {
			if i >= len(families) {
				continue
			}
			if familyName(f) != families[i] {
				s.problemf("clusterIP %s is not of the family %s that ipFamilies names: left out (A1.5)", a, families[i])
				continue
			}
		}
		if !s.families[f].clusterIP.IsValid() {
			s.families[f].clusterIP = a
		}
	}
}

// parseAddress parses an address that clients connect to. It adds a problem if that
// cannot be used (A1.7).
func (s *spec) parseAddress(what, text string) (netip.Addr, bool) {
	a, ok := parseAddr(text)
	if !ok {
		s.problemf("%s %q is not an IP address: left out (A1.7)", what, text)
		return a, false
	}
	if err := CheckAddress(a); err != nil {
		s.problemf("%s %s cannot be used, %v: left out (A1.7)", what, a, err)
		return a, false
	}
	return a, true
}

func familyName(f Family) corev1.IPFamily {
	if f == IPv4 {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

func (s *spec) parsePorts(svc *corev1.Service) {
	s.ports = make([]portSpec, 0, len(svc.Spec.Ports))
	for _, p := range svc.Spec.Ports {
		proto, ok := parseProtocol(p.Protocol)
		switch {
		case !ok:
			s.problemf("port %q has the unknown protocol %q: left out", p.Name, p.Protocol)
			continue
		case p.Port < 1 || p.Port > 65535:
			s.problemf("port %q has the number %d, which is not of 1 to 65535: left out", p.Name, p.Port)
			continue
		case s.hasPort(p.Name, proto):
			s.problemf("port %q with protocol %s is there twice: the second is left out (A1.6)", p.Name, proto)
			continue
		}
		ps := portSpec{name: p.Name, protocol: proto, port: uint16(p.Port)}
		if p.NodePort < 0 || p.NodePort > 65535 {
			s.problemf("port %q has the nodePort %d, which is not of 1 to 65535: left out", p.Name, p.NodePort)
		} else {
			ps.nodePort = uint16(p.NodePort)
		}
		s.ports = append(s.ports, ps)
	}
}

func (s *spec) hasPort(name string, proto Protocol) bool {
	return slices.ContainsFunc(s.ports, func(p portSpec) bool { return p.name == name && p.protocol == proto })
}

// parseProtocol parses a protocol. The empty string means TCP.
func parseProtocol(p corev1.Protocol) (Protocol, bool) {
	switch p {
	case "", corev1.ProtocolTCP:
		return TCP, true
	case corev1.ProtocolUDP:
		return UDP, true
	case corev1.ProtocolSCTP:
		return SCTP, true
	}
	return 0, false
}

func (s *spec) parsePolicy(svc *corev1.Service) {
	switch svc.Spec.Type {
	case corev1.ServiceTypeNodePort:
		s.kind = TypeNodePort
	case corev1.ServiceTypeLoadBalancer:
		s.kind = TypeLoadBalancer
	}
	// A2.2
	if p := svc.Spec.InternalTrafficPolicy; p != nil {
		s.internalLocal = *p == corev1.ServiceInternalTrafficPolicyLocal
	}
	s.externalLocal = svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal &&
		(s.kind != TypeClusterIP || len(svc.Spec.ExternalIPs) > 0)

	if s.kind == TypeLoadBalancer && s.externalLocal { // A6.1
		if p := svc.Spec.HealthCheckNodePort; p > 0 && p <= 65535 {
			s.healthCheckNodePort = uint16(p)
		} else {
			s.problemf("has no usable healthCheckNodePort (%d): no health check server (A6.1)", p)
		}
	}
	if svc.Spec.SessionAffinity == corev1.ServiceAffinityClientIP { // A5.2
		s.affinityTimeout = defaultAffinity
		if c := svc.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
			t := time.Duration(*c.ClientIP.TimeoutSeconds) * time.Second
			if t <= 0 || t > maximumAffinity {
				s.problemf("sessionAffinity timeoutSeconds %d is not of 1 to 86400: %s is used (A5.2)",
					*c.ClientIP.TimeoutSeconds, defaultAffinity)
				t = defaultAffinity
			}
			s.affinityTimeout = t
		}
	}
}

// parseAnnotations parses the annotations that this package reads, and keeps those of others that
// check finds nothing wrong with.
func (s *spec) parseAnnotations(svc *corev1.Service, check func(name, value string) error) {
	for k, v := range svc.Annotations {
		if name, ok := strings.CutPrefix(k, annotationPrefix); ok || slices.Contains(Foreign, k) {
			if s.annotations == nil {
				s.annotations = make(map[string]string)
			}
			s.annotations[name] = v
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.annotations)) {
		key := annotationPrefix + name
		if slices.Contains(Foreign, name) {
			key = name
		}
		if key != name && !slices.Contains(Annotations, name) {
			s.problemf("annotation %s is not known: it has no effect (those that have: %s)", key, strings.Join(Annotations, ", "))
		} else if check != nil {
			if err := check(name, s.annotations[name]); err != nil {
				s.problemf("annotation %s: %s; it counts as missing", key, strings.TrimLeft(strings.TrimPrefix(err.Error(), name), ": "))
				delete(s.annotations, name)
			}
		}
	}
	if v, ok := s.annotations[accessLog]; ok && !slices.Contains(AccessLogValues, v) {
		s.problemf("annotation %s%s: %q is not one of %s; all records are written", annotationPrefix, accessLog, v, strings.Join(AccessLogValues, ", "))
	}
	s.idleTimeout, s.halfClosedTimeout = s.timeout(idleTimeout), s.timeout(halfClosedTimeout)
	s.parseProxyProtocol()
	s.hold, s.drain, s.rebalance = s.duration(hold), s.duration(drain), s.duration(rebalance)
	if s.rebalance > 0 && s.affinityTimeout > 0 {
		s.rebalance = 0
		s.problemf("annotation %s%s: clients with session affinity come back to the same endpoint; no connection is closed", annotationPrefix, rebalance)
	}
	s.slowStart = s.duration(slowStart)
	s.parseLimits()
	s.parseTopologyKeys()
}

// TopologyKeys returns the topology keys that a Service's annotations name.
func TopologyKeys(annotations map[string]string) []string {
	return splitKeys(annotations[annotationPrefix+topologyKeys])
}

// parseTopologyKeys parses the list of node label keys. It keeps a key that no node can
// have, because dropping it would allow more endpoints.
func (s *spec) parseTopologyKeys() {
	text := s.annotations[topologyKeys]
	if err := CheckAnnotation(topologyKeys, text, s.externalLocal); err != nil {
		s.problemf("annotation %s%s: %v", annotationPrefix, topologyKeys, err)
	}
	if !s.externalLocal { // the policy goes first
		s.topologyKeys = splitKeys(text)
	}
}

// splitKeys splits topology keys, which commas or blanks separate.
func splitKeys(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' || r == '\t' || r == '\n' })
}

// CheckAnnotation returns what is wrong with an annotation of a Service that this
// package reads, whose name is without the prefix "sluice.dev/", or nil. local is
// externalTrafficPolicy Local.
func CheckAnnotation(name, text string, local bool) error {
	switch name {
	case topologyKeys:
	case idleTimeout, halfClosedTimeout:
		_, err := parseTimeout(name, text)
		return err
	case hold, drain, queueTimeout, rebalance, slowStart:
		_, err := durations[name].parse(name, text)
		return err
	case maxConnections, maxPerEndpoint:
		_, err := parseLimit(name, text)
		return err
	case proxyProtocol:
		_, err := parseProxyVersion(text)
		return err
	case acceptProxyProtocol:
		_, err := parseProxies(text)
		return err
	default:
		return nil
	}
	keys := splitKeys(text)
	if len(keys) > 0 && local {
		return errors.New("topology keys and externalTrafficPolicy Local exclude each other: the policy is used")
	}
	for i, k := range keys {
		if k == anyTopology {
			if i < len(keys)-1 {
				return fmt.Errorf("it has keys after %q: they are never used", anyTopology)
			}
		} else if wrong := validation.IsQualifiedName(k); len(wrong) > 0 {
			return fmt.Errorf("no node label can have the key %q: it matches nothing", k)
		}
	}
	return nil
}

// nobody are the source ranges of a family whose ranges cannot be read: no client has
// the unspecified address.
var nobody = [2][]netip.Prefix{
	IPv4: {netip.PrefixFrom(netip.IPv4Unspecified(), 32)},
	IPv6: {netip.PrefixFrom(netip.IPv6Unspecified(), 128)},
}

// parseExternal parses external IPs, load balancer IPs and source ranges. It leaves
// out invalid addresses (A1.7) and those of a family without a cluster IP (A1.5). A
// source range that cannot be read lets nobody in, and opens no family: who writes one
// means to keep others out.
func (s *spec) parseExternal(svc *corev1.Service, allowed *ExternalIPs) {
	for _, text := range svc.Spec.ExternalIPs {
		a, ok := s.parseAddress("externalIP", text)
		if !ok {
			continue
		}
		if !allowed.allow(a) {
			s.problemf("externalIP %s is not allowed (--external-ips): left out", a)
		} else if f := s.familyOf(a); f != nil {
			f.externalIPs = addUnique(f.externalIPs, a)
		}
	}
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if in.IP == "" || in.IPMode != nil && *in.IPMode != corev1.LoadBalancerIPModeVIP {
			continue // A1.9
		}
		a, ok := s.parseAddress("load balancer IP", in.IP)
		if !ok {
			continue
		}
		if f := s.familyOf(a); f != nil {
			f.loadBalancerIPs = addUnique(f.loadBalancerIPs, a)
		}
	}
	var open [2]bool
	unread := false
	for _, text := range svc.Spec.LoadBalancerSourceRanges {
		p, ok := parsePrefix(strings.TrimSpace(text)) // A3.10
		if !ok {
			s.problemf("loadBalancerSourceRange %q is not a CIDR: it lets nobody in (A3.10)", text)
			unread = true
			continue
		}
		if p.Bits() == 0 {
			open[FamilyOf(p.Addr())] = true // A3.10: allows all clients
		}
		if f := s.familyOf(p.Addr()); f != nil {
			f.sourceRanges = addUnique(f.sourceRanges, p)
		}
	}
	for i := range s.families {
		switch f := &s.families[i]; {
		case open[i]:
			f.sourceRanges = nil
		case unread && len(f.sourceRanges) == 0:
			f.sourceRanges = nobody[i]
		}
	}
}

func (s *spec) familyOf(a netip.Addr) *familySpec {
	if f := &s.families[FamilyOf(a)]; f.clusterIP.IsValid() {
		return f
	}
	return nil
}
