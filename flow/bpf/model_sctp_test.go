package bpf

import (
	"encoding/binary"
	"hash/crc32"
)

// What the model knows of SCTP, by RFCs 9260, 4820 and 8260.

const sctp = 132

// Types of chunks. ../sctp.go has the others.
const (
	modelData             = 0
	modelSack             = 3
	modelHeartbeat        = 4
	modelShutdown         = 7
	modelShutdownAck      = 8
	modelCookieEcho       = 10
	modelCookieAck        = 11
	modelShutdownComplete = 14
	modelIData            = 64
)

// modelChunks is what a packet's chunks are.
type modelChunks struct {
	of        map[byte]bool // by type
	reflected bool          // an ABORT or SHUTDOWN COMPLETE has the T bit
	messages  int           // that end in the packet
}

// readSCTP reads a packet. It reports false for one that is too short, or not padded.
func (p *modelPacket) readSCTP(packet []byte) bool {
	if len(packet) < 16 || len(packet)%4 != 0 {
		return false
	}
	p.setPorts(packet)
	p.ack = be32(packet[4:]) // the verification tag
	p.payload = 0
	p.chunks.of = make(map[byte]bool)
	rest := packet[12:]
	for n := 0; n < 32 && len(rest) >= 4; n++ {
		kind, last, length := rest[0], rest[1]&1 != 0, int(be16(rest[2:]))
		if length < 4 || length > len(rest) {
			break
		}
		padded := min((length+3)/4*4, len(rest))
		header := map[byte]int{modelData: 16, modelIData: 20}[kind]
		switch {
		case header > 0:
			if length >= header {
				p.payload += length - header
				if last {
					p.chunks.messages++
				}
			}
		case kind == chunkInit || kind == chunkInitAck:
			// They are alone, and have a tag.
			if n > 0 || padded < len(rest) || length < 20 || be32(rest[4:]) == 0 {
				return true
			}
			p.sequence = be32(rest[4:])
			p.chunks.of[kind] = true
		default:
			p.chunks.of[kind] = true
			if last && (kind == chunkAbort || kind == modelShutdownComplete) {
				p.chunks.reflected = true
			}
		}
		rest = rest[padded:]
	}
	return true
}

func (p *modelPacket) initiates() bool { return p.chunks.of[chunkInit] && p.ack == 0 }

// followAssociation notes what a packet says about an association's begin and end.
func (m *model) followAssociation(p *modelPacket, f *modelFlow, index, from int) {
	if f.state == KernelStateASKING || f.state == KernelStateMOVING {
		return
	}
	// fin are the tags of a handshake that is under way.
	if from == fromClient && p.chunks.of[modelCookieEcho] && f.fin[0] != 0 {
		f.fin[1] = p.ack
	}
	if from == fromEndpoint && p.chunks.of[modelCookieAck] && f.fin[0] != 0 && f.fin[1] != 0 && p.ack == f.fin[0] {
		f.end = [2]uint32{fromClient: f.fin[1], fromEndpoint: f.fin[0]}
		f.fin = [2]uint32{}
		m.confirm(f)
	}
	// The receiver's tag, or with the T bit the sender's own.
	expected := f.end[from]
	if p.chunks.reflected {
		expected = f.end[1-from]
	}
	if p.ack != expected {
		return
	}
	fin, rst := KernelSeenCLIENT_FIN, KernelSeenCLIENT_RST
	if from == fromEndpoint {
		fin, rst = KernelSeenENDPOINT_FIN, KernelSeenENDPOINT_RST
	}
	switch {
	case p.chunks.of[chunkAbort]:
		m.reset(f, index, rst)
		return
	case p.chunks.of[modelShutdown]:
		f.ends(fin)
		f.seen |= fin
	}
	if p.chunks.of[modelShutdownComplete] {
		m.close(f, index)
	}
}

// associationFromClient is fromClient for SCTP.
func (m *model) associationFromClient(p *modelPacket, f *modelFlow, index int) modelStep {
	asked := f.state == KernelStateASKING || f.state == KernelStateMOVING
	switch {
	case p.initiates() && (f.state >= KernelStateCLOSED || asked && p.sequence != f.first):
		return restart
	case p.initiates() && f.state == KernelStateMOVING:
		return absorb
	case p.initiates() && !asked:
		f.fin = [2]uint32{p.sequence, 0}
		if f.state == KernelStateOPEN && p.sequence != f.first && m.alive && !f.direct {
			m.challenge(f, index)
		}
	case !p.initiates() && p.fragment != laterFragment && !p.later:
		m.followAssociation(p, f, index, fromClient)
	}
	return translate
}

// associationFromEndpoint is fromEndpoint for SCTP.
func (m *model) associationFromEndpoint(s *skbuff, p *modelPacket, f *modelFlow, index int) modelStep {
	if f.state != KernelStateASKING && f.state != KernelStateMOVING {
		m.followAssociation(p, f, index, fromEndpoint)
		return translate
	}
	ours := p.ack == f.first && !p.chunks.reflected
	moving := f.state == KernelStateMOVING
	switch {
	case ours && p.chunks.of[chunkAbort] && moving:
		return absorb
	case ours && p.chunks.of[chunkAbort] && m.alive && !f.direct:
		m.tell(s, KernelEventKindEVENT_REFUSED, index, KernelReasonREASON_RST)
		return absorb
	case ours && p.chunks.of[chunkAbort]:
		m.reset(f, index, KernelSeenENDPOINT_RST)
		return translate
	case ours && p.chunks.of[chunkInitAck] && moving:
		m.tell(s, KernelEventKindEVENT_LATE, index, 0)
		return absorb
	case ours && p.chunks.of[chunkInitAck]:
		f.state, f.answered = KernelStateOPEN, true
		f.end = [2]uint32{fromClient: p.sequence, fromEndpoint: f.first}
		f.fin = [2]uint32{f.first, p.sequence}
		m.notice(KernelEventKindEVENT_OPEN, index, 0)
		return translate
	}
	if f.direct {
		return translate
	}
	m.tell(s, KernelEventKindEVENT_COLLISION, index, 0)
	return leave
}

// rewriteSCTP gives a packet another tuple, and hides further addresses if hide is set. The
// CRC is as right, or as wrong, as it was; 0 stays 0. It reports false for a fragment whose
// ports would change.
func (p *modelPacket) rewriteSCTP(s *skbuff, to modelTuple, hide bool) bool {
	moves := to.src.Port() != p.tuple.src.Port() || to.dst.Port() != p.tuple.dst.Port()
	if moves && p.fragment != wholePacket {
		return false
	}
	packet := s.frame[p.transport:p.end]
	s.keeping(p.headerChecksum(), func() {
		storeAddresses(s.frame, p.network, p.ipv6, to)
		if p.fragment == laterFragment {
			return
		}
		was := binary.LittleEndian.Uint32(packet[8:])
		wrong := was ^ modelCRC(packet)
		if moves {
			storePorts(s.frame, p.transport, to)
		}
		if hide {
			hideAddresses(packet[12+20:])
		}
		if was != 0 {
			binary.LittleEndian.PutUint32(packet[8:], wrong^modelCRC(packet))
		}
	})
	return true
}

// modelCRC computes a CRC-32C bit by bit, with the checksum's own field as 0.
func modelCRC(packet []byte) uint32 {
	crc := ^uint32(0)
	for i, b := range packet {
		if i >= 8 && i < 12 {
			b = 0
		}
		crc ^= uint32(b)
		for range 8 {
			if crc&1 != 0 {
				crc = crc>>1 ^ crc32.Castagnoli
			} else {
				crc >>= 1
			}
		}
	}
	return ^crc
}

// hideAddresses makes receivers skip the addresses in a list of parameters.
func hideAddresses(list []byte) {
	for n := 0; n < 32 && len(list) >= 4; n++ {
		kind, length := be16(list), int(be16(list[2:]))
		if length < 4 || length > len(list) {
			return
		}
		if kind == 5 || kind == 6 { // IPv4 and IPv6 addresses
			list[0] = 0x80
		}
		list = list[min((length+3)/4*4, len(list)):]
	}
}

// associate gives a flow the tags of its state.
func (f *modelFlow) associate(g *generator) {
	f.acked = [2]uint32{}
	f.end = [2]uint32{fromEndpoint: f.first}
	if f.state >= KernelStateOPEN {
		f.end[fromClient] = g.Uint32()
		f.fin = pick(g, [2]uint32{}, [2]uint32{f.first, f.end[fromClient]}, [2]uint32{g.Uint32(), g.Uint32()})
	}
}

// sctpPacket is a packet of an association: mostly as its state allows.
func (g *generator) sctpPacket(t modelTuple, f *modelFlow, from, length int) []byte {
	b := binary.BigEndian.AppendUint16(nil, t.src.Port())
	b = binary.BigEndian.AppendUint16(b, t.dst.Port())
	tag := pick(g, f.end[from], f.end[from], f.end[from], f.end[1-from], f.first, f.fin[0], f.fin[1], 0, g.Uint32())
	var chunks []byte
	switch g.IntN(10) {
	case 0, 1:
		tag = pick(g, 0, 0, 0, tag)
		chunks = g.init(chunkInit, f)
	case 2:
		tag = pick(g, f.first, f.first, f.fin[0], tag)
		chunks = g.init(chunkInitAck, f)
	case 3:
		chunks = append(g.chunk(pick(g, byte(modelSack), modelHeartbeat, modelData), g.IntN(20)), g.chunk(chunkAbort, g.IntN(8))...)
	case 4:
		tag = pick(g, f.fin[0], f.fin[1], tag)
		chunks = append(g.chunk(pick(g, byte(modelCookieEcho), modelCookieAck), g.IntN(100)), g.chunk(modelData, 12+g.IntN(40))...)
	case 5:
		chunks = g.chunk(pick(g, byte(chunkAbort), modelShutdown, modelShutdownAck, modelShutdownComplete), g.IntN(8))
	case 6:
		for range pick(g, 1, 3, g.IntN(50)) {
			chunks = append(chunks, g.chunk(pick(g, byte(modelData), modelData, modelSack, modelIData, byte(g.Uint32())), g.IntN(24))...)
		}
	default:
		chunks = append(g.chunk(modelData, 12+length), g.chunk(modelSack, 12)...)
	}
	if g.one(15) { // two that must be alone, or anything
		chunks = append(chunks, g.init(pick(g, byte(chunkInit), chunkInitAck), f)...)
	}
	if g.one(15) && len(chunks) > 4 {
		binary.BigEndian.PutUint16(chunks[2:], uint16(pick(g, g.IntN(6), len(chunks)+1, 19, g.IntN(65536))))
	}
	if g.one(30) {
		chunks = append(chunks, g.bytes(1+g.IntN(3))...)
	}
	b = binary.BigEndian.AppendUint32(b, tag)
	b = append(b, 0, 0, 0, 0)
	b = append(b, chunks...)
	switch g.IntN(8) {
	case 0: // of a sender that offloads
	case 1:
		copy(b[8:], g.bytes(4))
	default:
		binary.LittleEndian.PutUint32(b[8:], modelCRC(b))
	}
	return b
}

// chunk is one with a value of some length, and padding.
func (g *generator) chunk(kind byte, length int) []byte {
	b := []byte{kind, byte(pick(g, 0, 3, 3, 2, g.IntN(256)))}
	if kind == chunkAbort || kind == modelShutdownComplete {
		b[1] = byte(g.IntN(4) / 3)
	}
	b = binary.BigEndian.AppendUint16(b, uint16(4+length))
	return append(b, g.bytes((length+3)/4*4)...)
}

// init is an INIT or INIT ACK with parameters.
func (g *generator) init(kind byte, f *modelFlow) []byte {
	b := binary.BigEndian.AppendUint32(nil, pick(g, f.first, f.first, g.Uint32(), g.Uint32(), 0))
	b = append(b, g.bytes(12)...)
	for range pick(g, 0, 1, 3, g.IntN(45)) {
		kind, length := uint16(pick(g, 5, 6, 7, 12, 0x8005, 0x8008, 0x8008, 0xc000, 0x8002, g.IntN(65536))), g.IntN(24)
		switch kind {
		case 5:
			length = 4
		case 6:
			length = 16
		}
		b = binary.BigEndian.AppendUint16(b, kind)
		b = binary.BigEndian.AppendUint16(b, uint16(pick(g, 4+length, 4+length, 4+length, 4+length, 4+length, 4+length, 4+length, g.IntN(2000))))
		b = append(b, g.bytes((length+3)/4*4)...)
	}
	chunk := append([]byte{kind, 0}, binary.BigEndian.AppendUint16(nil, uint16(4+len(b)))...)
	return append(chunk, b...)
}
