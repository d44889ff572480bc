package service

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"
)

// StoreOptions says whose Store it is. The zero value is a proxy on no
// particular node.
type StoreOptions struct {
	// NodeName is the node that endpoints are local to. Without it none is
	// (A1.12).
	NodeName string
	// ServiceProxyName is the value of the label
	// service.kubernetes.io/service-proxy-name that services for this proxy
	// carry (A1.2). With "", it serves those without the label (A1.1), and
	// ranges of cluster IPs are its own.
	ServiceProxyName string
	// ExternalIPs says which external IPs are served.
	ExternalIPs ExternalIPs
}

// ExternalIPs says which external IPs are served; the zero value: all.
type ExternalIPs struct {
	None   bool
	Ranges []netip.Prefix // if there are any, those in them
}

func (e *ExternalIPs) allow(a netip.Addr) bool {
	return !e.None && (len(e.Ranges) == 0 || slices.ContainsFunc(e.Ranges, func(p netip.Prefix) bool { return p.Contains(a) }))
}

// Store gathers API objects and builds Snapshots. One goroutine owns it: no
// method may run beside another. What it gives out may be read by all.
type Store struct {
	options  StoreOptions
	services map[Name]*state
	owners   map[Name]Name // of each EndpointSlice, its service
	cidrs    map[string][]netip.Prefix
	others   map[Name]*otherSpec
	otherIPs map[netip.Addr]int32 // how many of others have a cluster IP
	problems map[ObjectKey][]Problem
	claims   claims
	hosts    hostAddresses
	aims     aims
	ids      idPool
	ports    []*Port // by PortID
	merger   merger
	last     *Snapshot
}

// state is what the Store knows of one service: its object, its slices, and
// the ports that follow from them.
type state struct {
	name   Name
	spec   *spec // nil while there are only slices
	slices map[string]*slice
	ports  []*Port // as spec.ports; nil until built
	ids    []PortID
	// problems are those of spec and claims; those of endpoints are not among
	// them.
	problems []string
}

// NewStore returns a Store that knows nothing yet.
func NewStore(options StoreOptions) *Store {
	return &Store{
		options:  options,
		services: make(map[Name]*state),
		owners:   make(map[Name]Name),
		cidrs:    make(map[string][]netip.Prefix),
		others:   make(map[Name]*otherSpec),
		otherIPs: make(map[netip.Addr]int32),
		problems: make(map[ObjectKey][]Problem),
		claims:   newClaims(),
		aims:     newAims(),
		last:     &Snapshot{Node: Node{Name: options.NodeName}, index: &Index[PortID]{}},
	}
}

// Snapshot returns what the last Apply gave.
func (s *Store) Snapshot() *Snapshot { return s.last }

// update is one Apply under way.
type update struct {
	respec    map[*state]*spec // services whose spec changes, with the new one
	endpoints map[*state]struct{}
	rebuild   map[*state]struct{} // services whose addresses may have changed
	nodes     map[string]*Node    // nil for one that is gone
	cidrs     bool
	others    bool
	problems  bool
	ports     bool
	index     ownerEdit
	host      *Host // nil if it does not change
	// Addresses and node ports that mean something else than before and that
	// some endpoint may have.
	aimedAddrs map[netip.Addr]struct{}
	aimedPorts map[uint16]struct{}
}

// Apply takes a change and gives the Snapshot that follows, which is the same
// pointer when nothing changed that matters (A1.17). What is deleted goes
// first: an object that is in the change as well is there afterwards. Objects
// that cannot be used become Problems of the Snapshot and never errors.
func (s *Store) Apply(c Change) *Snapshot {
	u := &update{
		respec:    make(map[*state]*spec),
		endpoints: make(map[*state]struct{}),
		rebuild:   make(map[*state]struct{}),
		nodes:     make(map[string]*Node),
		host:      c.Host,
		index:     ownerEdit{EditIndex(s.last.index)},

		aimedAddrs: make(map[netip.Addr]struct{}),
		aimedPorts: make(map[uint16]struct{}),
	}
	s.take(c, u)
	nodes := nextNodes(s.last.Nodes, u.nodes)
	s.respec(u)
	s.rehost(nodes, u)
	s.judgeAgain(u)
	s.build(u)
	return s.publish(nodes, u)
}

// take reads the objects of a change into the update.
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
		s.setSlice(name, parseSlice(es, s.options.NodeName), u)
	}
	for _, n := range c.Nodes {
		node, problems := parseNode(n)
		u.nodes[n.Name] = &node
		if s.isOwn(n.Name) { // the addresses of others are nothing to us
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
	if k.Kind != KindService { // those of services are found when it is built
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

// state finds the state of a service, or begins one.
func (s *Store) state(name Name) *state {
	st, ok := s.services[name]
	if !ok {
		st = &state{name: name, slices: make(map[string]*slice)}
		s.services[name] = st
	}
	return st
}

// setSlice puts a slice in the place of the one of that name; nil removes it.
func (s *Store) setSlice(name Name, sl *slice, u *update) {
	owner, had := s.owners[name]
	if had {
		st := s.services[owner]
		s.count(st, st.slices[name.Name], -1, u)
		delete(st.slices, name.Name)
		u.endpoints[st] = struct{}{}
		delete(s.owners, name)
	}
	var problems []string
	if sl != nil {
		st := s.state(sl.owner)
		st.slices[name.Name] = sl
		s.owners[name] = sl.owner
		s.count(st, sl, 1, u)
		u.endpoints[st] = struct{}{}
		problems = sl.problems
	}
	s.setProblems(ObjectKey{KindEndpointSlice, name}, problems, u)
}

// count takes note of where a slice's endpoints are, or that they are there no
// more. One at an external address of its service is left to answer there itself.
func (s *Store) count(st *state, sl *slice, by int32, u *update) {
	s.aims.count(sl, by)
	for i := range sl.endpoints {
		if a := sl.endpoints[i].Addr.Addr(); s.claims.outer[a] > 0 {
			u.rebuild[st] = struct{}{}
		}
	}
}

// rehost puts the node's addresses in force.
func (s *Store) rehost(nodes *Nodes, u *update) {
	if u.host == nil && nodes == s.last.Nodes {
		return
	}
	host := s.hosts.host
	if u.host != nil {
		host = *u.host
	}
	var changed map[netip.Addr]struct{}
	s.hosts, changed = s.hosts.next(host, nodes, s.options.NodeName)
	for a := range changed {
		s.review(clusterIPKey(a), u)
	}
	s.rebuildAt(changed, u)
}

func (s *Store) setProblems(k ObjectKey, texts []string, u *update) {
	old := s.problems[k]
	if slices.EqualFunc(old, texts, func(p Problem, t string) bool { return p.Text == t }) {
		return
	}
	u.problems = true
	if len(texts) == 0 {
		delete(s.problems, k)
		return
	}
	list := make([]Problem, len(texts))
	for i, t := range texts {
		list[i] = Problem{Object: k.String(), Text: t}
	}
	s.problems[k] = list
}

// respec puts the new specs in force: who has which address, and which port
// has which ID.
func (s *Store) respec(u *update) {
	changed := make([]*state, 0, len(u.respec))
	for st, sp := range u.respec {
		if !reflect.DeepEqual(st.spec, sp) {
			changed = append(changed, st)
		}
	}
	slices.SortFunc(changed, func(a, b *state) int { return compareNames(a.name, b.name) })

	touched, moved := make(map[key]struct{}), make(map[netip.Addr]struct{})
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
		u.rebuild[st] = struct{}{}
	}
	for k := range touched {
		s.settle(k, u)
		s.review(k, u)
	}
	maps.DeleteFunc(moved, func(a netip.Addr, _ struct{}) bool { return s.claims.outer[a] == 0 })
	s.rebuildAt(moved, u)
}

// rebuildAt builds the services that claim one of the addresses.
func (s *Store) rebuildAt(addrs map[netip.Addr]struct{}, u *update) {
	if len(addrs) == 0 {
		return
	}
	for k, list := range s.claims.byKey {
		if k.class == byAddress && in(addrs, netip.AddrFrom16(k.addr).Unmap()) {
			for _, c := range list {
				u.rebuild[c.svc] = struct{}{}
			}
		}
	}
}

// dropPorts frees the IDs of the ports that the next spec has no more.
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

// takeSpec puts a spec in the place of the last one. Ports that stay keep
// their ID and what was built for them.
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

// settle writes a key's owner into the index, if that has such keys. Whoever
// else claims it is built again, as it may have lost or got the address.
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
		u.rebuild[c.svc] = struct{}{}
	}
	if k.class != byNodePort {
		return
	}
	for a := range s.hosts.own { // node ports go before external IPs there
		for _, c := range s.claims.byKey[addrKey(Destination{a, k.port, k.proto})] {
			u.rebuild[c.svc] = struct{}{}
		}
	}
	if c, ok := s.claims.winner(k); ok {
		u.index.enter(k, c.svc.ids[c.port])
	} else {
		u.index.remove(k)
	}
}

// build makes the ports of all services that the update touches.
func (s *Store) build(u *update) {
	for st := range u.rebuild {
		s.buildService(st, true, u)
	}
	for st := range u.endpoints {
		if _, done := u.rebuild[st]; !done {
			s.buildService(st, false, u)
		}
	}
}

// buildService makes the ports of one service; with addresses, also what
// follows from its spec. A port that comes out as it was keeps its pointer.
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
	judge := func(e *Endpoint, at Destination) (ok, mayReturn bool) {
		why, mayReturn := s.judge(st, e, at)
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

// publish makes the Snapshot of what the update left behind. What came and went
// within the update has not changed (A1.18).
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
	if u.cidrs && s.options.ServiceProxyName == "" { // ranges are the default proxy's
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

// ownNode returns this node, which has its name before it has an object.
func (s *Store) ownNode(nodes *Nodes) Node {
	if n := nodes.Get(s.options.NodeName); n != nil {
		return *n
	}
	return Node{Name: s.options.NodeName}
}

func (s *Store) sortedProblems() []Problem {
	keys := slices.SortedFunc(maps.Keys(s.problems), func(a, b ObjectKey) int {
		if a.Kind != b.Kind {
			return int(a.Kind) - int(b.Kind)
		}
		return compareNames(a.Name, b.Name)
	})
	var out []Problem
	for _, k := range keys {
		out = append(out, s.problems[k]...)
	}
	return out
}
