package manifests

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/sluice-proxy/sluice/service"
)

// endpointsAnnotation names the processes that serve a Service:
//
//	sluice.dev/endpoints: 127.0.0.1:3000, 10.0.0.7:8080
//
// With several ports, each entry has the port's name: http=127.0.0.1:3000. An entry
// without a port number stands for the target ports. Only manifests may have it: in a
// cluster, a tenant could reach the node's own servers by it.
const endpointsAnnotation = "endpoints"

// asked is one endpoint that the annotation asks for.
type asked struct {
	port int // index in the Service's ports
	at   netip.AddrPort
}

// askedOf parses the annotation of a Service with its defaults.
func askedOf(s *corev1.Service, text string) (list []asked, err error) {
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		return nil, fmt.Errorf("a Service of type ExternalName has no endpoints")
	}
	if len(s.Spec.Ports) == 0 {
		return nil, fmt.Errorf("a Service without ports cannot have it: give it one")
	}
	for entry := range strings.SplitSeq(text, ",") {
		if entry = strings.TrimSpace(entry); entry == "" {
			continue
		}
		name, where, named := strings.Cut(entry, "=")
		if !named {
			name, where = "", entry
		}
		a, number, err := parseAsked(strings.TrimSpace(where))
		if err != nil {
			return nil, err
		}
		found := false
		for i := range s.Spec.Ports {
			p := &s.Spec.Ports[i]
			if named && p.Name != strings.TrimSpace(name) {
				continue
			}
			if !named && number != 0 && len(s.Spec.Ports) > 1 {
				return nil, fmt.Errorf("%q could be of any of the Service's ports: write its name before it, as %s=%s", entry, portLabel(p), where)
			}
			to := number
			if to == 0 {
				if p.TargetPort.Type == intstr.String {
					return nil, fmt.Errorf("%q has no port, and the targetPort %q is a name: write the number, as %s", entry, p.TargetPort.StrVal, netip.AddrPortFrom(a, 8080))
				}
				to = uint16(p.TargetPort.IntVal)
			}
			found = true
			list = append(list, asked{i, netip.AddrPortFrom(a, to)})
		}
		if !found {
			return nil, fmt.Errorf("%q: the Service has no port %q, only %s", entry, name, portsOf(s))
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("it names no endpoint: write an address and a port, as 127.0.0.1:3000")
	}
	return list, nil
}

func portLabel(p *corev1.ServicePort) string {
	if p.Name == "" {
		return "NAME"
	}
	return p.Name
}

// parseAsked parses an address with or without a port; the port is then 0.
func parseAsked(text string) (a netip.Addr, port uint16, err error) {
	if host, ok := strings.CutPrefix(text, "localhost"); ok {
		text = "127.0.0.1" + host
	}
	if a, err = netip.ParseAddr(text); err != nil {
		at, err := netip.ParseAddrPort(text)
		if err != nil || at.Port() == 0 {
			return a, 0, fmt.Errorf("%q is not an address and a port such as 127.0.0.1:3000 or [::1]:3000", text)
		}
		a, port = at.Addr(), at.Port()
	}
	a = a.Unmap()
	if a.Zone() != "" {
		return a, 0, fmt.Errorf("%s cannot be an endpoint: leave out the zone %%%s, as endpoints have none", a, a.Zone())
	}
	if err := service.CheckAddress(a); err != nil && !a.IsLoopback() {
		return a, 0, fmt.Errorf("%s cannot be an endpoint: %w", a, err)
	}
	return a, port, nil
}

// askedSlices makes EndpointSlices of the annotation of a Service, which was checked: one
// for each family, port and number, whose names depend on nothing else.
func askedSlices(s *corev1.Service) (made []*discoveryv1.EndpointSlice) {
	text, ok := s.Annotations["sluice.dev/"+endpointsAnnotation]
	if !ok {
		return nil
	}
	list, err := askedOf(s, text)
	if err != nil {
		return nil // a finding
	}
	byName := make(map[string]*discoveryv1.EndpointSlice)
	for _, e := range list {
		family := discoveryv1.AddressTypeIPv4
		if e.at.Addr().Is6() {
			family = discoveryv1.AddressTypeIPv6
		}
		p := &s.Spec.Ports[e.port]
		name := strings.Join([]string{s.Name, "asked", strings.ToLower(string(family)), strconv.Itoa(e.port), strconv.Itoa(int(e.at.Port()))}, "-")
		slice := byName[name]
		if slice == nil {
			slice = &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{
					Name: name, Namespace: s.Namespace,
					Labels: map[string]string{discoveryv1.LabelServiceName: s.Name, discoveryv1.LabelManagedBy: service.AskedManager},
				},
				AddressType: family,
				Ports:       []discoveryv1.EndpointPort{{Name: new(p.Name), Port: new(int32(e.at.Port())), Protocol: new(p.Protocol)}},
			}
			byName[name] = slice
			made = append(made, slice)
		}
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{e.at.Addr().String()}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)},
		})
	}
	return made
}

// withoutAsked returns the Service without the annotation, which the model does not know.
func withoutAsked(s *corev1.Service) *corev1.Service {
	const key = "sluice.dev/" + endpointsAnnotation
	if _, ok := s.Annotations[key]; !ok {
		return s
	}
	out := s.DeepCopy()
	delete(out.Annotations, key)
	return out
}
