package bpf

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// modelTable is what the table in BPF knows about a destination.
type modelTable struct {
	endpoints   []netip.AddrPort
	forPods     []netip.AddrPort
	turn        uint32
	hidesPods   bool
	hidesOthers bool
	random      bool // of one endpoint, so that the model knows which
	affinity    bool
	asksNew     bool                    // with affinity
	pins        map[netip.Addr]modelPin // of affinity
	group       KernelSet
}

// modelPin is a client that session affinity remembers.
type modelPin struct {
	endpoint netip.AddrPort
	expired  bool
	used     uint64
}

// remembered returns the endpoint that session affinity gives a client, or false.
func (m *model) remembered(t *modelTable, endpoints []netip.AddrPort, client netip.Addr) (netip.AddrPort, bool) {
	if pin, ok := t.pins[client]; ok && !pin.expired && slices.Contains(endpoints, pin.endpoint) {
		return pin.endpoint, true // A5.3
	}
	if t.asksNew && m.alive {
		return netip.AddrPort{}, false
	}
	k := KernelTuple{Src: AddressOf(client)}
	copy(k.Dst.Word[:], t.group.Half[:])
	k.Dst.Word[2] = uint32(t.pins[client].used)
	return endpoints[m.hash(&k)>>32*uint64(len(endpoints))>>32], true
}

// modelOrigin is what policy has to know about the clients of a range.
type modelOrigin struct {
	prefix netip.Prefix
	link   uint32
	pod    bool
}

// origin returns what the longest range of an address says.
func (m *model) origin(a netip.Addr) (longest modelOrigin) {
	for _, o := range m.origins {
		if o.prefix.Contains(a) && (!longest.prefix.IsValid() || o.prefix.Bits() > longest.prefix.Bits()) {
			longest = o
		}
	}
	return longest
}

// decide begins a flow without userspace. It returns nil if that has to be asked. before is
// the flow that has the client's tuple, or 0.
func (m *model) decide(s *skbuff, p *modelPacket, service uint32, t *modelTable, before int) *modelFlow {
	l := m.loads[service]
	client, vip := p.tuple.src, p.tuple.dst
	from := m.origin(client.Addr())
	endpoints, hides := t.endpoints, t.hidesOthers
	if from.pod {
		endpoints, hides = t.forPods, t.hidesPods
	}
	middle := client
	if m.isReply(client.Port()) {
		middle = netip.AddrPortFrom(client.Addr(), FirstPort+client.Port()%(LastPort-FirstPort+1))
	}
	switch {
	case m.stale, l.distrusted && m.alive, // an endpoint has just failed
		l.opened-l.ended >= m.mostFlows && len(m.spare) <= m.leastSpare, p.isUDP() && (m.relayed[p.tuple] || m.alive && m.sessions[p.tuple]), m.isReply(middle.Port()),
		!p.isUDP() && l.begun-l.confirmed >= m.mostUnconfirmed,
		len(endpoints) == 0, client.Addr() == vip.Addr():
		return nil
	}
	endpoint := endpoints[t.turn%uint32(len(endpoints))]
	switch {
	case t.affinity:
		var ok bool
		if endpoint, ok = m.remembered(t, endpoints, client.Addr()); !ok {
			return nil
		}
	case !t.random:
		t.turn++
	}
	// Of hidden clients, userspace is asked: there is no route by which BPF would find the node's address.
	if hides || endpoint.Addr() == client.Addr() || from.link != 0 && m.origin(endpoint.Addr()).link == from.link || !m.vacate(before) || len(m.spare) == 0 {
		return nil
	}
	index := m.spare[0]
	m.spare = m.spare[1:]
	f := &m.flows[index]
	*f = modelFlow{
		client: client, vip: vip, endpoint: endpoint, middle: middle, node: vip, protocol: p.tuple.protocol,
		generation: f.generation + 1, service: service, first: p.sequence,
	}
	f.end[fromClient], f.acked[fromEndpoint] = f.first+1, f.first+1
	back := modelTuple{endpoint, middle, p.tuple.protocol}
	if _, taken := m.entries[back]; taken {
		m.unused = index
		return nil
	}
	f.state = KernelStateASKING
	m.entries[back] = modelEntry{index, KernelRoleTO_CLIENT}
	m.entries[p.tuple] = modelEntry{index, KernelRoleTO_ENDPOINT}
	l.opened++
	if !p.isUDP() {
		l.begun++
	}
	begun := modelEvent{kind: KernelEventKindEVENT_BEGUN, flow: uint32(index), generation: f.generation}
	if p.fragment == wholePacket && !s.gso && len(s.frame) <= longestUpcall {
		begun.service, begun.packet = service, string(s.frame)
	}
	m.events = append(m.events, begun)
	m.fromClient(s, p, f, index)
	return f
}

// isReply reports whether steering takes replies to a port for the relay's.
func (m *model) isReply(port uint16) bool {
	return m.replies[1] != 0 && port >= m.replies[0] && port <= m.replies[1]
}

// vacate has a closed connection make room for the client's next one. It reports false if
// userspace has to do that. Of flow 0, which is none, there is nothing to do.
func (m *model) vacate(index int) bool {
	f := &m.flows[index]
	if index == 0 {
		return true
	}
	if f.state != KernelStateCLOSED {
		return false
	}
	for tuple := range f.entries() {
		// The way back of an endpoint that was given up belongs to an index of its own.
		if e := m.entries[tuple]; e.flow == index && e.role != KernelRoleSTALE {
			delete(m.entries, tuple)
		}
	}
	f.state = KernelStateVACATED
	return true
}

// tables has the table decide about some destinations, with so many spare flows.
func (g *generator) tables(spare int) {
	m := g.m
	m.sources = make(map[modelTuple][]netip.Prefix)
	m.tables, m.spare, m.origins, m.unused = make(map[modelTuple]*modelTable), nil, nil, 0
	m.mostFlows, m.leastSpare = pick(g, 1, 8, 8, 100), pick(g, 0, 1, spare, 100)
	m.replies = pick(g, [2]uint16{}, [2]uint16{20000, 30000}, [2]uint16{9000, 30000})
	for range spare {
		m.spare = append(m.spare, len(m.flows))
		m.flows = append(m.flows, modelFlow{generation: g.Uint32()})
	}
	for range g.IntN(6) {
		a := g.addr(g.one(2))
		prefix, _ := a.Prefix(a.BitLen() - pick(g, 0, 4, 8, 12, 15, 16, 20))
		if !slices.ContainsFunc(m.origins, func(o modelOrigin) bool { return o.prefix == prefix }) {
			m.origins = append(m.origins, modelOrigin{prefix, g.Uint32N(3), g.one(2)})
		}
	}
	for i := range m.flows {
		if f := &m.flows[i]; f.state != KernelStateFREE && g.one(8) {
			ranges := []netip.Prefix{}
			for range g.IntN(4) {
				a := pick(g, f.client.Addr(), g.addr(f.vip.Addr().Is6()))
				prefix, _ := a.Prefix(a.BitLen() - pick(g, 0, 1, 8, 15, 16, 20))
				ranges = append(ranges, prefix)
			}
			m.sources[modelTuple{dst: f.vip, protocol: f.protocol}] = ranges
		}
	}
	for i := range m.flows {
		f := &m.flows[i]
		if f.state == KernelStateFREE || f.protocol == sctp || g.one(3) { // userspace decides about SCTP
			continue
		}
		t := &modelTable{turn: pick(g, 0, 1<<32-1, g.Uint32()), hidesPods: g.one(4), hidesOthers: g.one(4)}
		for range g.IntN(4) {
			e := g.addrPort(f.vip.Addr().Is6())
			if other := &m.flows[1+g.IntN(len(m.flows)-1)]; other.state != KernelStateFREE && other.vip.Addr().Is6() == e.Addr().Is6() {
				e = other.endpoint // ways back that are taken
			}
			t.endpoints = append(t.endpoints, e)
		}
		t.forPods = t.endpoints[:g.IntN(len(t.endpoints)+1)]
		if len(t.endpoints) == 1 && g.one(2) {
			t.random, t.turn = true, 0
		}
		if t.affinity = len(t.endpoints) > 0 && g.one(3); t.affinity {
			t.pins, t.asksNew = make(map[netip.Addr]modelPin), g.one(3)
			for range g.IntN(4) {
				client := pick(g, f.client.Addr(), g.addr(f.vip.Addr().Is6()), m.flows[1+g.IntN(len(m.flows)-1)].client.Addr())
				if client.IsValid() {
					t.pins[client] = modelPin{endpoint: pick(g, t.endpoints[0], t.endpoints[g.IntN(len(t.endpoints))], f.endpoint), expired: g.one(4)}
				}
			}
		}
		m.tables[modelTuple{dst: f.vip, protocol: f.protocol}] = t
	}
}

// loadTables puts the model's tables into the kernel.
func (x *tested) loadTables(check func(error)) {
	for _, k := range x.slots {
		check(x.Maps.Places.Delete(k))
	}
	for _, k := range x.ranges {
		check(x.Maps.Origins.Delete(k))
	}
	for _, k := range x.sources {
		_ = x.Maps.Ranges.Delete(k) // perhaps there twice
	}
	for _, k := range x.members {
		_ = x.Maps.Members.Delete(k) // an endpoint may be there twice
	}
	for _, k := range x.clients {
		check(x.Maps.Clients.Delete(k))
	}
	x.slots, x.ranges, x.sources, x.clients, x.members = nil, nil, nil, nil, nil
	for _, o := range x.m.origins {
		k, v := OriginOf(o.prefix), KernelOrigin{Link: o.link}
		if o.pod {
			v.Pod = 1
		}
		check(x.Maps.Origins.Put(k, v))
		x.ranges = append(x.ranges, k)
	}
	for i, index := range x.m.spare {
		x.Spares.ring[i].Flow = uint64(index)
	}
	c := x.Control
	c.Taken, c.Given, c.SpareMask, c.Untold = 0, uint64(len(x.m.spare)), uint32(len(x.Spares.ring)-1), 0
	c.MostFlows, c.LeastSpare = uint32(x.m.mostFlows), uint32(x.m.leastSpare)
	c.FirstReply, c.LastReply = x.m.replies[0], x.m.replies[1]
}

// served returns what the kernel has of a destination.
func (x *tested) servedOf(key modelTuple, id uint32, check func(error)) KernelServed {
	s := KernelServed{Service: id}
	if ranges, is := x.m.sources[key]; is {
		x.list++
		s.Sources = KernelSet{Half: [2]uint32{x.list, pick(x.generator, 0, x.list)}}
		for _, r := range ranges {
			k := RangeOf(s.Sources, r)
			check(x.Maps.Ranges.Put(k, uint32(1)))
			x.sources = append(x.sources, k)
		}
	}
	t := x.m.tables[key]
	if t == nil {
		return s
	}
	x.list++
	s.List, s.Count, s.Turn = x.list, uint32(len(t.endpoints)), t.turn
	if t.hidesPods {
		s.Options |= KernelDecidingHIDE_PODS
	}
	if t.hidesOthers {
		s.Options |= KernelDecidingHIDE_OTHERS
	}
	if t.random {
		s.Options |= KernelDecidingDECIDE_RANDOM
	}
	if t.affinity {
		t.group = KernelSet{Half: [2]uint32{x.list, 7}}
		s.Group, s.Window = t.group, uint64(time.Hour)
		if t.asksNew {
			s.Options |= KernelDecidingASK_NEW
		}
		for client, pin := range t.pins {
			k := KernelClient{Group: t.group, Addr: AddressOf(client)}
			v := KernelPin{Addr: AddressOf(pin.endpoint.Addr()), Port: Wire(pin.endpoint.Port()), Used: uint64(sys.Monotonic() - int64(time.Minute))}
			if pin.expired {
				v.Used -= uint64(time.Hour)
			}
			pin.used = v.Used
			t.pins[client] = pin
			check(x.Maps.Clients.Put(k, v))
			x.clients = append(x.clients, k)
		}
	}
	x.list++
	s.PodsList, s.PodsCount = x.list, uint32(len(t.forPods))
	x.putList(s.List, t, t.endpoints, check)
	x.putList(s.PodsList, t, t.forPods, check)
	return s
}

// putList puts a list of endpoints into the kernel.
func (x *tested) putList(list uint32, t *modelTable, endpoints []netip.AddrPort, check func(error)) {
	for i, e := range endpoints {
		k := KernelSlot{List: list, Number: uint32(i)}
		check(x.Maps.Places.Put(k, KernelPlace{Addr: AddressOf(e.Addr()), Port: Wire(e.Port())}))
		x.slots = append(x.slots, k)
		if t.affinity {
			k := KernelMember{List: list, Port: Wire(e.Port()), Addr: AddressOf(e.Addr())}
			check(x.Maps.Members.Put(k, uint32(i)))
			x.members = append(x.members, k)
		}
	}
}
