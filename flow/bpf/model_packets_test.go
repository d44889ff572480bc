package bpf

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
)

// generator makes worlds and packets at random.
type generator struct {
	*rand.Rand
	m     *model
	ids   []uint32 // of fragmented packets
	plain bool     // IPv6 packets have no extension headers
	hash  func(*KernelTuple) uint64
}

// one reports true in one of n cases.
func (g *generator) one(n int) bool { return g.IntN(n) == 0 }

func pick[T any](g *generator, of ...T) T { return of[g.IntN(len(of))] }

// addr returns an address. BPF_PROG_TEST_RUN takes a packet's protocol from where Ethernet
// has it, bytes 12 and 13. There the sources of packets without a link header have these.
func (g *generator) addr(ipv6 bool) netip.Addr {
	if ipv6 {
		return netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 0x86, 0xdd, 6: byte(g.Uint32()), 15: byte(g.Uint32())})
	}
	return netip.AddrFrom4([4]byte{8, 0, byte(g.Uint32()), byte(g.Uint32())})
}

func (g *generator) port() uint16 { return uint16(pick(g, 0, 53, 80, 65535, g.IntN(65536))) }

func (g *generator) addrPort(ipv6 bool) netip.AddrPort {
	return netip.AddrPortFrom(g.addr(ipv6), g.port())
}

// world makes flows in all states, and Services without any.
func (g *generator) world(flows int) {
	g.ids = nil
	m := &model{
		hash:    g.hash,
		entries: make(map[modelTuple]modelEntry), flows: make([]modelFlow, flows+1),
		served: make(map[modelTuple]uint32), relayed: make(map[modelTuple]bool), sessions: make(map[modelTuple]bool),
		fragments: make(map[modelFragment][2]uint16), loads: make(map[uint32]*modelLoad),
		alive: !g.one(5), stale: g.one(10), mostUndecided: g.IntN(40), mostUnconfirmed: 16,
	}
	g.m = m
	m.loads[0] = &modelLoad{} // of no Service
	for id := range uint32(4) {
		m.loads[id+1] = &modelLoad{begun: g.IntN(20), opened: g.IntN(6), distrusted: g.one(6)}
	}
	for i := 1; i <= flows; i++ {
		m.flows[i] = g.flow(g.one(2), pick(g, byte(tcp), udp, sctp))
		f := &m.flows[i]
		for t, role := range f.entries() {
			if role == KernelRoleTO_CLIENT && g.one(12) {
				role = KernelRoleSTALE
			}
			m.entries[t] = modelEntry{i, role}
		}
		if !f.direct {
			m.served[modelTuple{dst: f.vip, protocol: f.protocol}] = f.service
		}
		if g.one(3) { // a client whose session the relay has
			f := g.flow(g.one(2), udp)
			m.served[modelTuple{dst: f.vip, protocol: udp}] = f.service
			t := modelTuple{f.client, f.vip, udp}
			if g.one(2) {
				m.sessions[t] = true
			} else {
				m.relayed[t] = g.one(2)
			}
		}
	}
	g.tables(24)
}

func (g *generator) flow(ipv6 bool, protocol byte) modelFlow {
	f := modelFlow{
		client: g.addrPort(ipv6), vip: g.addrPort(ipv6), endpoint: g.addrPort(ipv6), node: g.addrPort(ipv6),
		masquerade: g.one(2), protocol: protocol, generation: g.Uint32(), service: 1 + g.Uint32N(4),
		state: pick(g, KernelStateASKING, KernelStateMOVING, KernelStateOPEN, KernelStateOPEN, KernelStateCLOSED),
		first: pick(g, g.Uint32(), 1<<32-1, 1<<31, 0),
	}
	f.middle = f.client
	if g.one(2) {
		f.middle = netip.AddrPortFrom(f.client.Addr(), g.port())
	}
	f.end[fromClient], f.acked[fromEndpoint] = f.first+1, f.first+1
	if f.state >= KernelStateOPEN {
		isn := pick(g, g.Uint32(), 1<<32-1, 1<<31-1)
		f.end[fromEndpoint], f.acked[fromClient], f.answered = isn+1, isn, true
	}
	if protocol == udp && g.one(3) { // the first datagram's checksum is a device's to complete
		n := words(f.client.Addr().AsSlice()) + words(f.vip.Addr().AsSlice()) + uint64(f.first>>16) + udp
		f.first = f.first&^0xffff | uint32(n%0xffff)
	}
	if protocol == sctp {
		f.associate(g)
	}
	if f.state == KernelStateCLOSED {
		f.seen, f.closed = KernelSeenCLOSING_TOLD|KernelSeenCLIENT_RST, true
	}
	if g.one(2) {
		f.seen |= KernelSeenKNOWN
	}
	if g.one(2) {
		f.seen |= KernelSeenPASSED
	}
	if f.direct = g.one(6); f.direct {
		f.vip = f.endpoint
	}
	if g.one(2) {
		f.node = netip.AddrPortFrom(f.node.Addr(), FirstPort+uint16(g.IntN(LastPort-FirstPort+1)))
	}
	if f.isOnNode() {
		f.client = netip.AddrPortFrom(f.node.Addr(), f.client.Port())
		f.middle = f.client
	}
	if f.state == KernelStateOPEN && protocol != udp && g.one(3) {
		f.seen |= KernelSeenENDPOINT_FIN
		f.fin[fromEndpoint] = f.end[fromEndpoint] + 1
	}
	if f.state == KernelStateMOVING {
		f.seen |= pick(g, 0, KernelSeenFIRST_WANTED)
	}
	f.elsewhere, f.moved = g.one(4), g.one(3)
	if f.isOnNode() && g.one(2) {
		f.own, f.elsewhere = true, true
	}
	if protocol == tcp && f.state == KernelStateOPEN && g.one(3) {
		f.challenge = g.Uint32()
		f.seen |= pick(g, 0, KernelSeenCHALLENGED)
	}
	for from := range f.ahead {
		if protocol == tcp && f.state >= KernelStateOPEN && g.one(3) {
			f.seen |= aheadMark(from)
			f.ahead[from] = f.end[from] + pick(g, uint32(1), 2, 3, 1000, g.Uint32N(1<<30))
			f.fin[from] = f.ahead[from] + pick(g, uint32(0), 1, 1, 1<<31)
		}
	}
	return f
}

// key is a tuple that has an entry of some role, or one beside it.
func (g *generator) key() (t modelTuple, f *modelFlow, from int) {
	for f == nil || f.state == KernelStateFREE {
		f = &g.m.flows[1+g.IntN(len(g.m.flows)-1)]
	}
	if f.masquerade && g.one(8) { // the node itself
		return modelTuple{f.node, f.endpoint, f.protocol}, f, fromClient
	}
	if g.one(6) { // a new client, or one with a port that it has elsewhere
		for range 3 {
			other := &g.m.flows[1+g.IntN(len(g.m.flows)-1)]
			if other.state != KernelStateFREE && other.vip.Addr().Is6() == f.vip.Addr().Is6() {
				return modelTuple{other.middle, f.vip, f.protocol}, f, fromClient
			}
		}
		return modelTuple{g.addrPort(f.vip.Addr().Is6()), f.vip, f.protocol}, f, fromClient
	}
	switch pick(g, KernelRoleTO_ENDPOINT, KernelRoleTO_CLIENT, KernelRoleMASQUERADE, KernelRoleUNMASQUERADE) {
	case KernelRoleTO_ENDPOINT:
		t = modelTuple{f.client, f.vip, f.protocol}
	case KernelRoleTO_CLIENT:
		t, from = modelTuple{f.endpoint, f.middle, f.protocol}, fromEndpoint
	case KernelRoleMASQUERADE:
		t = modelTuple{f.middle, f.endpoint, f.protocol}
	default:
		t, from = modelTuple{f.endpoint, f.node, f.protocol}, fromEndpoint
	}
	if g.one(12) {
		switch other := g.addrPort(t.src.Addr().Is6()); g.IntN(4) {
		case 0:
			t.src = other
		case 1:
			t.dst = other
		case 2:
			t.src = netip.AddrPortFrom(t.src.Addr(), t.src.Port()+1)
		default:
			t.protocol = pick(g, byte(tcp), udp, sctp)
		}
	}
	return t, f, from
}

// numbers are a segment's flags and sequence numbers, mostly near those of its flow.
func (g *generator) numbers(f *modelFlow, from int) (flags byte, sequence, ack uint32) {
	flags = pick(g, flagACK, flagACK, flagACK, flagACK|8, flagSYN, flagSYN, flagSYN|flagACK, flagSYN|flagACK,
		flagRST, flagRST|flagACK, flagFIN|flagACK, flagFIN|flagACK, flagFIN, byte(g.Uint32()))
	other := 1 - from
	sequence = pick(g, f.end[from], f.end[from], f.end[from], f.ahead[from], f.fin[from], f.acked[other], f.first, f.first+1, f.challenge, g.Uint32())
	ack = pick(g, f.end[other], f.end[other], f.end[other], f.ahead[other], f.fin[other], f.acked[from], f.first+1, f.first+1, g.Uint32())
	if g.one(4) {
		sequence += uint32(g.IntN(5)) - 2
	}
	if g.one(4) {
		ack += uint32(g.IntN(5)) - 2
	}
	return flags, sequence, ack
}

func (g *generator) length() int {
	return pick(g, 0, 0, 1, g.IntN(8), g.IntN(64), g.IntN(1460), pick(g, 150, 1472, 1560+g.IntN(80)))
}

func (g *generator) bytes(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(g.Uint32())
	}
	return b
}

// segment is a TCP segment, a datagram or an SCTP packet, with a checksum of some quality.
func (g *generator) segment(t modelTuple, f *modelFlow, from, length int) []byte {
	b := binary.BigEndian.AppendUint16(nil, t.src.Port())
	b = binary.BigEndian.AppendUint16(b, t.dst.Port())
	at := 6
	if t.protocol == sctp {
		return g.sctpPacket(t, f, from, length)
	}
	if t.protocol == tcp {
		flags, sequence, ack := g.numbers(f, from)
		b = binary.BigEndian.AppendUint32(b, sequence)
		b = binary.BigEndian.AppendUint32(b, ack)
		options := g.IntN(11) * g.IntN(2)
		b = append(b, byte(5+options)<<4, flags, 0xff, 0xff, 0, 0, 0, 0)
		b = append(b, g.bytes(4*options)...)
		at = 16
	} else {
		b = binary.BigEndian.AppendUint16(b, uint16(pick(g, length+8, length+8, length+8, g.IntN(65536))))
		b = append(b, 0, 0)
	}
	b = append(b, g.bytes(length)...)
	g.seal(b, at, t, t.protocol == udp)
	return b
}

// weight is what a tuple adds to the sum of a packet.
func weight(t modelTuple) uint64 {
	n := words(t.src.Addr().AsSlice()) + words(t.dst.Addr().AsSlice()) + uint64(t.src.Port()) + uint64(t.dst.Port())
	return n % 0xffff
}

// seal writes a checksum: right, absent, the pseudo header's alone, or wrong.
func (g *generator) seal(b []byte, at int, t modelTuple, optional bool) {
	pseudo := words(t.src.Addr().AsSlice()) + words(t.dst.Addr().AsSlice()) + uint64(t.protocol) + uint64(len(b))
	n := uint16(0xffff - (pseudo+words(b))%0xffff)
	if n == 0xffff && !optional {
		n = 0
	}
	switch g.IntN(20) {
	case 4:
		// It becomes 0, which UDP writes as 0xffff.
		if e, ok := g.m.entries[t]; ok {
			n = uint16((0xffff + weight(g.m.flows[e.flow].tuple(e.role)) - weight(t)) % 0xffff)
		}
	case 0:
		n = 0
	case 1:
		n = uint16(pseudo % 0xffff)
	case 2:
		n = uint16(g.Uint32())
	case 3:
		n = 0xffff
	}
	binary.BigEndian.PutUint16(b[at:], n)
}

// ip puts IP headers before a payload.
func (g *generator) ip(t modelTuple, payload []byte, shape modelShape, id uint32) []byte {
	if t.src.Addr().Is6() {
		return g.ipv6(t, payload, shape, id)
	}
	var options []byte
	if g.one(8) {
		options = g.bytes(4 * (1 + g.IntN(10)))
	}
	b := []byte{0x45 + byte(len(options)/4), byte(g.Uint32())}
	b = binary.BigEndian.AppendUint16(b, uint16(20+len(options)+len(payload)))
	b = binary.BigEndian.AppendUint16(b, uint16(id))
	offset := uint16(g.IntN(2) * 0x4000)
	switch shape {
	case firstFragment:
		offset = 0x2000
	case laterFragment:
		offset = pick(g, 0x2001, 1, 0x1fff, 0x3fff, 1+uint16(g.IntN(0x1fff)), 1<<g.IntN(13))
	}
	b = binary.BigEndian.AppendUint16(b, offset)
	b = append(b, byte(g.IntN(256)), t.protocol, 0, 0)
	b = append(b, t.src.Addr().AsSlice()...)
	b = append(b, t.dst.Addr().AsSlice()...)
	b = append(b, options...)
	n := uint16(0xffff - words(b))
	if n == 0xffff || g.one(30) {
		n = pick(g, 0, n)
	}
	binary.BigEndian.PutUint16(b[10:], n)
	return append(b, payload...)
}

func (g *generator) ipv6(t modelTuple, payload []byte, shape modelShape, id uint32) []byte {
	next := t.protocol
	rest := payload
	header := func(kind byte, b []byte) {
		b[0] = next
		next, rest = kind, append(b, rest...)
	}
	if shape != wholePacket || g.one(30) && !g.plain { // or an atomic fragment
		b := make([]byte, 8)
		offset := uint16(0)
		switch shape {
		case firstFragment:
			offset = 1
		case laterFragment:
			offset = pick(g, 8, 9, 0xfff8, 0xfff9, uint16(1+g.IntN(0x1fff))<<3, 8<<g.IntN(13))
		}
		binary.BigEndian.PutUint16(b[2:], offset)
		binary.BigEndian.PutUint32(b[4:], id)
		header(fragment, b)
	}
	if g.one(6) && !g.plain {
		for range 1 + g.IntN(4) {
			n := pick(g, 0, 1, 3)
			b := g.bytes(8 + 8*n)
			b[1] = byte(n)
			header(pick(g, byte(options), options, options, hopByHop, hopByHop, hopByHop, 43, 51), b)
		}
	}
	b := []byte{0x60, byte(g.Uint32()), byte(g.Uint32()), byte(g.Uint32())}
	b = binary.BigEndian.AppendUint16(b, uint16(len(rest)))
	b = append(b, next, 64)
	b = append(b, t.src.Addr().AsSlice()...)
	b = append(b, t.dst.Addr().AsSlice()...)
	return append(b, rest...)
}

// quote has a datagram look like the first or the last one of a session that has come by here, as
// its endpoint got it.
func (g *generator) quote(datagram []byte, t modelTuple, f *modelFlow) {
	sent := pick(g, f.first, f.end[fromClient])
	n := uint64(uint16(^sent)) + words(t.src.Addr().AsSlice()) + words(t.dst.Addr().AsSlice()) + uint64(t.src.Port()) + uint64(t.dst.Port())
	n += 0xffff<<16 - words(f.client.Addr().AsSlice()) - words(f.vip.Addr().AsSlice()) - uint64(f.client.Port()) - uint64(f.vip.Port())
	binary.BigEndian.PutUint16(datagram[4:], uint16(sent>>16))
	binary.BigEndian.PutUint16(datagram[6:], ^uint16(n%0xffff))
	if g.one(2) {
		datagram[6+g.IntN(2)] ^= 1 + byte(g.IntN(255))
	}
}

// icmp is an error about a packet in answer to a tuple, from the tuple's source or a
// router, in its own IP headers.
func (g *generator) icmp(t modelTuple, f *modelFlow, from int) []byte {
	ipv6 := t.src.Addr().Is6()
	quoted := g.segment(t.swapped(), f, 1-from, g.length()/2)
	if t.protocol == tcp && g.one(2) {
		binary.BigEndian.PutUint32(quoted[4:], f.first)
	}
	if t.protocol == udp && !g.one(3) {
		g.quote(quoted, t.swapped(), f)
	}
	if t.protocol == sctp && g.one(2) {
		quoted = append(quoted[:4], 0, 0, 0, 0)
		quoted = append(append(quoted, g.bytes(4)...), g.init(chunkInit, f)...)
	}
	protocol, kinds := byte(icmp4), []byte{3, 3, 3, 3, 11, 12, 5, 8}
	if ipv6 {
		protocol, kinds = icmp6, []byte{1, 1, 1, 2, 3, 4, 128}
	}
	inner := t.swapped()
	if g.one(10) { // ICMP about ICMP
		inner.protocol = protocol
	}
	packet := g.ip(inner, quoted, pick(g, wholePacket, wholePacket, wholePacket, firstFragment, laterFragment), g.Uint32())
	if g.one(2) {
		packet = packet[:min(len(packet), pick(g, 28, 48, 20+g.IntN(40)))]
	}
	b := append([]byte{pick(g, kinds...), byte(pick(g, 0, 1, 3, 3, 4, 4, 9, 10, 13)), 0, 0, 0, 0, 5, 0}, packet...)
	outer := modelTuple{t.src, t.dst, protocol}
	if g.one(3) {
		outer.src = g.addrPort(ipv6)
	}
	if g.one(20) {
		outer.dst = g.addrPort(ipv6)
	}
	if ipv6 {
		g.seal(b, 2, outer, false)
	} else {
		n := uint16(0xffff - words(b))
		binary.BigEndian.PutUint16(b[2:], pick(g, n, n, n, n, n, n, uint16(g.Uint32()), 0xffff, 0))
	}
	return g.ip(outer, b, pick(g, wholePacket, wholePacket, wholePacket, wholePacket, wholePacket, wholePacket, firstFragment), g.Uint32())
}

// id is that of a fragmented packet, mostly of one that has been before.
func (g *generator) id(shape modelShape) uint32 {
	if shape == laterFragment && len(g.ids) > 0 && !g.one(10) {
		return g.ids[len(g.ids)-1-g.IntN(min(len(g.ids), 3))]
	}
	id := g.Uint32()
	if shape == firstFragment {
		g.ids = append(g.ids, id&0xffff)
		return id & 0xffff
	}
	return id
}

// packet makes a packet, and tells on which hook it belongs.
func (g *generator) packet(link int) (s *skbuff, ingress bool) {
	t, f, from := g.key()
	var b []byte
	if g.one(5) {
		b = g.icmp(t, f, from)
	} else {
		shape := pick(g, wholePacket, wholePacket, wholePacket, wholePacket, wholePacket, firstFragment, laterFragment)
		b = g.ip(t, g.segment(t, f, from, g.length()), shape, g.id(shape))
	}
	role := g.m.entries[t].role
	ingress = role == KernelRoleTO_ENDPOINT || role == KernelRoleUNMASQUERADE || role == KernelRoleROLE_NONE
	if role == KernelRoleROLE_NONE && g.m.entries[t.swapped()].role == KernelRoleUNMASQUERADE {
		ingress = false // of the node
	}
	if g.one(8) {
		ingress = !ingress
	}
	if link > 0 {
		protocol := uint16(0x0800)
		if t.src.Addr().Is6() {
			protocol = 0x86dd
		}
		if g.one(50) {
			protocol = pick(g, uint16(0x0806), 0x8100, 0x86dd, 0x0800)
		}
		b = append(binary.BigEndian.AppendUint16(g.bytes(12), protocol), b...)
	}
	if g.one(6) { // padding
		b = append(b, g.bytes(1+g.IntN(40))...)
	}
	s = &skbuff{frame: g.damage(b, link), link: link, gso: g.one(20), segment: segmentSize, forwarded: g.one(3)}
	for len(s.frame) < shortest(s.frame) {
		s.frame = append(s.frame, byte(g.Uint32()))
	}
	s.protocol = be16(s.frame[12:])
	return s, ingress
}

// shortest is the length that BPF_PROG_TEST_RUN demands: an Ethernet and an IP header.
func shortest(frame []byte) int {
	switch be16(frame[12:]) {
	case 0x0800:
		return 14 + 20
	case 0x86dd:
		return 14 + 40
	}
	return 14 + 1
}

// damage cuts some packets, and changes bytes or the length field of others.
func (g *generator) damage(b []byte, link int) []byte {
	switch g.IntN(40) {
	case 0, 1:
		b = b[:max(g.IntN(len(b)), 14+1)]
	case 2, 3:
		b[link+g.IntN(min(len(b)-link, 80))] ^= byte(1 << g.IntN(8))
	case 4:
		at := link + 2
		if b[link]>>4 == 6 {
			at = link + 4
		}
		was := be16(b[at:])
		binary.BigEndian.PutUint16(b[at:], pick(g, 0, was+1, was-1, was-uint16(g.IntN(30)), was+8, uint16(g.Uint32())))
	}
	return b
}
