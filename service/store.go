package service

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"
)

// StoreOptions identify the node and the proxy that a Store works for. The zero
// value is the default proxy on no particular node.
type StoreOptions struct {
	// NodeName is the node whose endpoints are Local. If it is empty, no endpoint
	// is (A1.12).
	NodeName string
	// ServiceProxyName is the label service.kubernetes.io/service-proxy-name of
	// this proxy's Services (A1.2). If it is empty, the proxy serves the Services
	// without the label (A1.1) and owns the ranges of cluster IPs.
	ServiceProxyName string
	// Annotation reports what is wrong with the value of an annotation that others than the
	// Store read. Its name is without the prefix sluice.dev/. Such an annotation is a Problem,
	// and counts as missing. nil reports nothing.
	Annotation func(name, value string) error
	// ExternalIPs restricts the external IPs.
	ExternalIPs ExternalIPs
	// EarlierFirst lets the Service that had an address first keep it, whatever
	// kind of address it is to the other one. It is for sources in which nothing
	// allocates cluster IPs: there a cluster IP may be a slip as well.
	EarlierFirst bool
	// OwnEndpoints lets slices of AskedManager have this node's own addresses. It is for
	// sources that only the node's operator writes.
	OwnEndpoints bool
}

// ExternalIPs selects the external IPs to serve. The zero value selects all.
type ExternalIPs struct {
	None   bool
	Ranges []netip.Prefix // if not empty, serve only external IPs in these
}

func (e *ExternalIPs) allow(a netip.Addr) bool {
	return !e.None && (len(e.Ranges) == 0 || slices.ContainsFunc(e.Ranges, func(p netip.Prefix) bool { return p.Contains(a) }))
}

// Store receives API objects and builds Snapshots. Its methods are not safe for
// concurrent use; the Snapshots are.
type Store struct {
	options  StoreOptions
	services map[Name]*state
	owners   map[Name]Name // service by EndpointSlice
	cidrs    map[string][]netip.Prefix
	others   map[Name]*otherSpec
	otherIPs map[netip.Addr]int32 // number of others by cluster IP
	problems map[ObjectKey][]Problem
	claims   claims
	hosts    hostAddresses
	aims     aims
	ids      idPool
	ports    []*Port // by PortID
	merger   merger
	last     *Snapshot
}

// state is one service: its object, its slices, and the ports built from them.
type state struct {
	name   Name
	spec   *spec // nil while there are only slices
	slices map[string]*slice
	ports  []*Port // parallel to spec.ports; nil until built
	ids    []PortID
	// problems are those of spec and claims, without those of endpoints.
	problems []string
}

// NewStore creates an empty Store.
func NewStore(options StoreOptions) *Store {
	return &Store{
		options:  options,
		services: make(map[Name]*state),
		owners:   make(map[Name]Name),
		cidrs:    make(map[string][]netip.Prefix),
		others:   make(map[Name]*otherSpec),
		otherIPs: make(map[netip.Addr]int32),
		problems: make(map[ObjectKey][]Problem),
		claims:   newClaims(options.EarlierFirst),
		aims:     newAims(),
		last:     &Snapshot{Node: Node{Name: options.NodeName}, index: &Index[PortID]{}},
	}
}

// Snapshot returns the result of the last Apply.
func (s *Store) Snapshot() *Snapshot { return s.last }

// update is the state of one Apply.
type update struct {
	respec    map[*state]*spec // new specs
	endpoints sets.Set[*state]
	rebuild   sets.Set[*state] // services whose addresses may have changed
	nodes     map[string]*Node // nil for a deleted one
	cidrs     bool
	others    bool
	problems  bool
	ports     bool
	index     ownerEdit
	host      *Host // nil if it does not change
	// Addresses and node ports whose owner changed and that some endpoint may have.
	aimedAddrs sets.Set[netip.Addr]
	aimedPorts sets.Set[uint16]
}

// Apply applies a change and returns the new Snapshot, or the same pointer if
// nothing relevant changed (A1.17). It processes deletions first, so an object that
// the change both deletes and contains exists afterwards. Apply returns no errors;
// it reports unusable objects as Problems of the Snapshot.
func (s *Store) Apply(c Change) *Snapshot {
	u := &update{
		respec:    make(map[*state]*spec),
		endpoints: sets.New[*state](),
		rebuild:   sets.New[*state](),
		nodes:     make(map[string]*Node),
		host:      c.Host,
		index:     ownerEdit{EditIndex(s.last.index)},

		aimedAddrs: sets.New[netip.Addr](),
		aimedPorts: sets.New[uint16](),
	}
	s.take(c, u)
	nodes := nextNodes(s.last.Nodes, u.nodes)
	s.respec(u)
	s.rehost(nodes, u)
	s.judgeAgain(u)
	s.build(u)
	return s.publish(nodes, u)
}

// take parses the objects of a change into the update.
func (s *Store) take(c Change, u *update) {
	for _, k := range c.Deleted {
		s.remove(k, u)
	}
	for _, svc := range c.Services {
		name := Name{Namespace: svc.Namespace, Name: svc.Name}
		u.respec[s.state(name)] = parseService(svc, &s.options)
	}
	for _, es := range c.EndpointSlices {
		name := Name{Namespace: es.Namespace, Name: es.Name}
		s.setSlice(name, parseSlice(es, &s.options), u)
	}
	for _, es := range c.Slices {
		s.setSlice(Name{Namespace: es.Namespace, Name: es.Name}, es.parsed, u)
	}
	for _, n := range c.Nodes {
		node, problems := parseNode(n)
		u.nodes[n.Name] = &node
		if s.isOwn(n.Name) { // other nodes' addresses do not concern this node
			s.setProblems(ObjectKey{KindNode, Name{Name: n.Name}}, problems, u)
		}
	}
	for _, sc := range c.ServiceCIDRs {
		list, problems := parseServiceCIDR(sc)
		s.setProblems(ObjectKey{KindServiceCIDR, Name{Name: sc.Name}}, problems, u)
		if old, ok := s.cidrs[sc.Name]; !ok || !slices.Equal(old, list) {
			s.cidrs[sc.Name] = list
			u.cidrs = true
		}
	}
}

func (s *Store) remove(k ObjectKey, u *update) {
	if k.Kind != KindService { // buildService sets the problems of services
		s.setProblems(k, nil, u)
	}
	switch k.Kind {
	case KindService:
		if st, ok := s.services[k.Name]; ok {
			u.respec[st] = nil
		}
	case KindEndpointSlice:
		s.setSlice(k.Name, nil, u)
	case KindNode:
		u.nodes[k.Name.Name] = nil
	case KindServiceCIDR:
		if _, ok := s.cidrs[k.Name.Name]; ok {
			delete(s.cidrs, k.Name.Name)
			u.cidrs = true
		}
	}
}

// state returns the state of a service and creates it if necessary.
func (s *Store) state(name Name) *state {
	st, ok := s.services[name]
	if !ok {
		st = &state{name: name, slices: make(map[string]*slice)}
		s.services[name] = st
	}
	return st
}

// setSlice adds or replaces a slice; nil removes it.
func (s *Store) setSlice(name Name, sl *slice, u *update) {
	owner, had := s.owners[name]
	if had {
		st := s.services[owner]
		s.count(st, st.slices[name.Name], -1, u)
		delete(st.slices, name.Name)
		u.endpoints.Insert(st)
		delete(s.owners, name)
	}
	var problems []string
	if sl != nil {
		st := s.state(sl.owner)
		st.slices[name.Name] = sl
		s.owners[name] = sl.owner
		s.count(st, sl, 1, u)
		u.endpoints.Insert(st)
		problems = sl.problems
	}
	s.setProblems(ObjectKey{KindEndpointSlice, name}, problems, u)
}

// count adds the endpoints of a slice to aims with by = 1 and removes them with -1.
// It schedules the service if an endpoint has an external address of it: such an
// endpoint answers there itself.
func (s *Store) count(st *state, sl *slice, by int32, u *update) {
	s.aims.count(sl, by)
	for i := range sl.endpoints {
		if a := sl.endpoints[i].Addr.Addr(); s.claims.outer[a] > 0 {
			u.rebuild.Insert(st)
		}
	}
}

// rehost applies a change of the node's addresses.
func (s *Store) rehost(nodes *Nodes, u *update) {
	if u.host == nil && nodes == s.last.Nodes {
		return
	}
	host := s.hosts.host
	if u.host != nil {
		host = *u.host
	}
	var changed sets.Set[netip.Addr]
	s.hosts, changed = s.hosts.next(host, nodes, s.options.NodeName)
	for a := range changed {
		s.review(clusterIPKey(a), u)
	}
	s.rebuildAt(changed, u)
}

// respec applies the new specs: it assigns addresses to services and IDs to ports.
func (s *Store) respec(u *update) {
	changed := make([]*state, 0, len(u.respec))
	for st, sp := range u.respec {
		if !reflect.DeepEqual(st.spec, sp) {
			changed = append(changed, st)
		}
	}
	slices.SortFunc(changed, func(a, b *state) int { return a.name.Compare(b.name) })

	touched, moved := sets.New[key](), sets.New[netip.Addr]()
	s.claims.now++
	defer clear(s.claims.earlier)
	for _, st := range changed {
		s.claims.withdraw(st, touched)
	}
	for _, st := range changed {
		s.dropPorts(st, u.respec[st], u)
	}
	for _, st := range changed {
		s.takeSpec(st, u.respec[st])
		s.noteOther(st, u.respec[st], moved, u)
		s.claims.enter(st, touched)
		u.rebuild.Insert(st)
	}
	for k := range touched {
		s.settle(k, u)
		s.review(k, u)
	}
	maps.DeleteFunc(moved, func(a netip.Addr, _ sets.Empty) bool { return s.claims.outer[a] == 0 })
	s.rebuildAt(moved, u)
}

// rebuildAt schedules the services that claim one of the addresses.
func (s *Store) rebuildAt(addrs sets.Set[netip.Addr], u *update) {
	if len(addrs) == 0 {
		return
	}
	for k, list := range s.claims.byKey {
		if k.class == byAddress && addrs.Has(netip.AddrFrom16(k.addr).Unmap()) {
			for _, c := range list {
				u.rebuild.Insert(c.svc)
			}
		}
	}
}

// dropPorts frees the IDs of ports that the next spec does not have.
func (s *Store) dropPorts(st *state, next *spec, u *update) {
	if st.spec == nil {
		return
	}
	for i, p := range st.spec.ports {
		if next == nil || !next.hasPort(p.name, p.protocol) {
			s.ids.put(st.ids[i])
			s.ports[st.ids[i]] = nil
			u.ports = true
		}
	}
}

// takeSpec replaces a spec. Ports in both specs keep their ID and what was built
// for them.
func (s *Store) takeSpec(st *state, next *spec) {
	var ports []*Port
	var ids []PortID
	if next != nil {
		for _, p := range next.ports {
			id, port, ok := st.find(p)
			if !ok {
				id = s.ids.get()
				for int(id) >= len(s.ports) {
					s.ports = append(s.ports, nil)
				}
			}
			ids = append(ids, id)
			ports = append(ports, port)
		}
	}
	st.spec, st.ports, st.ids = next, ports, ids
}

func (st *state) find(p portSpec) (PortID, *Port, bool) {
	if st.spec == nil {
		return 0, nil, false
	}
	for i, o := range st.spec.ports {
		if o.name == p.name && o.protocol == p.protocol {
			return st.ids[i], st.ports[i], true
		}
	}
	return 0, nil, false
}

// settle updates the index with the owner of a key. It schedules all services that
// claim the key, because they may have gained or lost it.
func (s *Store) settle(k key, u *update) {
	if k.class == byClusterIP {
		if s.claims.clusterIPs[k] > 0 {
			u.index.enter(k, 0)
		} else {
			u.index.remove(k)
		}
		return
	}
	for _, c := range s.claims.byKey[k] {
		u.rebuild.Insert(c.svc)
	}
	if k.class != byNodePort {
		return
	}
	for a := range s.hosts.own { // a node port takes precedence over an external IP that is the node's address
		for _, c := range s.claims.byKey[addrKey(Destination{a, k.port, k.proto})] {
			u.rebuild.Insert(c.svc)
		}
	}
	if c, ok := s.claims.winner(k); ok {
		u.index.enter(k, c.svc.ids[c.port])
	} else {
		u.index.remove(k)
	}
}

// build builds the ports of all scheduled services.
func (s *Store) build(u *update) {
	for st := range u.rebuild {
		s.buildService(st, true, u)
	}
	for st := range u.endpoints {
		if !u.rebuild.Has(st) {
			s.buildService(st, false, u)
		}
	}
}

// buildService builds the ports of one service; with addresses, also the parts that
// follow from its spec. An unchanged port keeps its pointer.
func (s *Store) buildService(st *state, addresses bool, u *update) {
	if st.spec == nil {
		s.setProblems(ObjectKey{KindService, st.name}, nil, u)
		if len(st.slices) == 0 {
			delete(s.services, st.name)
		}
		return
	}
	inOrder := st.sortedSlices()
	if addresses {
		st.problems = st.spec.problems
	}
	var refused refusals
	judge := func(sl *slice, e *Endpoint, at Destination) (ok, mayReturn bool) {
		why, mayReturn := s.judge(st, sl, e, at)
		if why != "" {
			refused.add(at, why)
		}
		return why == "", mayReturn
	}
	for i := range st.spec.ports {
		old := st.ports[i]
		next := &Port{}
		if addresses || old == nil {
			st.problems = s.fill(next, st, i, st.problems)
		} else {
			*next = *old
		}
		for f := range next.Families {
			v := &next.Families[f]
			if !v.Exists {
				continue
			}
			var before []Endpoint
			if old != nil {
				before = old.Families[f].Endpoints
			}
			v.Endpoints = s.merger.merge(inOrder, Family(f), next.Name.Port, next.Name.Protocol, before, judge)
			for _, at := range s.merger.disputed {
				refused.note(fmt.Sprintf("endpoint %s/%s is ready by one entry of its slices, and not ready by another: it is used (A1.13)", at, next.Name.Protocol))
			}
			if len(inOrder) == 1 {
				inOrder[0].share(Family(f), v.Endpoints)
			}
		}
		if old != nil && old.equal(next) {
			continue
		}
		st.ports[i] = next
		s.ports[next.ID] = next
		u.ports = true
	}
	s.setProblems(ObjectKey{KindService, st.name}, slices.Concat(st.problems, refused.problems()), u)
}

func (st *state) sortedSlices() []*slice {
	out := make([]*slice, 0, len(st.slices))
	for _, name := range slices.Sorted(maps.Keys(st.slices)) {
		out = append(out, st.slices[name])
	}
	return out
}

// publish builds the Snapshot after the update. An object that was added and
// deleted within the update leaves no trace (A1.18).
func (s *Store) publish(nodes *Nodes, u *update) *Snapshot {
	next, changed := *s.last, u.ports
	if u.ports {
		next.Ports = slices.Clone(s.ports)
	}
	if index := u.index.Index(); index != next.index {
		next.index, changed = index, true
	}
	if nodes != next.Nodes {
		next.Nodes, changed = nodes, true
		next.Node = s.ownNode(nodes)
	}
	if u.cidrs && s.options.ServiceProxyName == "" { // the default proxy owns the ranges
		if list := joinServiceCIDRs(s.cidrs); !slices.Equal(list, next.ServiceCIDRs) {
			next.ServiceCIDRs, changed = list, true
		}
	}
	if u.others {
		if others := s.othersOf(); !maps.Equal(others, next.Others) {
			next.Others, changed = others, true
		}
	}
	if u.problems {
		if list := s.sortedProblems(); !slices.Equal(list, next.Problems) {
			next.Problems, changed = list, true
		}
	}
	if changed {
		s.last = &next
	}
	return s.last
}

func (s *Store) isOwn(node string) bool { return node != "" && node == s.options.NodeName }

// ownNode returns this node. Without a Node object it has only its name.
func (s *Store) ownNode(nodes *Nodes) Node {
	if n := nodes.Get(s.options.NodeName); n != nil {
		return *n
	}
	return Node{Name: s.options.NodeName}
}
