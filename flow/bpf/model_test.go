package bpf

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// The model says what has to become of a packet, slowly and obviously. It follows the
// package comment and RFCs 768, 791, 792, 4443, 8200 and 9293, and computes each checksum
// anew where bpf/ only adds differences. Tests compare both.

// modelTuple is the source and destination of a packet.
type modelTuple struct {
	src, dst netip.AddrPort
	protocol byte
}

func (t modelTuple) swapped() modelTuple { return modelTuple{t.dst, t.src, t.protocol} }

type modelEntry struct {
	flow int
	role KernelRole
}

// modelFlow is one connection or session: m and n are the ports that hidden clients have
// between the hooks and towards the endpoint.
type modelFlow struct {
	client, vip, endpoint, middle, node netip.AddrPort
	masquerade                          bool
	direct                              bool // to the endpoint itself; with masquerade: from the node
	protocol                            byte
	generation, service                 uint32

	state          KernelState
	first          uint32 // sequence number of the client's SYN
	seen           KernelSeen
	firstEnd       KernelSeen
	fin            [2]uint32
	ahead          [2]uint32 // what follows a gap ends there
	end, acked     [2]uint32 // from the client (0), from the endpoint (1)
	bytes, packets [2]uint64
	again, missed  [2]uint32 // segments that came once more, or late
	answered, data bool
	closed         bool
	acknowledged   bool   // the client has completed the handshake
	challenge      uint32 // 0: none
	elsewhere      bool   // the client's packets come by another interface
	moved          bool   // userspace has chosen its port between the hooks
	own            bool   // isOnNode, and no client's that rules masquerade
}

// tuple is what the packets of an entry get.
func (f *modelFlow) tuple(role KernelRole) modelTuple {
	switch role {
	case KernelRoleTO_ENDPOINT:
		return modelTuple{f.middle, f.endpoint, f.protocol}
	case KernelRoleMASQUERADE:
		return modelTuple{f.node, f.endpoint, f.protocol}
	case KernelRoleUNMASQUERADE:
		return modelTuple{f.endpoint, f.middle, f.protocol}
	default:
		return modelTuple{f.vip, f.client, f.protocol}
	}
}

// entries are those of an undisturbed flow.
func (f *modelFlow) entries() map[modelTuple]KernelRole {
	if f.isOnNode() {
		return map[modelTuple]KernelRole{
			{f.middle, f.endpoint, f.protocol}: KernelRoleMASQUERADE,
			{f.endpoint, f.node, f.protocol}:   KernelRoleUNMASQUERADE,
		}
	}
	e := map[modelTuple]KernelRole{
		{f.client, f.vip, f.protocol}:      KernelRoleTO_ENDPOINT,
		{f.endpoint, f.middle, f.protocol}: KernelRoleTO_CLIENT,
	}
	if f.masquerade {
		e[modelTuple{f.middle, f.endpoint, f.protocol}] = KernelRoleMASQUERADE
		e[modelTuple{f.endpoint, f.node, f.protocol}] = KernelRoleUNMASQUERADE
	}
	return e
}

// isOnNode reports whether it is a connection of the node's own.
func (f *modelFlow) isOnNode() bool { return f.direct && f.masquerade }

// modelFragment is what the fragments of a packet share.
type modelFragment struct {
	src, dst netip.Addr
	protocol byte
	id       uint32
}

type modelLoad struct {
	asked, decided, begun, confirmed, opened, ended int
	distrusted                                      bool // userspace decides for a while
}

// modelEvent is what userspace is told.
type modelEvent struct {
	kind                      KernelEventKind
	flow, service, generation uint32
	reason                    KernelReason
	packet                    string
}

type model struct {
	entries   map[modelTuple]modelEntry
	flows     []modelFlow // 0 is none
	served    map[modelTuple]uint32
	relayed   map[modelTuple]bool // until when: true is later
	sessions  map[modelTuple]bool // of the relay
	fragments map[modelFragment][2]uint16
	loads     map[uint32]*modelLoad
	events    []modelEvent
	alive     bool
	stale     bool // the table decides no more

	tables  map[modelTuple]*modelTable
	hash    func(*KernelTuple) uint64     // of the index
	sources map[modelTuple][]netip.Prefix // of destinations that do not admit all clients
	origins []modelOrigin
	spare   []int // free flows, the next one first
	unused  int   // a flow that was taken in vain, or 0
	untold  int   // flows that are too long to be told of
	replies [2]uint16

	mostUndecided, mostUnconfirmed, mostFlows int
	leastSpare                                int

	way *modelWay // nil: no packet takes the shortcut
}

type modelVerdict string

const (
	pass modelVerdict = "pass"
	drop modelVerdict = "drop"
)

// segmentSize is what BPF_PROG_TEST_RUN says about packets with GSO.
const segmentSize = 100

// skbuff is a packet as the kernel shows it to a program.
type skbuff struct {
	frame    []byte
	link     int    // length of the link header
	protocol uint16 // of the network layer
	gso      bool
	partial  bool // the checksum is a device's to complete
	segment  int  // bytes of each datagram's payload, with GSO
	priority uint32

	forwarded bool // it came in at an interface before
	others    bool // its link address is another host's

	checksums []int // where checksums changed that may be 0 and 0xffff alike
}

// ingress returns what has to become of a packet. It changes the frame in place.
func (m *model) ingress(s *skbuff) modelVerdict {
	p, ok := readPacket(s)
	if !ok {
		return pass
	}
	if p.isICMP() {
		return m.icmpError(s, p, KernelRoleTO_ENDPOINT, KernelRoleUNMASQUERADE)
	}
	if !m.joinFragments(p) {
		return pass
	}
	e, ok := m.entries[p.tuple]
	if !ok {
		return m.begin(s, p, 0)
	}
	f := &m.flows[e.flow]
	from := fromEndpoint
	if e.role == KernelRoleTO_ENDPOINT {
		from = fromClient
	}
	if e.role == KernelRoleUNMASQUERADE && f.direct {
		if m.fromEndpoint(s, p, f, e.flow) != translate {
			return drop
		}
		return p.give(s, f, e.role)
	}
	direct := m.direct(s, p, f, from)
	switch e.role {
	case KernelRoleMASQUERADE:
		return pass
	case KernelRoleTO_ENDPOINT:
		if !direct && f.isEnding(p) {
			p.later = true
			if f.protocol == tcp && p.flags&(flagFIN|flagRST) != 0 && f.isBelieved(p, fromClient) {
				f.seen |= KernelSeenCLIENT_LEAVING // the endpoint may have gone
			}
		}
		switch m.fromClient(s, p, f, e.flow) {
		case absorb:
			return drop
		case restart:
			if f.direct { // the client's next connection takes the same way
				m.beginAgain(p, f)
				m.fromClient(s, p, f, e.flow)
				return p.give(s, f, KernelRoleTO_ENDPOINT)
			}
			return m.begin(s, p, uint32(e.flow))
		}
		if direct {
			return m.forward(s, p, f, fromClient)
		}
	case KernelRoleUNMASQUERADE, KernelRoleTO_CLIENT:
		if e.role == KernelRoleTO_CLIENT && f.masquerade {
			return pass // those of the flow are translated at egress, and others are the client's own
		}
		if direct {
			m.fromEndpoint(s, p, f, e.flow)
			return m.forward(s, p, f, fromEndpoint)
		}
		if e.role == KernelRoleTO_CLIENT {
			return pass
		}
	default:
		return pass
	}
	return p.give(s, f, e.role)
}

// egress is ingress for the other hook.
func (m *model) egress(s *skbuff) modelVerdict {
	p, ok := readPacket(s)
	if !ok {
		return pass
	}
	if p.isICMP() {
		return m.icmpError(s, p, KernelRoleTO_CLIENT, KernelRoleMASQUERADE, KernelRoleSTALE)
	}
	if !m.joinFragments(p) {
		return pass
	}
	e, ok := m.entries[p.tuple]
	if !ok {
		return m.fromNode(s, p)
	}
	f := &m.flows[e.flow]
	switch e.role {
	case KernelRoleTO_CLIENT:
		if p.opens() && f.state >= KernelStateCLOSED { // the endpoint is a client itself
			delete(m.entries, p.tuple)
			return pass
		}
		switch m.fromEndpoint(s, p, f, e.flow) {
		case absorb:
			return drop
		case leave:
			return pass
		}
	case KernelRoleMASQUERADE:
		if f.own && s.forwarded {
			return pass // another version has translated it
		}
		f.seen |= KernelSeenPASSED
		if !f.direct && f.isEnding(p) {
			if f.protocol == sctp {
				m.followAssociation(p, f, e.flow, fromClient)
			} else {
				m.follow(s, p, f, e.flow, fromClient)
			}
		}
		if f.direct {
			switch m.fromClient(s, p, f, e.flow) {
			case absorb:
				return drop
			case restart:
				m.beginAgain(p, f)
				m.fromClient(s, p, f, e.flow)
			}
		}
	case KernelRoleSTALE:
		if p.tuple.protocol == tcp && p.has(flagSYN|flagACK) || p.chunks.of[chunkInitAck] {
			m.tell(s, KernelEventKindEVENT_LATE, e.flow, 0)
		}
		return drop
	default:
		return pass
	}
	return p.give(s, f, e.role)
}

// give gives a packet what an entry's packets get.
func (p *modelPacket) give(s *skbuff, f *modelFlow, role KernelRole) modelVerdict {
	if p.tuple.protocol != sctp {
		p.rewrite(s, f.tuple(role))
		return pass
	}
	// Each side's first packet lists its addresses, and passes one of these once.
	hide := (role == KernelRoleTO_ENDPOINT || role == KernelRoleTO_CLIENT) && (p.chunks.of[chunkInit] || p.chunks.of[chunkInitAck])
	if !p.rewriteSCTP(s, f.tuple(role), hide) {
		return drop
	}
	return pass
}

// joinFragments gives later fragments the ports of the first one. It reports false if that
// has not come.
func (m *model) joinFragments(p *modelPacket) bool {
	key := modelFragment{p.tuple.src.Addr(), p.tuple.dst.Addr(), p.tuple.protocol, p.id}
	switch p.fragment {
	case firstFragment:
		m.fragments[key] = [2]uint16{p.tuple.src.Port(), p.tuple.dst.Port()}
	case laterFragment:
		ports, ok := m.fragments[key]
		if !ok {
			return false
		}
		p.tuple.src = netip.AddrPortFrom(key.src, ports[0])
		p.tuple.dst = netip.AddrPortFrom(key.dst, ports[1])
	}
	return true
}

const longestUpcall = 1600

// begin decides about a packet of no flow. before is the flow that had its tuple.
func (m *model) begin(s *skbuff, p *modelPacket, before uint32) modelVerdict {
	id, ok := m.served[modelTuple{dst: p.tuple.dst, protocol: p.tuple.protocol}]
	if !ok {
		if before != 0 {
			delete(m.entries, p.tuple)
		}
		return m.beginDirect(s, p)
	}
	l := m.loads[id]
	single := p.fragment == wholePacket && !s.gso
	first := p.isUDP() && p.fragment != laterFragment || single && p.opens()
	if t := m.sources[modelTuple{dst: p.tuple.dst, protocol: p.tuple.protocol}]; first && t != nil && !slices.ContainsFunc(t, func(r netip.Prefix) bool { return r.Contains(p.tuple.src.Addr()) }) {
		if m.relayed[p.tuple] || m.sessions[p.tuple] && m.alive && p.isUDP() { // A8.3
			if before != 0 {
				delete(m.entries, p.tuple)
			}
			return pass
		}
		return drop // A3.10
	}
	if t := m.tables[modelTuple{dst: p.tuple.dst, protocol: p.tuple.protocol}]; t != nil && first {
		if f := m.decide(s, p, id, t, int(before)); f != nil {
			p.rewrite(s, f.tuple(KernelRoleTO_ENDPOINT))
			return pass
		}
	}
	defer m.tellUnused(s)
	if first && single && m.alive && l.asked-l.decided < m.mostUndecided && !m.relayed[p.tuple] && !m.sessions[p.tuple] &&
		(p.isUDP() || l.begun-l.confirmed < m.mostUnconfirmed) && len(s.frame) <= longestUpcall {
		l.asked++
		m.events = append(m.events, modelEvent{kind: KernelEventKindEVENT_ASK, flow: before, service: id, packet: string(s.frame)})
		return drop
	}
	if p.isUDP() {
		m.relayed[p.tuple] = true
	}
	if before != 0 { // what the client sends next is the relay's too
		delete(m.entries, p.tuple)
	}
	return pass
}

// tellUnused gives a flow back that was taken in vain.
func (m *model) tellUnused(s *skbuff) {
	if m.unused != 0 {
		m.tell(s, KernelEventKindEVENT_UNUSED, m.unused, 0)
		m.unused = 0
	}
}

func (m *model) tell(s *skbuff, kind KernelEventKind, flow int, reason KernelReason) {
	e := modelEvent{kind: kind, flow: uint32(flow), generation: m.flows[flow].generation, reason: reason}
	if kind == KernelEventKindEVENT_LATE {
		if len(s.frame) > longestUpcall {
			return
		}
		e.packet = string(s.frame)
	}
	m.events = append(m.events, e)
}

// icmpError translates an ICMP error about a packet of a flow, in a hook that has roles.
func (m *model) icmpError(s *skbuff, p *modelPacket, roles ...KernelRole) modelVerdict {
	if p.fragment != wholePacket {
		return pass
	}
	q, ok := p.quoted(s)
	if !ok {
		return pass
	}
	answer := q.tuple.swapped()
	e, ok := m.entries[answer]
	here := false
	for _, r := range roles {
		here = here || e.role == r
	}
	if !ok || !here {
		return pass
	}
	f := &m.flows[e.flow]
	if e.role == KernelRoleSTALE {
		return drop
	}
	reason := p.unreachable(s)
	isPort, hears := KernelReason(reason) == KernelReasonREASON_PORT, e.role == KernelRoleTO_CLIENT && !f.direct
	if hears && f.protocol == udp && m.alive && reason >= 0 && (isPort || f.state == KernelStateASKING) {
		quotes := q.isOf(f, f.end[fromClient]) || f.state != KernelStateOPEN && q.isOf(f, f.first)
		if !isPort || p.tuple.src.Addr() != f.endpoint.Addr() || !quotes {
			return drop
		}
	}
	if hears && reason >= 0 && (f.state == KernelStateASKING || f.state == KernelStateMOVING) {
		if f.protocol != udp && q.sequence != f.first {
			return pass // of the client's own connection to the endpoint
		}
		if f.state == KernelStateMOVING {
			return drop // another endpoint is asked
		}
		if m.alive {
			m.tell(s, KernelEventKindEVENT_REFUSED, e.flow, KernelReason(reason))
			return drop
		}
	} else if hears && KernelReason(reason) == KernelReasonREASON_PORT && reason >= 0 && f.protocol == udp && m.alive {
		m.tell(s, KernelEventKindEVENT_UNREACHABLE, e.flow, KernelReasonREASON_PORT)
		return drop
	}
	p.rewriteError(s, q, f.tuple(e.role))
	return pass
}

const (
	icmp4 = 1
	tcp   = 6
	udp   = 17
	icmp6 = 58

	hopByHop = 0
	fragment = 44
	options  = 60
)

// frame.go has the other TCP flags.
const (
	flagFIN = 1
	flagSYN = 2
)

type modelShape int

const (
	wholePacket modelShape = iota
	firstFragment
	laterFragment
)

// modelPacket is a packet that a flow may have. Offsets count from the frame's begin.
type modelPacket struct {
	tuple         modelTuple
	ipv6          bool
	fragment      modelShape
	id            uint32
	network       int // offset of the IP header
	transport     int // offset of what follows IP's headers
	end           int // offset behind the IP packet; padding may follow
	payload       int // length of TCP's or UDP's payload, of SCTP's user data, or a later fragment's
	flags         byte
	sequence, ack uint32 // of SCTP: initiate tag, verification tag
	chunks        modelChunks
	later         bool // egress follows it
}

func (p *modelPacket) has(flags byte) bool { return p.flags&flags == flags }
func (p *modelPacket) isUDP() bool         { return p.tuple.protocol == udp }
func (p *modelPacket) isICMP() bool {
	return p.tuple.protocol == icmp4 || p.tuple.protocol == icmp6
}

// opens reports whether a segment is a SYN, or an INIT, that asks for a connection.
func (p *modelPacket) opens() bool {
	return p.initiates() || p.flags&(flagSYN|flagACK|flagRST|flagFIN) == flagSYN
}

func be16(b []byte) uint16 { return binary.BigEndian.Uint16(b) }
func be32(b []byte) uint32 { return binary.BigEndian.Uint32(b) }

// readPacket reports false for what is not for us: damaged packets, other protocols.
func readPacket(s *skbuff) (*modelPacket, bool) {
	p := &modelPacket{network: s.link}
	if len(s.frame) < s.link {
		return nil, false
	}
	ok := false
	switch s.protocol {
	case 0x0800:
		ok = p.readIPv4(s)
	case 0x86dd:
		ok = p.readIPv6(s)
	}
	if !ok || p.end > len(s.frame) || p.transport > p.end {
		return nil, false
	}
	left := s.frame[p.transport:p.end]
	p.payload = len(left)
	if p.fragment == laterFragment {
		return p, true
	}
	switch p.tuple.protocol {
	case tcp:
		if len(left) < 20 || left[12]>>4 < 5 || len(left) < int(left[12]>>4)*4 {
			return nil, false
		}
		p.payload -= int(left[12]>>4) * 4
		p.sequence, p.ack, p.flags = be32(left[4:]), be32(left[8:]), left[13]
		p.setPorts(left)
	case udp:
		if len(left) < 8 {
			return nil, false
		}
		p.payload -= 8
		p.setPorts(left)
		if !s.gso {
			p.sequence = be32(left[4:]) // length and checksum
		}
		if s.partial {
			p.sequence = p.sequence&^0xffff | uint32(pseudo(p.tuple, len(left))%0xffff)
		}
	case sctp:
		if !p.readSCTP(left) {
			return nil, false
		}
	case icmp4, icmp6:
		if len(left) < 8 || (p.tuple.protocol == icmp6) != p.ipv6 {
			return nil, false
		}
	default:
		return nil, false
	}
	return p, true
}

func (p *modelPacket) setPorts(header []byte) {
	p.tuple.src = netip.AddrPortFrom(p.tuple.src.Addr(), be16(header))
	p.tuple.dst = netip.AddrPortFrom(p.tuple.dst.Addr(), be16(header[2:]))
}

func (p *modelPacket) setAddresses(b []byte, size int) {
	src, _ := netip.AddrFromSlice(b[:size])
	dst, _ := netip.AddrFromSlice(b[size : 2*size])
	p.tuple.src, p.tuple.dst = netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0)
}

func (p *modelPacket) readIPv4(s *skbuff) bool {
	b := s.frame[p.network:]
	if len(b) < 20 || b[0]>>4 != 4 || b[0]&15 < 5 {
		return false
	}
	p.setAddresses(b[12:], 4)
	p.tuple.protocol = b[9]
	p.transport = p.network + int(b[0]&15)*4
	p.end = p.network + int(be16(b[2:]))
	if s.gso {
		p.end = len(s.frame)
	}
	switch offset := be16(b[6:]); {
	case offset&0x1fff != 0:
		p.fragment = laterFragment
	case offset&0x2000 != 0:
		p.fragment = firstFragment
	}
	p.id = uint32(be16(b[4:]))
	return true
}

// readIPv6 knows up to three hop-by-hop and destination options headers, and then a
// fragment header.
func (p *modelPacket) readIPv6(s *skbuff) bool {
	p.ipv6 = true
	b := s.frame[p.network:]
	if len(b) < 40 || b[0]>>4 != 6 {
		return false
	}
	p.setAddresses(b[8:], 16)
	p.end = p.network + 40 + int(be16(b[4:]))
	if s.gso {
		p.end = len(s.frame)
	}
	next, at := b[6], 40
	for i := 0; i < 3 && (next == hopByHop || next == options); i++ {
		if len(b) < at+2 {
			return false
		}
		next, at = b[at], at+8+int(b[at+1])*8
	}
	if next == fragment {
		if len(b) < at+8 {
			return false
		}
		switch offset := be16(b[at+2:]); {
		case offset>>3 != 0:
			p.fragment = laterFragment
		case offset&1 != 0:
			p.fragment = firstFragment
		}
		p.id = be32(b[at+4:])
		next, at = b[at], at+8
	}
	p.tuple.protocol = next
	p.transport = p.network + at
	return true
}
