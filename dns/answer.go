package dns

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// The version of the specification, and how long in seconds answers hold, negative ones
// too: CoreDNS's default.
const (
	schemaVersion = "1.1.0"
	ttl           = 5
)

// nameServer is the name that the zone's server has below the zone.
const nameServer = "ns.dns."

// mostAliases bounds a chain of ExternalNames.
const mostAliases = 8

// view is what answers are made from.
type view struct {
	names  *Names
	places *places
	zone   string // lower-case, with the final dot
	self   []netip.Addr
	turn   uint32 // rotates lists of addresses
}

// answer is the answer to one question.
type answer struct {
	ours    bool // the zone's, or an address's that we have a name for
	code    dnsmessage.RCode
	records []record
	extra   []record
	// alias is the name outside of the zone that the records end with, or "".
	alias string
}

// answer answers a question of a client.
func (v *view) answer(q dnsmessage.Question, client netip.Addr) (a answer) {
	name := strings.ToLower(q.Name.String())
	if q.Type == dnsmessage.TypePTR || strings.HasSuffix(name, ".arpa.") {
		if addr, ok := reverseAddr(name); ok {
			return v.pointer(q, addr)
		}
	}
	labels, ok := v.labels(name)
	if !ok {
		return a
	}
	a.ours = true
	r := &resolver{view: v, question: q, owner: q.Name.String(), place: v.places.of(client), answer: &a}
	r.name(labels)
	return a
}

// labels returns the labels of a name below the zone, the last one first.
func (v *view) labels(name string) (labels []string, ok bool) {
	if name == v.zone {
		return nil, true
	}
	below, ok := strings.CutSuffix(name, "."+v.zone)
	if !ok {
		return nil, false
	}
	labels = strings.Split(below, ".")
	slices.Reverse(labels)
	return labels, true
}

// resolver adds the records of one question to its answer.
type resolver struct {
	*view
	*answer
	question dnsmessage.Question
	owner    string // of the records; the target of an ExternalName differs from the question
	place    policy.Place
	aliases  int
}

// name answers for the name with these labels below the zone. What it does not know does
// not exist.
func (r *resolver) name(labels []string) {
	is := func(want ...string) bool { return slices.Equal(labels, want) }
	switch {
	case is():
		r.apex()
	case is("dns-version"):
		if r.wants(dnsmessage.TypeTXT) {
			r.add(dnsmessage.TypeTXT, append([]byte{byte(len(schemaVersion))}, schemaVersion...))
		}
	case is("dns"), is("svc"):
		// They exist, and have no records.
	case is("dns", "ns"):
		r.addresses(r.self)
	case labels[0] == "svc":
		r.below(labels[1:])
	default:
		r.code = dnsmessage.RCodeNameError
	}
}

// wants reports whether the question is for records of a type.
func (r *resolver) wants(t dnsmessage.Type) bool {
	return r.question.Type == t || r.question.Type == dnsmessage.TypeALL
}

func (r *resolver) apex() {
	if r.wants(dnsmessage.TypeSOA) {
		r.add(dnsmessage.TypeSOA, r.soa().data)
	}
	if r.wants(dnsmessage.TypeNS) {
		r.add(dnsmessage.TypeNS, appendName(nil, nameServer+r.zone))
	}
}

// soa returns the record that negative answers have (RFC 2308).
func (v *view) soa() record {
	data := appendName(appendName(nil, nameServer+v.zone), "hostmaster."+v.zone)
	for _, n := range [...]uint32{1, 7200, 1800, 86400, ttl} { // serial, refresh, retry, expire, negative answers
		data = binary.BigEndian.AppendUint32(data, n)
	}
	return record{v.zone, dnsmessage.TypeSOA, ttl, data}
}

// below answers for a name below svc: namespace, service, and what is below it.
func (r *resolver) below(labels []string) {
	space := r.names.spaces[labels[0]]
	switch {
	case space == nil:
		r.code = dnsmessage.RCodeNameError
		return
	case len(labels) == 1:
		return // the namespace exists
	}
	e := space[labels[1]]
	if e == nil {
		r.code = dnsmessage.RCodeNameError
		return
	}
	base := labels[1] + "." + labels[0] + ".svc." + r.zone
	switch rest := labels[2:]; {
	case e.external != "":
		r.external(e, rest)
	case len(rest) == 0:
		r.service(e, base)
	case strings.HasPrefix(rest[0], "_") && rest[0] != zoneLabel:
		r.ports(e, rest, base)
	case e.headless && rest[0] == zoneLabel:
		r.inZone(e, rest[1:], base)
	case e.headless && len(rest) == 1:
		r.host(e, rest[0], base)
	default:
		r.code = dnsmessage.RCodeNameError
	}
}

// service answers for the name of a Service.
func (r *resolver) service(e *entry, base string) {
	if !e.headless {
		if len(e.clusterIPs) == 0 {
			r.code = dnsmessage.RCodeNameError // it has none yet
			return
		}
		r.addresses(e.clusterIPs)
		r.behind(e, base, e.ports)
		return
	}
	r.endpoints(e, r.near(e, r.place), base)
}

// near returns the ready endpoints of a headless Service that a client may use.
func (r *resolver) near(e *entry, place policy.Place) (found []service.Endpoint) {
	for _, ready := range e.ready {
		found = append(found, place.Near(ready, e.keys)...)
	}
	return found
}

// endpoints answers with the addresses or ports of endpoints; without any, the name does not
// exist.
func (r *resolver) endpoints(e *entry, list []service.Endpoint, base string) {
	if len(list) == 0 {
		r.code = dnsmessage.RCodeNameError
		return
	}
	var addresses []netip.Addr
	for i := range list {
		if a := list[i].Addr.Addr(); r.wants(typeOf(a)) {
			addresses = append(addresses, a)
		}
	}
	start := int(uint64(r.turn) * uint64(len(addresses)) >> 32)
	r.addresses(addresses[start:])
	r.addresses(addresses[:start])
	r.at(e, list, base, func(port) bool { return true })
}

// addresses adds those of the family that the question is for.
func (r *resolver) addresses(list []netip.Addr) {
	for _, a := range list {
		if kind := typeOf(a); r.wants(kind) {
			r.add(kind, a.AsSlice())
		}
	}
}

func typeOf(a netip.Addr) dnsmessage.Type {
	if a.Is4() {
		return dnsmessage.TypeA
	}
	return dnsmessage.TypeAAAA
}

// host answers for the name of an endpoint of a headless Service.
func (r *resolver) host(e *entry, label, base string) {
	found := e.pick(func(h *service.Endpoint) bool { return e.hosts[h.Addr.Addr()].label() == label })
	r.endpoints(e, found, base)
}

// zoneLabel separates a Service's name from the zone whose endpoints are asked for, as in
// CoreDNS: ZONE.pin._zone.SERVICE has those in the zone alone, ZONE.prefer._zone.SERVICE
// has all if none is ready in the zone. The name exists also without any.
const zoneLabel = "_zone"

func (r *resolver) inZone(e *entry, labels []string, base string) {
	if len(labels) < 2 || labels[0] != "pin" && labels[0] != "prefer" {
		r.code = dnsmessage.RCodeNameError
		return
	}
	zone := slices.Clone(labels[1:])
	slices.Reverse(zone)
	name := strings.Join(zone, ".")
	found := e.pick(func(h *service.Endpoint) bool { return strings.EqualFold(h.Zone(), name) })
	if len(found) == 0 && labels[0] == "prefer" {
		found = e.pick(func(*service.Endpoint) bool { return true })
	}
	if len(found) > 0 {
		r.endpoints(e, found, base)
	}
}

// ports answers for _PORT._PROTOCOL of a Service. labels has the protocol first.
func (r *resolver) ports(e *entry, labels []string, base string) {
	protocol := strings.TrimPrefix(labels[0], "_")
	found := slices.DeleteFunc(slices.Clone(e.ports), func(p port) bool {
		return p.name == "" || p.protocol != protocol || len(labels) > 1 && "_"+p.name != labels[1]
	})
	switch {
	case len(found) == 0, len(labels) > 2:
		r.code = dnsmessage.RCodeNameError
		return
	case len(labels) == 1:
		return // the protocol exists
	}
	if !e.headless {
		if len(e.clusterIPs) == 0 {
			r.code = dnsmessage.RCodeNameError
		}
		r.behind(e, base, found)
		return
	}
	near := r.near(e, r.place)
	if len(near) == 0 {
		r.code = dnsmessage.RCodeNameError
	}
	r.at(e, near, base, func(p port) bool { return p.name == found[0].name && p.protocol == protocol })
}

// target is what an SRV record leads to, and one of its addresses.
type target struct {
	name string
	port uint16
	addr netip.Addr
}

// behind answers a question for SRV records with ports of a Service with cluster IPs.
func (r *resolver) behind(e *entry, base string, ports []port) {
	if !r.wants(dnsmessage.TypeSRV) {
		return
	}
	var list []target
	for _, p := range ports {
		for _, a := range e.clusterIPs {
			list = append(list, target{base, p.number, a})
		}
	}
	r.targets(list)
}

// at answers a question for SRV records with those ports of endpoints that match.
func (r *resolver) at(e *entry, endpoints []service.Endpoint, base string, match func(port) bool) {
	if !r.wants(dnsmessage.TypeSRV) {
		return
	}
	var list []target
	for i := range endpoints {
		h := e.hosts[endpoints[i].Addr.Addr()]
		for _, p := range h.ports {
			if match(p) {
				list = append(list, target{h.label() + "." + base, p.number, h.Addr.Addr()})
			}
		}
	}
	r.targets(list)
}

// targets adds an SRV record for each name and port, and the addresses. The weights are
// CoreDNS's.
func (r *resolver) targets(list []target) {
	told := make(map[target]bool)
	first := func(t target) bool { before := told[t]; told[t] = true; return !before }
	for _, t := range list {
		if !validName(t.name) {
			continue
		}
		if first(target{name: t.name, port: t.port}) {
			data := []byte{0, 0, 0, byte(max(100/len(list), 1)), byte(t.port >> 8), byte(t.port)} // priority, weight, port
			r.add(dnsmessage.TypeSRV, appendName(data, t.name))
		}
		if first(target{name: t.name, addr: t.addr}) {
			r.extra = append(r.extra, record{t.name, typeOf(t.addr), ttl, t.addr.AsSlice()})
		}
	}
}

// external answers for an ExternalName: an alias, and what it leads to in the zone.
func (r *resolver) external(e *entry, rest []string) {
	if len(rest) > 0 || !validName(e.external) {
		r.code = dnsmessage.RCodeNameError
		return
	}
	r.add(dnsmessage.TypeCNAME, appendName(nil, e.external))
	if r.question.Type == dnsmessage.TypeCNAME || r.question.Type == dnsmessage.TypeALL {
		return
	}
	labels, inside := r.labels(e.external)
	switch {
	case !inside:
		r.alias = e.external
	case r.aliases < mostAliases:
		r.aliases++
		r.owner = e.external
		r.name(labels)
	default:
		r.code = dnsmessage.RCodeServerFailure
	}
}

// pointer answers for the reverse name of an address.
func (v *view) pointer(q dnsmessage.Question, addr netip.Addr) (a answer) {
	owners := v.names.owners(addr)
	if len(owners) == 0 {
		return a
	}
	a.ours = true
	r := &resolver{view: v, question: q, owner: q.Name.String(), answer: &a}
	if !r.wants(dnsmessage.TypePTR) {
		return a
	}
	for _, o := range owners {
		name := o.Name.Name + "." + o.Namespace + ".svc." + v.zone
		if o.host != "" {
			name = o.host + "." + name
		}
		if validName(name) {
			r.add(dnsmessage.TypePTR, appendName(nil, name))
		}
	}
	return a
}

// add adds a record with the owner's name.
func (r *resolver) add(kind dnsmessage.Type, data []byte) {
	r.records = append(r.records, record{r.owner, kind, ttl, data})
}

// reverseAddr returns the address of a lower-case name in in-addr.arpa or ip6.arpa.
func reverseAddr(name string) (a netip.Addr, ok bool) {
	if four, ok := strings.CutSuffix(name, ".in-addr.arpa."); ok {
		parts := strings.Split(four, ".")
		slices.Reverse(parts)
		a, err := netip.ParseAddr(strings.Join(parts, "."))
		return a, err == nil && a.Is4()
	}
	six, ok := strings.CutSuffix(name, ".ip6.arpa.")
	if !ok || len(six) != 63 {
		return a, false
	}
	text := make([]byte, 0, 39)
	for i := 62; i >= 0; i -= 2 {
		if i > 0 && six[i-1] != '.' {
			return a, false
		}
		if text = append(text, six[i]); i%8 == 0 && i > 0 {
			text = append(text, ':')
		}
	}
	a, err := netip.ParseAddr(string(text))
	return a, err == nil
}
