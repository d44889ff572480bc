package manifests

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	netutils "k8s.io/utils/net"

	"github.com/sluice-proxy/sluice/service"
)

// checker sets the API server's defaults and reports what the API server would
// reject, as far as it matters to a service proxy. Like the API server it allows
// addresses with leading zeros (A1.7), which old clusters have. Unlike it, endpoints
// may be loopback addresses, for manifests without a cluster.
type checker struct {
	d    *decoder
	node *yaml.Node // the object's
}

// place is the path of a field; its text is formatted only for an error.
type place struct {
	format string
	args   []any
}

func at(format string, args ...any) place { return place{format, args} }

func (p place) String() string { return fmt.Sprintf(p.format, p.args...) }

func (c *checker) errorf(p place, format string, args ...any) {
	path := p.String()
	c.d.errorf(c.line(path), "%s: %s", path, fmt.Sprintf(format, args...))
}

func (c *checker) warnf(p place, format string, args ...any) {
	path := p.String()
	c.d.warnf(c.line(path), "%s: %s", path, fmt.Sprintf(format, args...))
}

// line returns the line of a field "spec.ports[0].port", or of the nearest that
// holds it when it is not there.
func (c *checker) line(path string) int { return lineOf(c.node, path) }

// check sets the defaults of an object and validates it.
func (c *checker) check(v metav1.Object, namespaced bool) {
	c.meta(v, namespaced)
	switch o := v.(type) {
	case *corev1.Service:
		defaultService(o)
		c.service(o)
	case *discoveryv1.EndpointSlice:
		defaultEndpointSlice(o)
		c.endpointSlice(o)
	case *endpoints:
		defaultEndpoints(o)
		c.endpoints(o)
	case *corev1.Node:
		for i, cidr := range o.Spec.PodCIDRs {
			c.optionalCIDR(at("spec.podCIDRs[%d]", i), cidr)
		}
	case *networkingv1.ServiceCIDR:
		c.serviceCIDR(o)
	}
}

func (c *checker) meta(v metav1.Object, namespaced bool) {
	name := v.GetName()
	_, isService := v.(*corev1.Service)
	switch {
	case name == "":
		c.errorf(at("metadata.name"), "is missing")
	case isService:
		// A DNS label since Kubernetes 1.34; before, one that begins with a letter.
		c.label(at("metadata.name"), name)
	case len(validation.IsDNS1123Subdomain(name)) > 0:
		c.errorf(at("metadata.name"), `%s is not a valid name: use lower-case letters, digits, "-" and ".", with a letter or digit first and last, at most 253 characters`, quotedText(name))
	}
	switch {
	case namespaced:
		c.label(at("metadata.namespace"), v.GetNamespace())
	case v.GetNamespace() != "":
		c.errorf(at("metadata.namespace"), "this kind of object has no namespace: leave it out")
	}
	labels := v.GetLabels()
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		value := labels[key]
		if len(validation.IsQualifiedName(key)) > 0 {
			c.errorf(at("metadata.labels[%s]", key), `%s is not a valid label name: use letters, digits, "-", "_" and ".", with a domain and "/" before it or not`, quotedText(key))
		}
		if len(validation.IsValidLabelValue(value)) > 0 {
			c.errorf(at("metadata.labels[%s]", key), `%s is not a valid label value: use letters, digits, "-", "_" and ".", with a letter or digit first and last, at most 63 characters`, quotedText(value))
		}
	}
}

func (c *checker) serviceCIDR(o *networkingv1.ServiceCIDR) {
	cidrs := o.Spec.CIDRs
	if len(cidrs) < 1 || len(cidrs) > 2 {
		c.errorf(at("spec.cidrs"), "has %d ranges: give one, or one of each IP family", len(cidrs))
		return
	}
	ok := true
	for i, cidr := range cidrs {
		ok = c.cidr(at("spec.cidrs[%d]", i), cidr) && ok
	}
	if ok && len(cidrs) == 2 && netutils.IsIPv6CIDRString(cidrs[0]) == netutils.IsIPv6CIDRString(cidrs[1]) {
		c.errorf(at("spec.cidrs"), "has two ranges of the same IP family: give one, or one of each")
	}
}

func (c *checker) label(p place, name string) {
	if len(validation.IsDNS1123Label(name)) > 0 {
		c.errorf(p, `%s is not a valid name: use lower-case letters, digits and "-", with a letter or digit first and last, at most 63 characters`, quotedText(name))
	}
}

func (c *checker) port(p place, port int32) {
	if len(validation.IsValidPortNum(int(port))) > 0 {
		c.errorf(p, "%d is not in 1..65535", port)
	}
}

func (c *checker) protocol(p place, proto corev1.Protocol) {
	switch proto {
	case corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP:
		return
	}
	c.errorf(p, "%s is not a protocol: write TCP, UDP or SCTP", quotedText(string(proto)))
}

// oneOf checks a field with a few possible values; "" is for the caller.
func oneOf[T ~string](c *checker, p place, value T, allowed ...T) bool {
	if slices.Contains(allowed, value) {
		return true
	}
	texts := make([]string, len(allowed))
	for i, a := range allowed {
		texts[i] = string(a)
	}
	last := len(texts) - 1
	c.errorf(p, "%s is not known: write %s or %s", quotedText(string(value)), strings.Join(texts[:last], ", "), texts[last])
	return false
}

// cidr checks a required range of addresses.
func (c *checker) cidr(p place, cidr string) bool {
	wrong := cidrFault(cidr)
	if wrong != "" {
		c.errorf(p, "%s", wrong)
	}
	return wrong == ""
}

// optionalCIDR checks one of a node's ranges: an invalid one is left out, the others
// count (A1.7).
func (c *checker) optionalCIDR(p place, cidr string) {
	if wrong := cidrFault(cidr); wrong != "" {
		c.warnf(p, "%s: left out", wrong)
	}
}

// cidrFault says what is wrong with a range of addresses, or "".
func cidrFault(cidr string) string {
	if _, _, err := netutils.ParseCIDRSloppy(strings.TrimSpace(cidr)); err != nil {
		return quotedText(cidr) + ` is not a range of addresses such as "10.0.0.0/8" or "fd00::/48"`
	}
	return ""
}

// ip checks a required address; it returns nil for an invalid one.
func (c *checker) ip(p place, address string) net.IP {
	ip, wrong := parseIP(address)
	if wrong != "" {
		c.errorf(p, "%s", wrong)
	}
	return ip
}

// optionalIP checks one address of several: an invalid one is left out, the others
// count (A1.7).
func (c *checker) optionalIP(p place, address string) {
	if _, wrong := parseIP(address); wrong != "" {
		c.warnf(p, "%s: left out", wrong)
	}
}

// parseIP returns an address, or what is wrong with it.
func parseIP(address string) (ip net.IP, wrong string) {
	ip = netutils.ParseIPSloppy(address)
	if ip == nil {
		what := "is not an IP address"
		if _, err := netip.ParseAddrPort(address); err == nil {
			what = "is an address with a port: leave the port out"
		} else if _, _, err := netutils.ParseCIDRSloppy(address); err == nil {
			what = "is a range, not one address"
		} else if len(validation.IsDNS1123Subdomain(strings.ToLower(address))) == 0 && strings.ContainsFunc(address, isLetter) {
			what = "is a name, not an IP address: names are not looked up"
		}
		return nil, quotedText(address) + " " + what
	}
	if a, ok := netip.AddrFromSlice(ip); ok {
		if err := service.CheckAddress(a.Unmap()); err != nil {
			return nil, address + " cannot be used: " + err.Error()
		}
	}
	return ip, ""
}

func isLetter(r rune) bool { return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' }

func quotedText(s string) string { return shorten(strconv.Quote(s)) }
