package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/service"
)

const ownNode = "n0"

// parseEndpoint reads an endpoint written as its address and words: ready (if
// nothing else is said), unready, draining, local, zone=z, zonehint=z,
// nodehint=n. The port is 80.
func parseEndpoint(t testing.TB, text string) service.Endpoint {
	t.Helper()
	words := strings.Fields(text)
	e := service.Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr(words[0]), 80), Ready: true, Serving: true}
	for _, w := range words[1:] {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "ready":
		case "unready":
			e.Ready, e.Serving = false, false
		case "serving": // not ready, but it would serve
			e.Ready = false
		case "draining":
			e.Ready, e.Serving, e.Terminating = false, true, true
		case "local":
			e.Local, e.Place = true, service.At(ownNode, "")
		case "node":
			e.Place = service.At(value, "")
		case "zonehint":
			e.Hints = &service.Hints{Zones: append(slices.Clone(e.ZoneHints()), value), Nodes: e.NodeHints()}
		case "nodehint":
			e.Hints = &service.Hints{Zones: e.ZoneHints(), Nodes: append(slices.Clone(e.NodeHints()), value)}
		default:
			t.Fatalf("endpoint %q: unknown word %q", text, w)
		}
	}
	return e
}

// svc describes a Service "default/name" for the tests of verdicts, which have
// Services go through the Store. Its port is 80, named nothing.
type svc struct {
	name        string
	clusterIPs  string // separated by blanks
	protocol    corev1.Protocol
	internal    corev1.ServiceInternalTrafficPolicy
	external    corev1.ServiceExternalTrafficPolicy
	externalIPs string
	balancerIPs string
	nodePort    int32
	ranges      string
	annotations map[string]string
	endpoints   []string // as parseEndpoint; the number behind is 8080
}

func (s *svc) objects(t testing.TB) ([]*corev1.Service, []*discoveryv1.EndpointSlice) {
	t.Helper()
	ips := strings.Fields(s.clusterIPs)
	obj := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.name, Annotations: s.annotations},
		Spec: corev1.ServiceSpec{
			ClusterIP: ips[0], ClusterIPs: ips,
			Ports:                    []corev1.ServicePort{{Port: 80, Protocol: s.protocol, NodePort: s.nodePort}},
			ExternalIPs:              strings.Fields(s.externalIPs),
			ExternalTrafficPolicy:    s.external,
			LoadBalancerSourceRanges: strings.Fields(s.ranges),
		},
	}
	if s.internal != "" {
		obj.Spec.InternalTrafficPolicy = &s.internal
	}
	if s.nodePort != 0 {
		obj.Spec.Type = corev1.ServiceTypeNodePort
	}
	for _, ip := range strings.Fields(s.balancerIPs) {
		obj.Spec.Type = corev1.ServiceTypeLoadBalancer
		obj.Status.LoadBalancer.Ingress = append(obj.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
	}
	if s.external == "Local" && s.balancerIPs != "" {
		obj.Spec.HealthCheckNodePort = 32000
	}
	var out []*discoveryv1.EndpointSlice
	for i, f := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		port := int32(8080)
		es := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("%s-%d", s.name, i),
				Labels: map[string]string{discoveryv1.LabelServiceName: s.name}},
			AddressType: f,
			Ports:       []discoveryv1.EndpointPort{{Port: &port, Protocol: &obj.Spec.Ports[0].Protocol}},
		}
		for _, text := range s.endpoints {
			e := parseEndpoint(t, text)
			if e.Addr.Addr().Is4() != (i == 0) {
				continue
			}
			in := discoveryv1.Endpoint{
				Addresses:  []string{e.Addr.Addr().String()},
				Conditions: discoveryv1.EndpointConditions{Ready: &e.Ready, Serving: &e.Serving, Terminating: &e.Terminating},
				Hints:      &discoveryv1.EndpointHints{},
			}
			if node := e.Node(); node != "" {
				in.NodeName = &node
			}
			for _, z := range e.ZoneHints() {
				in.Hints.ForZones = append(in.Hints.ForZones, discoveryv1.ForZone{Name: z})
			}
			for _, n := range e.NodeHints() {
				in.Hints.ForNodes = append(in.Hints.ForNodes, discoveryv1.ForNode{Name: n})
			}
			es.Endpoints = append(es.Endpoints, in)
		}
		out = append(out, es)
	}
	return []*corev1.Service{obj}, out
}

// change puts services into one change.
func change(t testing.TB, list ...svc) service.Change {
	t.Helper()
	var c service.Change
	for i := range list {
		s, es := list[i].objects(t)
		c.Services = append(c.Services, s...)
		c.EndpointSlices = append(c.EndpointSlices, es...)
	}
	return c
}

func newStore() *service.Store {
	return service.NewStore(service.StoreOptions{NodeName: ownNode})
}

func nodeObject(name string, labels map[string]string, addrs ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

func prefixes(texts ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range texts {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func addresses(texts ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range texts {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// names returns the addresses of endpoints, without the ports, on one line.
func names(list []service.Endpoint) string {
	var out []string
	for _, e := range list {
		out = append(out, e.Addr.Addr().String())
	}
	return strings.Join(out, " ")
}
