package service

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/race"
)

// world holds the objects that exist, as an API server would.
type world struct {
	services map[string]*corev1.Service
	slices   map[string]*discoveryv1.EndpointSlice
	host     *Host
	// since is the change in which a service first claimed something.
	since   map[string]int
	changes int
}

func newWorld() *world {
	return &world{services: map[string]*corev1.Service{}, slices: map[string]*discoveryv1.EndpointSlice{}, host: &Host{}, since: map[string]int{}}
}

// claimed names a service's claim.
func claimed(svc *corev1.Service, address string, port int32, proto Protocol) string {
	return fmt.Sprintf("%s %s %d %s", svc.Name, address, port, proto)
}

// takeNote updates since after a change.
func (w *world) takeNote() {
	w.changes++
	was := w.since
	w.since = map[string]int{}
	for _, svc := range w.handled() {
		addrs := slices.Clone(svc.Spec.ExternalIPs)
		for _, in := range svc.Status.LoadBalancer.Ingress {
			addrs = append(addrs, in.IP)
		}
		for _, a := range clusterIPsOf(svc) {
			addrs = append(addrs, a.String())
		}
		for _, p := range svc.Spec.Ports {
			texts := []string{claimed(svc, "node port", p.NodePort, protocolOf(p.Protocol))}
			for _, a := range addrs {
				if parsed, err := netip.ParseAddr(a); err == nil && hasFamily(svc, parsed) {
					texts = append(texts, claimed(svc, a, p.Port, protocolOf(p.Protocol)))
				}
			}
			for _, text := range texts {
				w.since[text] = cmp.Or(was[text], w.changes)
			}
		}
	}
}

// byAge returns the handled services, the earliest claim first.
func (w *world) byAge(address string, port int32, proto Protocol) []*corev1.Service {
	list := w.handled()
	slices.SortStableFunc(list, func(a, b *corev1.Service) int {
		return cmp.Compare(w.since[claimed(a, address, port, proto)], w.since[claimed(b, address, port, proto)])
	})
	return list
}

const worldNode = "n0"

func pick[T any](r *rand.Rand, list ...T) T { return list[r.IntN(len(list))] }

// randomService returns one of few services with few addresses, so that they often
// conflict.
func randomService(r *rand.Rand) *corev1.Service {
	svc := newService(fmt.Sprintf("s%d", r.IntN(6)), fmt.Sprintf("10.96.0.%d", r.IntN(5)))
	if r.IntN(3) == 0 {
		svc.Spec.ClusterIPs = []string{svc.Spec.ClusterIP, fmt.Sprintf("fd00::%d", r.IntN(4))}
	}
	if r.IntN(12) == 0 {
		svc.Spec.ClusterIP = pick(r, "", "None", "bad")
		svc.Spec.ClusterIPs = nil
	}
	if r.IntN(15) == 0 {
		svc.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "x"}
	}
	if r.IntN(15) == 0 {
		svc.Spec.Type = corev1.ServiceTypeExternalName
	}
	withCreated(int64(1 + r.IntN(3)))(svc)
	svc.Spec.Ports = nil
	for _, name := range []string{"", "a", "b"} {
		if r.IntN(2) == 0 {
			continue
		}
		svc.Spec.Ports = append(svc.Spec.Ports, servicePort(name, pick[corev1.Protocol](r, "TCP", "UDP", ""),
			int32(80+r.IntN(3)), pick[int32](r, 0, 0, 30000, 30001)))
	}
	for range r.IntN(3) {
		svc.Spec.ExternalIPs = append(svc.Spec.ExternalIPs, pick(r, "192.0.2.1", "192.0.2.2", "fd01::1", "10.96.0.1", "bad"))
	}
	for range r.IntN(3) {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: pick(r, "192.0.2.1", "192.0.2.3", "fd01::1")})
	}
	if r.IntN(4) == 0 {
		svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	return svc
}

func randomSlice(r *rand.Rand) *discoveryv1.EndpointSlice {
	es := newSlice(fmt.Sprintf("e%d", r.IntN(8)), fmt.Sprintf("s%d", r.IntN(6)), 8080)
	v6 := r.IntN(4) == 0
	if v6 {
		es.AddressType = discoveryv1.AddressTypeIPv6
	}
	es.Ports = nil
	for range r.IntN(3) {
		es.Ports = append(es.Ports, endpointPort(pick(r, "", "a", "b"), pick[corev1.Protocol](r, "TCP", "UDP"), pick[int32](r, 8080, 8081, 0, 80, 30000)))
	}
	for range r.IntN(5) {
		e := discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.0.0.%d", r.IntN(12))}}
		if r.IntN(4) == 0 {
			e.Addresses[0] = pick(r, "192.0.2.1", "192.0.2.2", "192.0.2.3", "10.96.0.1", "10.0.0.255")
		}
		if v6 || r.IntN(10) == 0 {
			e.Addresses[0] = fmt.Sprintf("fd02::%d", r.IntN(12))
		}
		if r.IntN(2) == 0 {
			e.Conditions.Terminating = ptr(r.IntN(2) == 0)
		}
		if r.IntN(2) == 0 {
			e.Conditions.Ready = ptr(r.IntN(2) == 0)
		}
		e.NodeName = pick(r, nil, ptr(worldNode), ptr("n1"))
		es.Endpoints = append(es.Endpoints, e)
	}
	return es
}

// randomChange changes the world and tells how.
func (w *world) randomChange(r *rand.Rand) Change {
	var c Change
	for range 1 + r.IntN(3) {
		switch r.IntN(7) {
		case 0, 1:
			svc := randomService(r)
			w.services[svc.Name] = svc
			c.Services = append(c.Services, svc)
		case 2, 3:
			es := randomSlice(r)
			w.slices[es.Name] = es
			c.EndpointSlices = append(c.EndpointSlices, es)
		case 4: // never an object that is in the change as well
			name := fmt.Sprintf("s%d", r.IntN(6))
			if !slices.ContainsFunc(c.Services, func(o *corev1.Service) bool { return o.Name == name }) {
				delete(w.services, name)
				c.Deleted = append(c.Deleted, deleted(KindService, name).Deleted...)
			}
		case 5:
			name := fmt.Sprintf("e%d", r.IntN(8))
			if !slices.ContainsFunc(c.EndpointSlices, func(o *discoveryv1.EndpointSlice) bool { return o.Name == name }) {
				delete(w.slices, name)
				c.Deleted = append(c.Deleted, deleted(KindEndpointSlice, name).Deleted...)
			}
		case 6:
			c.Host = randomHost(r)
			w.host = c.Host
		}
	}
	w.takeNote()
	return c
}

// randomHost has a few addresses that Services claim or endpoints have.
func randomHost(r *rand.Rand) *Host {
	h := &Host{}
	for _, a := range []string{"10.0.0.1", "192.0.2.1", "192.0.2.2", "fd01::1", "fd02::3"} {
		if r.IntN(2) == 0 {
			h.Addresses = append(h.Addresses, netip.MustParseAddr(a))
		}
	}
	if r.IntN(2) == 0 {
		h.Broadcasts = []netip.Addr{netip.MustParseAddr(pick(r, "10.0.0.255", "192.0.2.3"))}
	}
	return h
}

// handled returns the services that a proxy serves, oldest first.
func (w *world) handled() []*corev1.Service {
	var out []*corev1.Service
	for _, svc := range w.services {
		_, labelled := svc.Labels["service.kubernetes.io/service-proxy-name"]
		_, err := netip.ParseAddr(svc.Spec.ClusterIP)
		if !labelled && err == nil && svc.Spec.Type != corev1.ServiceTypeExternalName {
			out = append(out, svc)
		}
	}
	slices.SortFunc(out, func(a, b *corev1.Service) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	return out
}

func clusterIPsOf(svc *corev1.Service) []netip.Addr {
	if len(svc.Spec.ClusterIPs) == 0 {
		return []netip.Addr{netip.MustParseAddr(svc.Spec.ClusterIP)}
	}
	var out []netip.Addr
	for _, text := range svc.Spec.ClusterIPs {
		out = append(out, netip.MustParseAddr(text))
	}
	return out
}

func hasFamily(svc *corev1.Service, a netip.Addr) bool {
	return slices.ContainsFunc(clusterIPsOf(svc), func(c netip.Addr) bool { return c.Is4() == a.Is4() })
}

func protocolOf(p corev1.Protocol) Protocol {
	if p == corev1.ProtocolUDP {
		return UDP
	}
	return TCP
}

// claimant returns the owner of a destination, slow and obvious: the best kind, and
// within one kind the earliest claim.
func (w *world) claimant(d Destination) (kind AddressKind, owner *corev1.Service, at corev1.ServicePort) {
	text := d.Addr.String()
	for _, kind := range []AddressKind{ClusterIP, LoadBalancer, ExternalIP} {
		for _, svc := range w.byAge(text, int32(d.Port), d.Protocol) {
			has := slices.Contains(svc.Spec.ExternalIPs, text) && hasFamily(svc, d.Addr)
			switch kind {
			case ClusterIP:
				has = slices.Contains(clusterIPsOf(svc), d.Addr)
			case LoadBalancer:
				has = hasFamily(svc, d.Addr) &&
					slices.ContainsFunc(svc.Status.LoadBalancer.Ingress, func(in corev1.LoadBalancerIngress) bool { return in.IP == text })
			}
			for _, p := range svc.Spec.Ports {
				if has && protocolOf(p.Protocol) == d.Protocol && p.Port == int32(d.Port) {
					return kind, svc, p
				}
			}
		}
	}
	return 0, nil, at
}

func nameOf(svc *corev1.Service, p corev1.ServicePort) PortName {
	return PortName{Name: Name{svc.Namespace, svc.Name}, Port: p.Name, Protocol: protocolOf(p.Protocol)}
}

// lookup describes the service at a destination.
func (w *world) lookup(d Destination) string {
	kind, svc, p := w.claimant(d)
	if svc == nil {
		return ""
	}
	own := slices.Contains(w.host.Addresses, d.Addr)
	switch {
	case kind == ClusterIP:
	case slices.Contains(w.host.Broadcasts, d.Addr), w.isOthers(d.Addr),
		w.aims(nameOf(svc, p), d),
		own && kind == ExternalIP && w.nodePort(d.Protocol, d.Port) != "":
		return ""
	}
	return kind.String() + " " + nameOf(svc, p).String()
}

// isOthers reports whether another proxy serves the Service of a cluster IP.
func (w *world) isOthers(a netip.Addr) bool {
	for _, svc := range w.services {
		_, labeled := svc.Labels[proxyNameLabel]
		if _, err := netip.ParseAddr(svc.Spec.ClusterIP); labeled && err == nil && !hasNoClusterIP(svc) && slices.Contains(clusterIPsOf(svc), a) {
			return true
		}
	}
	return false
}

// aims reports whether a service port has an endpoint at a destination, usable or
// not.
func (w *world) aims(name PortName, d Destination) bool {
	for _, es := range w.slices {
		if es.Labels[discoveryv1.LabelServiceName] != name.Name.Name {
			continue
		}
		for _, p := range es.Ports {
			for _, e := range es.Endpoints {
				a := netip.MustParseAddr(e.Addresses[0])
				if *p.Name == name.Port && protocolOf(*p.Protocol) == name.Protocol && uint16(*p.Port) == d.Port &&
					a == d.Addr && a.Is4() == (es.AddressType == discoveryv1.AddressTypeIPv4) {
					return true
				}
			}
		}
	}
	return false
}

// refused reports whether an endpoint is left out; mayReturn, whether a connection
// to it could reach a Service.
func (w *world) refused(d Destination, local bool) bool {
	own := slices.Contains(w.host.Addresses, d.Addr)
	return slices.Contains(w.host.Broadcasts, d.Addr) || own && !local ||
		slices.ContainsFunc(w.handled(), func(svc *corev1.Service) bool { return slices.Contains(clusterIPsOf(svc), d.Addr) })
}

func (w *world) mayReturn(d Destination) bool {
	kind, _, _ := w.claimant(d)
	return kind != 0 || w.nodePort(d.Protocol, d.Port) != ""
}

func (w *world) nodePort(proto Protocol, port uint16) string {
	for _, svc := range w.byAge("node port", int32(port), proto) {
		for _, p := range svc.Spec.Ports {
			if protocolOf(p.Protocol) == proto && p.NodePort == int32(port) {
				return PortName{Name: Name{svc.Namespace, svc.Name}, Port: p.Name}.String()
			}
		}
	}
	return ""
}

// endpoints returns the endpoints of a port in a family as text, sorted.
func (w *world) endpoints(name PortName, f Family) []string {
	type found struct{ terminating, ready, local, returns bool }
	byAddr, serving := map[string]found{}, map[string]bool{}
	for _, sliceName := range slices.Sorted(maps.Keys(w.slices)) {
		es := w.slices[sliceName]
		if es.Labels[discoveryv1.LabelServiceName] != name.Name.Name || (es.AddressType == discoveryv1.AddressTypeIPv4) != (f == IPv4) {
			continue
		}
		for _, p := range es.Ports {
			if *p.Name != name.Port || protocolOf(*p.Protocol) != name.Protocol || *p.Port == 0 {
				continue
			}
			for _, e := range es.Endpoints {
				a := netip.MustParseAddr(e.Addresses[0])
				if a.Is4() != (f == IPv4) {
					continue
				}
				at := netip.AddrPortFrom(a, uint16(*p.Port)).String()
				is := found{ready: e.Conditions.Ready == nil || *e.Conditions.Ready,
					terminating: e.Conditions.Terminating != nil && *e.Conditions.Terminating,
					local:       e.NodeName != nil && *e.NodeName == worldNode}
				d := Destination{a, uint16(*p.Port), name.Protocol}
				if w.refused(d, is.local) {
					continue
				}
				is.returns = w.mayReturn(d)
				serves := e.Conditions.Serving == nil || *e.Conditions.Serving
				if old, ok := byAddr[at]; ok {
					switch { // A1.13
					case is.terminating != old.terminating:
						ok = !is.terminating
					case is.ready != old.ready:
						ok = is.ready
					default:
						ok = serves || !serving[at]
					}
					if !ok {
						continue
					}
				}
				byAddr[at], serving[at] = is, serves
			}
		}
	}
	var out []string
	for _, at := range slices.Sorted(maps.Keys(byAddr)) {
		out = append(out, fmt.Sprintf("%s %+v", at, byAddr[at]))
	}
	return out
}

// dump formats a snapshot without IDs, which depend on history.
func dump(s *Snapshot) string {
	var lines []string
	for _, p := range s.Ports {
		if p != nil {
			q := *p
			q.ID = 0
			lines = append(lines, fmt.Sprintf("%+v", q))
		}
	}
	line := func(key string, c keyClass, id PortID) {
		text := fmt.Sprintf("%d %s", c, key)
		if c != byClusterIP {
			text += " " + s.Ports[id].Name.String()
		}
		lines = append(lines, text)
	}
	for i := range s.index.words {
		for w, at := range s.index.words[i].each {
			line(fmt.Sprintf("%x", w), keyClass(w), at)
		}
		for k, at := range s.index.keys[i].each {
			line(fmt.Sprintf("%x", k), keyClass(k.rest), at)
		}
	}
	for a, o := range s.Others {
		lines = append(lines, a.String()+" "+o.String())
	}
	slices.Sort(lines)
	return strings.Join(append(lines, problemTexts(s)...), "\n")
}

// TestStoreAgainstModel changes a world at random. After each change, the Store
// must equal the model and a new Store that starts with the current world.
func TestStoreAgainstModel(t *testing.T) {
	const changes = 80
	for seed := range uint64(race.Fewer(25)) {
		r := rand.New(rand.NewPCG(1, seed))
		w := newWorld()
		s := NewStore(StoreOptions{NodeName: worldNode})
		for i := range changes {
			before := s.Snapshot()
			was := dump(before)
			snap := s.Apply(w.randomChange(r))
			must.Equalf(t, dump(before), was, "seed %d, change %d: the last snapshot changed", seed, i)
			checkModel(t, w, snap)
			checkKept(t, before, snap)
			again := NewStore(StoreOptions{NodeName: worldNode})
			for k, list := range s.claims.byKey { // only this depends on history
				for _, c := range list {
					again.claims.earlier[claimant{k, c.svc.name}] = c.since
				}
			}
			fresh := again.Apply(Change{
				Services: slices.Collect(maps.Values(w.services)), EndpointSlices: slices.Collect(maps.Values(w.slices)), Host: w.host,
			})
			if got, want := dump(snap), dump(fresh); got != want {
				t.Fatalf("seed %d, change %d: got\n%s\nfrom scratch\n%s", seed, i, got, want)
			}
			if (snap == before) != (was == dump(snap) && maps.EqualFunc(idsOf(before), idsOf(snap), func(a, b PortID) bool { return a == b })) {
				t.Fatalf("seed %d, change %d: same pointer is %t", seed, i, snap == before)
			}
			if t.Failed() {
				t.Fatalf("seed %d, change %d", seed, i)
			}
		}
	}
}

func idsOf(s *Snapshot) map[PortName]PortID {
	out := map[PortName]PortID{}
	for _, p := range s.Ports {
		if p != nil {
			out[p.Name] = p.ID
		}
	}
	return out
}

// checkKept: a port that did not change keeps its pointer, and its ID anyway.
func checkKept(t *testing.T, before, after *Snapshot) {
	t.Helper()
	old := idsOf(before)
	for name, id := range idsOf(after) {
		was, ok := old[name]
		if !ok {
			continue
		}
		if was != id {
			t.Errorf("%s: the ID changed from %d to %d", name, was, id)
			continue
		}
		p, q := before.Ports[id], after.Ports[id]
		if p != q && fmt.Sprintf("%+v", *p) == fmt.Sprintf("%+v", *q) {
			t.Errorf("%s: unchanged, but another pointer", name)
		}
	}
}

func checkModel(t *testing.T, w *world, s *Snapshot) {
	t.Helper()
	var all []netip.Addr
	for i := range 5 {
		all = append(all, netip.AddrFrom4([4]byte{10, 96, 0, byte(i)}), netip.MustParseAddr(fmt.Sprintf("fd00::%d", i)),
			netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}))
	}
	all = append(all, netip.MustParseAddr("fd01::1"))
	for _, a := range all {
		for _, proto := range []Protocol{TCP, UDP} {
			for port := uint16(80); port < 84; port++ {
				d := Destination{a, port, proto}
				if got, want := found(s, netip.AddrPortFrom(a, port).String(), proto), w.lookup(d); got != want {
					t.Errorf("%s: got %q, want %q", dest2text(d), got, want)
				}
			}
		}
		want := slices.ContainsFunc(w.handled(), func(svc *corev1.Service) bool { return slices.Contains(clusterIPsOf(svc), a) })
		check.Equalf(t, s.HasClusterIP(a), want, "HasClusterIP(%s)", a)
	}
	for _, proto := range []Protocol{TCP, UDP} {
		for port := uint16(30000); port < 30003; port++ {
			got := ""
			if id, ok := s.FindNodePort(proto, port); ok {
				got = s.Ports[id].Name.String()
			}
			check.Equalf(t, got, w.nodePort(proto, port), "node port %d/%s", port, proto)
		}
	}
	count := 0
	for _, svc := range w.handled() {
		count += len(svc.Spec.Ports)
	}
	for _, p := range s.Ports {
		if p == nil {
			continue
		}
		count--
		for f, v := range p.Families {
			if !v.Exists {
				continue
			}
			var got []string
			for _, e := range v.Endpoints {
				got = append(got, fmt.Sprintf("%s {terminating:%t ready:%t local:%t returns:%t}", e.Addr, e.Terminating, e.Ready, e.Local, e.MayReturn))
			}
			if want := w.endpoints(p.Name, Family(f)); !slices.Equal(got, want) {
				t.Errorf("%s: got %q, want %q", p.Name, got, want)
			}
		}
	}
	check.Equalf(t, count, 0, "ports too few")
	destinations(t, s)
}
