package service

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// WeightAnnotation of an EndpointSlice is the weight of its endpoints.
const WeightAnnotation = "service.cilium.io/weight"

// slice is a parsed EndpointSlice.
type slice struct {
	owner     Name // the service
	family    Family
	ports     []slicePort
	endpoints []Endpoint // the port in Addr is unused
	weight    uint16     // of each endpoint, or 0
	problems  []string
	// asked is set for endpoints that a Service's annotation names (AskedManager).
	asked bool
}

// Slice is an EndpointSlice that its source has parsed, for one Store. It takes less than
// half of the API object's memory.
type Slice struct {
	metav1.ObjectMeta
	parsed *slice // nil for one that Sluice ignores
}

// ParseSlice parses an EndpointSlice for a Store with that StoreOptions.NodeName.
func ParseSlice(es *discoveryv1.EndpointSlice, nodeName string) *Slice {
	return &Slice{es.ObjectMeta, parseSlice(es, &StoreOptions{NodeName: nodeName})}
}

// AskedManager is the value of the label endpointslice.kubernetes.io/managed-by of slices
// that manifests' annotation sluice.dev/endpoints makes. With StoreOptions.OwnEndpoints,
// their endpoints may be this node's own addresses, loopback included.
const AskedManager = "sluice.dev"

type slicePort struct {
	name     string
	protocol Protocol
	port     uint16
}

func (s *slice) problemf(format string, args ...any) {
	s.problems = append(s.problems, fmt.Sprintf(format, args...))
}

// share replaces the slice's endpoints by those of a service port if they are
// equal. Most services have one port and one slice, and would hold each endpoint
// twice.
func (s *slice) share(family Family, merged []Endpoint) {
	if s.family == family && len(s.endpoints) == len(merged) {
		s.endpoints = merged
	}
}

func endpointsEqual(a, b []Endpoint) bool {
	return slices.EqualFunc(a, b, func(x, y Endpoint) bool { return endpointEqual(&x, &y) })
}

func endpointEqual(a, b *Endpoint) bool {
	return a.Addr == b.Addr && a.Ready == b.Ready && a.Serving == b.Serving &&
		a.Terminating == b.Terminating && a.Local == b.Local && a.Weight == b.Weight && a.MayReturn == b.MayReturn &&
		a.Place == b.Place && a.Pod == b.Pod && a.PodUID == b.PodUID &&
		slices.Equal(a.ZoneHints(), b.ZoneHints()) && slices.Equal(a.NodeHints(), b.NodeHints())
}

// parseSlice parses an EndpointSlice by the rules of intake. It returns nil for a
// slice that Sluice ignores. A problem of one endpoint or port does not affect
// others.
func parseSlice(es *discoveryv1.EndpointSlice, o *StoreOptions) *slice {
	owner := es.Labels[discoveryv1.LabelServiceName]
	if _, headless := es.Labels[corev1.IsHeadlessService]; headless || owner == "" {
		return nil // A1.3, A1.10
	}
	s := &slice{owner: Name{Namespace: es.Namespace, Name: owner}}
	s.asked = o.OwnEndpoints && es.Labels[discoveryv1.LabelManagedBy] == AskedManager
	switch es.AddressType {
	case discoveryv1.AddressTypeIPv4:
		s.family = IPv4
	case discoveryv1.AddressTypeIPv6:
		s.family = IPv6
	default:
		return nil // A1.10
	}
	for i := range es.Ports {
		s.addPort(&es.Ports[i])
	}
	if text, ok := es.Annotations[WeightAnnotation]; ok {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n == 0 {
			s.problemf("annotation %s: %q is not of 1 to 65535: its endpoints have weight 1", WeightAnnotation, text)
		}
		s.weight = uint16(n)
	}
	s.endpoints = make([]Endpoint, 0, len(es.Endpoints))
	for i := range es.Endpoints {
		s.addEndpoint(&es.Endpoints[i], o.NodeName)
	}
	return s
}

// addPort adds a port of the slice. A missing name or protocol gets the API
// server's default: "" and TCP.
func (s *slice) addPort(p *discoveryv1.EndpointPort) {
	out := slicePort{protocol: TCP}
	if p.Name != nil {
		out.name = *p.Name
	}
	if p.Protocol != nil {
		var ok bool
		if out.protocol, ok = parseProtocol(*p.Protocol); !ok {
			s.problemf("port %q has the unknown protocol %q: left out", out.name, *p.Protocol)
			return
		}
	}
	if p.Port == nil || *p.Port == 0 {
		return // A1.11
	}
	if *p.Port < 0 || *p.Port > 65535 {
		s.problemf("port %q has the number %d, which is not of 1 to 65535: left out", out.name, *p.Port)
		return
	}
	out.port = uint16(*p.Port)
	s.ports = append(s.ports, out)
}

func (s *slice) addEndpoint(e *discoveryv1.Endpoint, node string) {
	if len(e.Addresses) == 0 {
		return // A1.11
	}
	a, ok := parseAddr(e.Addresses[0])
	switch {
	case !ok:
		s.problemf("address %q is not an IP address: left out (A1.7)", e.Addresses[0])
		return
	case FamilyOf(a) != s.family:
		s.problemf("address %s is not of the slice's addressType %s: left out (A1.10)", a, familyName(s.family))
		return
	}
	if err := CheckAddress(a); err != nil && !(s.asked && a.IsLoopback()) {
		s.problemf("address %s cannot be an endpoint's, %v: left out (A1.7)", a, err)
		return
	}
	out := readEndpoint(e, a, s.owner.Namespace)
	out.Weight = s.weight
	out.Local = node != "" && out.Node() == node || s.asked && a.IsLoopback()
	s.endpoints = append(s.endpoints, out)
}

// ReadEndpoint reads one endpoint of a slice, without a port, Local and Weight. It reports
// false if the address is not an IP address. Pods without a namespace are of the given one.
func ReadEndpoint(e *discoveryv1.Endpoint, namespace string) (Endpoint, bool) {
	if len(e.Addresses) == 0 {
		return Endpoint{}, false // A1.11
	}
	a, ok := parseAddr(e.Addresses[0])
	if !ok {
		return Endpoint{}, false
	}
	return readEndpoint(e, a, namespace), true
}

func readEndpoint(e *discoveryv1.Endpoint, a netip.Addr, namespace string) Endpoint {
	out := Endpoint{
		Addr:        netip.AddrPortFrom(a, 0),
		Ready:       isTrue(e.Conditions.Ready, true), // A1.12
		Serving:     isTrue(e.Conditions.Serving, true),
		Terminating: isTrue(e.Conditions.Terminating, false),
	}
	out.Place = At(text(e.NodeName), text(e.Zone))
	if r := e.TargetRef; r != nil {
		out.PodUID = UIDOf(string(r.UID))
		if r.Kind == "Pod" {
			out.Pod = Name{Namespace: cmp.Or(r.Namespace, namespace), Name: r.Name}
		}
	}
	if h := e.Hints; h != nil && len(h.ForZones)+len(h.ForNodes) > 0 {
		out.Hints = new(Hints)
		for _, z := range h.ForZones {
			out.Hints.Zones = append(out.Hints.Zones, z.Name)
		}
		for _, n := range h.ForNodes {
			out.Hints.Nodes = append(out.Hints.Nodes, n.Name)
		}
	}
	return out
}

// text returns what p points at; "" for nil.
func text(p *string) string {
	if p == nil {
		return ""
	}
	return *p
}

func isTrue(p *bool, otherwise bool) bool {
	if p == nil {
		return otherwise
	}
	return *p
}

// merger collects the endpoints of one service port from several slices. It reuses
// its buffers.
type merger struct {
	seen  map[netip.AddrPort]int // index in found
	found []Endpoint
	texts []byte
	order []sortKey
	// disputed are the endpoints of the last merge that one slice says are ready and
	// another one says are not.
	disputed []netip.AddrPort
}

type sortKey struct{ from, to, index int }

// merge returns the endpoints of a service port in one family (A1.15), sorted by
// the text of "ip:port", without duplicates (A1.14) and without those that judge
// rejects. The slices must be sorted by name. If the result equals old, merge
// returns old.
func (m *merger) merge(all []*slice, family Family, name string, proto Protocol, old []Endpoint, judge judgement) []Endpoint {
	clear(m.seen)
	m.found, m.disputed = m.found[:0], m.disputed[:0]
	for _, s := range all {
		if s.family != family {
			continue
		}
		for _, p := range s.ports {
			if p.name != name || p.protocol != proto {
				continue
			}
			for i := range s.endpoints {
				e := &s.endpoints[i]
				if ok, mayReturn := judge(s, e, Destination{e.Addr.Addr(), p.port, proto}); ok {
					m.add(e, p.port, mayReturn)
				}
			}
		}
	}
	m.sort()
	if m.same(old) {
		return old
	}
	if len(m.found) == 0 {
		return nil
	}
	out := make([]Endpoint, len(m.order))
	for i, k := range m.order {
		out[i] = m.found[k.index]
	}
	return out
}

// judgement reports whether an endpoint is usable, and its Endpoint.MayReturn.
type judgement func(*slice, *Endpoint, Destination) (ok, mayReturn bool)

// standing orders what slices say of one endpoint (A1.13): one that does not terminate
// goes first, then one that is ready, then one that serves.
func standing(e *Endpoint) int {
	n := 0
	for _, good := range []bool{!e.Terminating, e.Ready, e.Serving} {
		if n *= 2; good {
			n++
		}
	}
	return n
}

// add adds an endpoint. Of two with the same address and port, the one of higher
// standing wins, or else the later one: no slice can hide a ready endpoint by its name.
func (m *merger) add(e *Endpoint, port uint16, mayReturn bool) {
	at := netip.AddrPortFrom(e.Addr.Addr(), port)
	i, ok := m.seen[at]
	if !ok {
		if m.seen == nil {
			m.seen = make(map[netip.AddrPort]int)
		}
		i = len(m.found)
		m.seen[at] = i
		m.found = append(m.found, Endpoint{})
	} else {
		was := &m.found[i]
		if e.Terminating == was.Terminating && e.Ready != was.Ready && !slices.Contains(m.disputed, at) {
			m.disputed = append(m.disputed, at)
		}
		if standing(e) < standing(was) {
			return
		}
	}
	m.found[i] = *e
	m.found[i].Addr, m.found[i].MayReturn = at, mayReturn
}

// sort sorts the indexes of found by address text into order. It formats each text
// once.
func (m *merger) sort() {
	m.texts, m.order = m.texts[:0], m.order[:0]
	for i := range m.found {
		from := len(m.texts)
		m.texts = m.found[i].Addr.AppendTo(m.texts)
		m.order = append(m.order, sortKey{from, len(m.texts), i})
	}
	slices.SortFunc(m.order, func(a, b sortKey) int {
		return bytes.Compare(m.texts[a.from:a.to], m.texts[b.from:b.to])
	})
}

func (m *merger) same(old []Endpoint) bool {
	if len(old) != len(m.order) {
		return false
	}
	for i, k := range m.order {
		if !endpointEqual(&old[i], &m.found[k.index]) {
			return false
		}
	}
	return true
}
