package dns

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/service"
)

// Catalog builds Names from changes of API objects. One goroutine owns it.
type Catalog struct {
	services map[service.Name]*described
	slices   map[service.Name]*slice // by the slice's own name
	members  map[service.Name]map[string]*slice
	names    *Names
}

// NewCatalog makes an empty Catalog.
func NewCatalog() *Catalog {
	return &Catalog{
		services: make(map[service.Name]*described),
		slices:   make(map[service.Name]*slice),
		members:  make(map[service.Name]map[string]*slice),
		names:    newNames(),
	}
}

// described is what names need of a Service.
type described struct {
	headless        bool
	publishNotReady bool
	external        string // the lower-case name of an ExternalName, with the final dot
	clusterIPs      []netip.Addr
	ports           []port
	keys            []string // topology keys
}

// port is a named port of a Service, or of an endpoint.
type port struct {
	name, protocol string // lower-case
	number         uint16
}

// slice is what names need of an EndpointSlice.
type slice struct {
	owner     service.Name
	ports     []port
	endpoints []service.Endpoint
	hostnames []string // parallel to endpoints
}

// Apply applies a change and returns the Names after it.
func (c *Catalog) Apply(change service.Change) *Names {
	dirty := make(map[service.Name]bool)
	for _, k := range change.Deleted {
		switch k.Kind {
		case service.KindService:
			delete(c.services, k.Name)
			dirty[k.Name] = true
		case service.KindEndpointSlice:
			c.setSlice(k.Name, nil, dirty)
		}
	}
	for _, svc := range change.Services {
		name := service.Name{Namespace: svc.Namespace, Name: svc.Name}
		c.services[name] = describe(svc)
		dirty[name] = true
	}
	for _, es := range change.EndpointSlices {
		c.setSlice(service.Name{Namespace: es.Namespace, Name: es.Name}, readSlice(es), dirty)
	}
	edit := c.names.edit()
	for name := range dirty {
		edit.set(name, c.entry(name))
	}
	c.names = edit.names()
	return c.names
}

// setSlice adds or replaces a slice; nil removes it.
func (c *Catalog) setSlice(name service.Name, s *slice, dirty map[service.Name]bool) {
	if old := c.slices[name]; old != nil {
		delete(c.slices, name)
		delete(c.members[old.owner], name.Name)
		if len(c.members[old.owner]) == 0 {
			delete(c.members, old.owner)
		}
		dirty[old.owner] = true
	}
	if s == nil {
		return
	}
	c.slices[name] = s
	if c.members[s.owner] == nil {
		c.members[s.owner] = make(map[string]*slice)
	}
	c.members[s.owner][name.Name] = s
	dirty[s.owner] = true
}

func describe(svc *corev1.Service) *described {
	d := &described{publishNotReady: svc.Spec.PublishNotReadyAddresses, keys: service.TopologyKeys(svc.Annotations)}
	switch {
	case svc.Spec.Type == corev1.ServiceTypeExternalName:
		d.external = strings.ToLower(strings.TrimSuffix(svc.Spec.ExternalName, ".")) + "."
		return d
	case svc.Spec.ClusterIP == corev1.ClusterIPNone:
		d.headless = true
	default:
		texts := svc.Spec.ClusterIPs
		if len(texts) == 0 {
			texts = []string{svc.Spec.ClusterIP}
		}
		for _, text := range texts {
			if a, ok := service.ParseAddr(text); ok && !slices.Contains(d.clusterIPs, a) {
				d.clusterIPs = append(d.clusterIPs, a)
			}
		}
	}
	for _, p := range svc.Spec.Ports {
		d.ports = append(d.ports, newPort(p.Name, p.Protocol, p.Port))
	}
	return d
}

func newPort(name string, protocol corev1.Protocol, number int32) port {
	if protocol == "" {
		protocol = corev1.ProtocolTCP
	}
	return port{strings.ToLower(name), strings.ToLower(string(protocol)), uint16(number)}
}

// readSlice returns nil for a slice that has no Service or no addresses of a family.
func readSlice(es *discoveryv1.EndpointSlice) *slice {
	s := &slice{owner: service.Name{Namespace: es.Namespace, Name: es.Labels[discoveryv1.LabelServiceName]}}
	if s.owner.Name == "" || es.AddressType == discoveryv1.AddressTypeFQDN {
		return nil
	}
	for _, p := range es.Ports {
		if p.Port == nil {
			continue
		}
		var name string
		var protocol corev1.Protocol
		if p.Name != nil {
			name = *p.Name
		}
		if p.Protocol != nil {
			protocol = *p.Protocol
		}
		s.ports = append(s.ports, newPort(name, protocol, *p.Port))
	}
	for i := range es.Endpoints {
		e := &es.Endpoints[i]
		read, ok := service.ReadEndpoint(e, s.owner.Namespace)
		if !ok {
			continue
		}
		hostname := ""
		if e.Hostname != nil {
			hostname = strings.ToLower(*e.Hostname)
		}
		s.endpoints = append(s.endpoints, read)
		s.hostnames = append(s.hostnames, hostname)
	}
	return s
}

// entry returns what has the name of a Service, or nil if there is none.
func (c *Catalog) entry(name service.Name) *entry {
	d := c.services[name]
	if d == nil {
		return nil
	}
	e := &entry{described: d}
	if !d.headless {
		return e
	}
	e.hosts = make(map[netip.Addr]*host)
	members := c.members[name]
	for _, key := range slices.Sorted(maps.Keys(members)) {
		e.addSlice(members[key])
	}
	for _, a := range slices.SortedFunc(maps.Keys(e.hosts), netip.Addr.Compare) {
		if h := e.hosts[a]; h.Ready {
			f := service.FamilyOf(a)
			e.ready[f] = append(e.ready[f], h.Endpoint)
		}
	}
	return e
}

// addSlice adds the endpoints of a slice. One that several slices list has the ports of
// all, and the conditions of the one that is ready.
func (e *entry) addSlice(s *slice) {
	for i, endpoint := range s.endpoints {
		endpoint.Ready = endpoint.Ready || e.publishNotReady
		a := endpoint.Addr.Addr()
		h := e.hosts[a]
		if h == nil {
			h = &host{Endpoint: endpoint}
			e.hosts[a] = h
		} else if endpoint.Ready && !h.Ready {
			h.Endpoint = endpoint
		}
		if h.name == "" {
			h.name = s.hostnames[i]
		}
		for _, p := range s.ports {
			if !slices.Contains(h.ports, p) {
				h.ports = append(h.ports, p)
			}
		}
	}
}
