package manifests

import (
	"net"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	netutils "k8s.io/utils/net"
)

// The API server's limits.
const (
	maxEndpoints = 1000
	maxAddresses = 100
	maxPorts     = 100
)

// defaultEndpointSlice sets the API server's defaults.
func defaultEndpointSlice(s *discoveryv1.EndpointSlice) {
	for i := range s.Ports {
		p := &s.Ports[i]
		if p.Name == nil {
			p.Name = new("")
		}
		if p.Protocol == nil {
			p.Protocol = new(corev1.ProtocolTCP)
		}
	}
}

// defaultEndpoints sets the API server's defaults.
func defaultEndpoints(e *endpoints) {
	for i := range e.Subsets {
		for j := range e.Subsets[i].Ports {
			if p := &e.Subsets[i].Ports[j]; p.Protocol == "" {
				p.Protocol = corev1.ProtocolTCP
			}
		}
	}
}

func (c *checker) endpointSlice(s *discoveryv1.EndpointSlice) {
	if s.AddressType == "" {
		c.errorf(at("addressType"), "is missing: write IPv4 or IPv6")
		return
	}
	if !oneOf(c, at("addressType"), s.AddressType, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN) {
		return
	}
	if s.Labels[discoveryv1.LabelServiceName] == "" {
		// A1.10
		c.warnf(at("metadata.labels"), "%s is missing: without it the slice belongs to no service", discoveryv1.LabelServiceName)
	}
	c.slicePorts(s.Ports)
	if n := len(s.Endpoints); n > maxEndpoints {
		c.errorf(at("endpoints"), "has %d endpoints: %d is the limit, make several slices of it", n, maxEndpoints)
		return
	}
	for i := range s.Endpoints {
		c.endpoint(i, &s.Endpoints[i], s.AddressType)
	}
}

func (c *checker) slicePorts(ports []discoveryv1.EndpointPort) {
	if len(ports) > maxPorts {
		c.errorf(at("ports"), "has %d ports: %d is the limit", len(ports), maxPorts)
		return
	}
	names := map[string]int{}
	for i := range ports {
		p := &ports[i]
		c.protocol(at("ports[%d].protocol", i), *p.Protocol)
		c.portName(at("ports[%d].name", i), *p.Name, i, 1, names)
		if p.Port != nil { // nil means all ports; no proxy serves that (A1.11)
			c.port(at("ports[%d].port", i), *p.Port)
		}
	}
}

func (c *checker) endpoint(i int, e *discoveryv1.Endpoint, family discoveryv1.AddressType) {
	if n := len(e.Addresses); n == 0 {
		c.errorf(at("endpoints[%d].addresses", i), "is missing: an endpoint needs an address")
	} else if n > maxAddresses {
		c.errorf(at("endpoints[%d].addresses", i), "has %d addresses: %d is the limit", n, maxAddresses)
		return
	}
	for j, a := range e.Addresses {
		if family == discoveryv1.AddressTypeFQDN {
			continue // names are not used at all (A1.10)
		}
		p := at("endpoints[%d].addresses[%d]", i, j)
		ip := c.endpointIP(p, a)
		if ip == nil {
			continue
		}
		switch {
		case family == discoveryv1.AddressTypeIPv4 && !isIPv4(ip):
			c.errorf(p, "%s is an IPv6 address in a slice of addressType IPv4", a)
		case family == discoveryv1.AddressTypeIPv6 && isIPv4(ip):
			c.errorf(p, "%s is an IPv4 address in a slice of addressType IPv6", a)
		}
	}
	if e.NodeName != nil {
		c.nodeName(at("endpoints[%d].nodeName", i), *e.NodeName)
	}
}

// endpointIP is ip for an endpoint. Those on loopback have to be asked for by the Service.
func (c *checker) endpointIP(p place, address string) net.IP {
	if ip := netutils.ParseIPSloppy(address); ip.IsLoopback() {
		c.errorf(p, "%s cannot be used: it is a loopback address; the Service's annotation sluice.dev/endpoints may name it, with a port", address)
		return nil
	}
	return c.ip(p, address)
}

func (c *checker) nodeName(p place, name string) {
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		c.errorf(p, "%s is not a node's name", quotedText(name))
	}
}

func (c *checker) endpoints(e *endpoints) {
	for i := range e.Subsets {
		s := &e.Subsets[i]
		if len(s.Ports) > maxPorts {
			c.errorf(at("subsets[%d].ports", i), "has %d ports: %d is the limit", len(s.Ports), maxPorts)
			continue
		}
		if len(s.Addresses)+len(s.NotReadyAddresses) == 0 {
			c.errorf(at("subsets[%d]", i), "has no addresses")
		}
		for j := range s.Addresses {
			c.endpointAddress(at("subsets[%d].addresses[%d]", i, j), &s.Addresses[j])
		}
		for j := range s.NotReadyAddresses {
			c.endpointAddress(at("subsets[%d].notReadyAddresses[%d]", i, j), &s.NotReadyAddresses[j])
		}
		names := map[string]int{}
		for j := range s.Ports {
			p := &s.Ports[j]
			c.port(at("subsets[%d].ports[%d].port", i, j), p.Port)
			c.protocol(at("subsets[%d].ports[%d].protocol", i, j), p.Protocol)
			c.portName(at("subsets[%d].ports[%d].name", i, j), p.Name, j, len(s.Ports), names)
		}
	}
}

func (c *checker) endpointAddress(p place, a *endpointAddress) {
	c.endpointIP(at("%s.ip", p), a.IP)
	if a.NodeName != nil {
		c.nodeName(at("%s.nodeName", p), *a.NodeName)
	}
}
