package manifests

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	netutils "k8s.io/utils/net"

	"github.com/sluice-proxy/sluice/internal/nearest"
	"github.com/sluice-proxy/sluice/service"
)

// strayGrace is how long a slice may be without its Service, or without a port of that
// name, before that is a finding: the files may be written one after the other.
const strayGrace = 2 * time.Second

// mostCompared bounds the objects whose names are compared with a missing Service's.
const mostCompared = 1000

// belonging finds EndpointSlices and Endpoints whose Service, or whose port of that
// name, does not exist, and others that their Service cannot use. Kubernetes allows
// that, and it is the likeliest slip.
type belonging struct {
	members map[service.Name]map[objectKey]bool // slices and Endpoints by Service
	dirty   map[service.Name]bool               // Services that changed, or whose members did
	strays  map[objectKey]*stray
}

// stray is an object that does not belong to its Service in whole.
type stray struct {
	since    time.Time
	findings []finding
	told     bool
}

func newBelonging() belonging {
	return belonging{members: make(map[service.Name]map[objectKey]bool), dirty: make(map[service.Name]bool), strays: make(map[objectKey]*stray)}
}

// changed notes that an object came, changed or went.
func (b *belonging) changed(k objectKey, old, value metav1.Object) {
	if k.kind == kindService {
		b.dirty[k.Name] = true
		return
	}
	if old != nil {
		if owner, ok := ownerOf(k, old); ok {
			delete(b.members[owner], k)
			b.dirty[owner] = true
			if len(b.members[owner]) == 0 {
				delete(b.members, owner)
			}
		}
		delete(b.strays, k)
	}
	if value != nil {
		if owner, ok := ownerOf(k, value); ok {
			if b.members[owner] == nil {
				b.members[owner] = make(map[objectKey]bool)
			}
			b.members[owner][k] = true
			b.dirty[owner] = true
		}
	}
}

// ownerOf returns the Service that an object belongs to.
func ownerOf(k objectKey, v metav1.Object) (owner service.Name, ok bool) {
	switch k.kind {
	case kindEndpointSlice:
		name := v.GetLabels()[discoveryv1.LabelServiceName]
		return service.Name{Namespace: k.Namespace, Name: name}, name != ""
	case kindEndpoints:
		return k.Name, true
	}
	return owner, false
}

// strays returns the findings about objects that have been strays for strayGrace, each
// once; at once for the first look.
func (c *catalog) strays(now time.Time, first bool) (findings []finding) {
	b := &c.belonging
	for owner := range b.dirty {
		for k := range b.members[owner] {
			found := c.judge(k, owner)
			switch s := b.strays[k]; {
			case len(found) == 0:
				delete(b.strays, k)
			case s == nil || !slices.Equal(s.findings, found):
				b.strays[k] = &stray{since: now, findings: found}
			}
		}
	}
	clear(b.dirty)
	for _, k := range slices.SortedFunc(maps.Keys(b.strays), compareKeys) {
		if s := b.strays[k]; !s.told && (first || now.Sub(s.since) >= strayGrace) {
			s.told = true
			findings = append(findings, s.findings...)
		}
	}
	return findings
}

// oldestStray returns when the oldest stray was found that is not told yet.
func (c *catalog) oldestStray() (since time.Time, waiting bool) {
	for _, s := range c.belonging.strays {
		if !s.told && (!waiting || s.since.Before(since)) {
			since, waiting = s.since, true
		}
	}
	return since, waiting
}

// judge returns the findings about an object in force and its Service.
func (c *catalog) judge(k objectKey, owner service.Name) (findings []finding) {
	claim := c.claims[k][0]
	add := func(line int, format string, args ...any) {
		findings = append(findings, finding{file: claim.file, line: line, object: k.String(), text: fmt.Sprintf(format, args...), warning: true})
	}
	serviceLine := claim.line
	if claim.lines != nil {
		serviceLine = claim.lines.service
	}
	svc, ok := c.inForce[objectKey{kindService, owner}].(*corev1.Service)
	if !ok {
		add(serviceLine, "the Service %s does not exist, so these endpoints are not used%s", owner, c.similar(owner))
		return findings
	}
	if svc.Spec.ClusterIP == corev1.ClusterIPNone || svc.Spec.Type == corev1.ServiceTypeExternalName {
		return nil // no proxy's affair
	}
	switch o := c.inForce[k].(type) {
	case *discoveryv1.EndpointSlice:
		if len(o.Endpoints) == 0 {
			break // the controller writes such slices, without ports
		}
		if !hasFamily(svc, o.AddressType) {
			add(claim.line, "the Service %s has no cluster IP of addressType %s, so these endpoints are not used", owner, o.AddressType)
		}
		if len(o.Ports) == 0 {
			add(claim.line, "ports: is missing, so these endpoints are not used; the Service %s has %s", owner, portsOf(svc))
		}
		for i := range o.Ports {
			switch p := &o.Ports[i]; {
			case !hasPort(svc, *p.Name, *p.Protocol):
				add(claim.lines.ports[i], "ports[%d]: %s", i, noPort(svc, *p.Name, *p.Protocol))
			case p.Port == nil:
				add(claim.lines.ports[i], "ports[%d].port: is missing: this port is not used", i)
			}
		}
	case *endpoints:
		for i := range o.Subsets {
			if len(o.Subsets[i].Ports) == 0 {
				add(claim.line, "subsets[%d].ports: is missing, so these endpoints are not used; the Service %s has %s", i, owner, portsOf(svc))
			}
			for _, family := range familiesOf(&o.Subsets[i]) {
				if !hasFamily(svc, family) {
					add(claim.line, "subsets[%d]: the Service %s has no cluster IP of addressType %s, so the subset's addresses of this family are not used", i, owner, family)
				}
			}
			for j := range o.Subsets[i].Ports {
				if p := &o.Subsets[i].Ports[j]; !hasPort(svc, p.Name, p.Protocol) {
					add(claim.line, "subsets[%d].ports[%d]: %s", i, j, noPort(svc, p.Name, p.Protocol))
				}
			}
		}
	}
	return findings
}

func hasPort(svc *corev1.Service, name string, protocol corev1.Protocol) bool {
	return slices.ContainsFunc(svc.Spec.Ports, func(p corev1.ServicePort) bool { return p.Name == name && p.Protocol == protocol })
}

// hasFamily reports whether a Service has a cluster IP of a slice's family; also if it
// has none at all, as it is not served then.
func hasFamily(svc *corev1.Service, family discoveryv1.AddressType) bool {
	none := true
	for _, text := range append([]string{svc.Spec.ClusterIP}, svc.Spec.ClusterIPs...) {
		if a, err := netip.ParseAddr(text); err == nil {
			none = false
			if a.Is4() && family == discoveryv1.AddressTypeIPv4 || a.Is6() && family == discoveryv1.AddressTypeIPv6 {
				return true
			}
		}
	}
	return none
}

// familiesOf returns the address families of a subset.
func familiesOf(s *endpointSubset) (families []discoveryv1.AddressType) {
	for _, a := range slices.Concat(s.Addresses, s.NotReadyAddresses) {
		family := discoveryv1.AddressTypeIPv6
		if isIPv4(netutils.ParseIPSloppy(a.IP)) {
			family = discoveryv1.AddressTypeIPv4
		}
		if !slices.Contains(families, family) {
			families = append(families, family)
		}
	}
	return families
}

// noPort says that a Service has no port of a name, and which ones it has.
func noPort(svc *corev1.Service, name string, protocol corev1.Protocol) string {
	return fmt.Sprintf("the Service %s/%s has no port %s, only %s: this port is not used", svc.Namespace, svc.Name, portText(name, protocol), portsOf(svc))
}

// portsOf names the ports of a Service.
func portsOf(svc *corev1.Service) string {
	var ports []string
	for i, p := range svc.Spec.Ports {
		if i == maxFindings {
			ports = append(ports, "…")
			break
		}
		ports = append(ports, portText(p.Name, p.Protocol))
	}
	return strings.Join(ports, ", ")
}

func portText(name string, protocol corev1.Protocol) string {
	if name == "" {
		return "without a name (" + string(protocol) + ")"
	}
	return strconv.Quote(name) + " (" + string(protocol) + ")"
}

// similar returns `; did you mean "web"?` when the namespace has a Service of nearly
// that name, or says that another namespace has one of that name.
func (c *catalog) similar(name service.Name) string {
	if len(c.inForce) > mostCompared {
		return ""
	}
	for _, k := range slices.SortedFunc(maps.Keys(c.inForce), compareKeys) {
		if k.kind == kindService && k.Name.Name == name.Name {
			return fmt.Sprintf("; %s does, in another namespace", k.Name)
		}
	}
	return nearest.Hint(name.Name, min(3, len(name.Name)/2), func(yield func(string) bool) {
		for k := range c.inForce {
			if k.kind == kindService && k.Namespace == name.Namespace && !yield(k.Name.Name) {
				return
			}
		}
	})
}

// Where returns file and line of an object, such as "web.yaml:12" for "Service
// default/web", or "" if no manifest has it. Safe for concurrent use.
func (w *Watcher) Where(object string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	claims := w.catalog.claims[keyOf(object)]
	if len(claims) == 0 {
		return ""
	}
	return fmt.Sprintf("%s:%d", claims[0].file, claims[0].line)
}

// keyOf returns the key whose text is "Service default/web" or "Node a".
func keyOf(object string) objectKey {
	name, full, _ := strings.Cut(object, " ")
	k := objectKey{kind: kind(name), Name: service.Name{Name: full}}
	if namespace, rest, ok := strings.Cut(full, "/"); ok {
		k.Name = service.Name{Namespace: namespace, Name: rest}
	}
	return k
}
