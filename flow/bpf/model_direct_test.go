package bpf

import "net/netip"

// What the model knows of clients that ask an endpoint itself.

// beginDirect gives the client another port if the endpoint knows its own one by a flow.
func (m *model) beginDirect(s *skbuff, p *modelPacket) modelVerdict {
	e := m.entries[p.tuple.swapped()]
	other := &m.flows[e.flow]
	known := e.role == KernelRoleSTALE ||
		e.role == KernelRoleTO_CLIENT && !other.masquerade && (other.state >= KernelStateOPEN || other.seen&KernelSeenPASSED != 0)
	if p.isUDP() {
		known = known && !(s.others && other.elsewhere)
	} else {
		known = known && p.sequence != other.first
	}
	if p.fragment != wholePacket || !p.isUDP() && !p.opens() || !known || len(m.spare) == 0 || 4*len(m.spare) < m.mostFlows {
		return pass
	}
	return m.redirect(s, p, KernelRoleTO_ENDPOINT)
}

// fromNode gives the node, or a client that rules masquerade, another port if a hidden client's flow has
// its own one towards an endpoint.
func (m *model) fromNode(s *skbuff, p *modelPacket) modelVerdict {
	e := m.entries[p.tuple.swapped()]
	port, isTCP := p.tuple.src.Port(), p.tuple.protocol == tcp
	known := e.role == KernelRoleUNMASQUERADE && !m.flows[e.flow].direct && !(isTCP && m.flows[e.flow].first == p.sequence)
	looks := isTCP || !s.forwarded && port >= FirstPort && port <= LastPort
	if !looks || p.fragment == laterFragment || !p.isUDP() && !p.opens() || !known || len(m.spare) == 0 || 4*len(m.spare) < m.mostFlows {
		return pass
	}
	return m.redirect(s, p, KernelRoleMASQUERADE)
}

// redirect begins a flow whose first packet has a role.
func (m *model) redirect(s *skbuff, p *modelPacket, role KernelRole) modelVerdict {
	index := m.spare[0]
	m.spare = m.spare[1:]
	f := &m.flows[index]
	*f = modelFlow{
		client: p.tuple.src, vip: p.tuple.dst, endpoint: p.tuple.dst, node: p.tuple.dst, middle: p.tuple.src, protocol: p.tuple.protocol,
		direct: true, masquerade: role == KernelRoleMASQUERADE, generation: f.generation + 1, first: p.sequence,
		own: role == KernelRoleMASQUERADE && !s.forwarded,
	}
	f.elsewhere = f.own // no interface is the client's
	f.end[fromClient], f.acked[fromEndpoint] = f.first+1, f.first+1
	for try := range uint32(4) {
		other := netip.AddrPortFrom(f.client.Addr(), uint16(1024+(uint32(p.tuple.src.Port())+try*977)%(9999-1024+1)))
		back := modelTuple{f.endpoint, other, f.protocol}
		if _, taken := m.entries[back]; taken || m.isReply(other.Port()) {
			continue
		}
		answer := KernelRoleTO_CLIENT
		if f.masquerade {
			f.node, answer = other, KernelRoleUNMASQUERADE
			f.seen |= KernelSeenPASSED
		} else {
			f.middle = other
		}
		f.state = KernelStateASKING
		m.entries[back] = modelEntry{index, answer}
		m.entries[p.tuple] = modelEntry{index, role}
		m.tell(s, KernelEventKindEVENT_DIRECT, index, 0)
		m.fromClient(s, p, f, index)
		return p.give(s, f, role)
	}
	m.tell(s, KernelEventKindEVENT_UNUSED, index, 0)
	return pass
}

// beginAgain has a flow of such a client serve its next connection.
func (m *model) beginAgain(p *modelPacket, f *modelFlow) {
	f.state, f.first, f.firstEnd = KernelStateASKING, p.sequence, 0
	f.end[fromClient], f.acked[fromEndpoint] = f.first+1, f.first+1
	f.seen &= KernelSeenPASSED
}
