package bpf

import "math"

// modelStep says what follows from a packet of a flow.
type modelStep int

const (
	translate modelStep = iota
	absorb              // userspace goes on with the packet
	leave               // the packet belongs to another connection
	restart             // the packet begins a new connection
)

const (
	fromClient   = 0
	fromEndpoint = 1
)

// isEnding reports whether a packet of the client may end an open connection: then it counts once
// it has left the node. If none has left, the endpoint may be the node itself.
func (f *modelFlow) isEnding(p *modelPacket) bool {
	switch {
	case f.seen&KernelSeenPASSED == 0, f.state != KernelStateOPEN, p.fragment == laterFragment:
		return false
	case f.protocol == sctp:
		return p.chunks.of[chunkAbort] || p.chunks.of[modelShutdown] || p.chunks.of[modelShutdownComplete]
	case f.protocol == tcp:
		answers := p.has(flagRST) && f.challenge != 0 && p.sequence == f.challenge
		last := f.seen&KernelSeenENDPOINT_FIN != 0 && f.seen&KernelSeenENDPOINT_FIN_ACKED == 0
		return (p.flags&(flagFIN|flagRST) != 0 || last) && !answers
	}
	return false
}

// isBelieved reports whether the receiver of an RST believes it: that takes exactly the number that
// it waits for, which is what it has acknowledged last, or behind what was sent, or behind a FIN.
func (f *modelFlow) isBelieved(p *modelPacket, from int) bool {
	return p.sequence == f.acked[1-from] || p.sequence == f.end[from] || p.sequence == f.end[from]+1
}

// after reports whether sequence number a lies behind b, or at it.
func after(a, b uint32) bool { return int32(a-b) >= 0 }

// count adds a packet to what a flow's record will say.
func (f *modelFlow) count(s *skbuff, p *modelPacket, from int) {
	switch {
	case f.protocol == tcp:
		return
	case f.protocol == sctp:
		f.packets[from] += uint64(p.chunks.messages)
	case p.fragment == laterFragment:
	case s.gso:
		f.packets[from] += uint64(math.Ceil(float64(p.payload) / float64(s.segment)))
	default:
		f.packets[from]++
	}
	f.bytes[from] += uint64(p.payload)
}

// fromClient follows a packet C -> V.
func (m *model) fromClient(s *skbuff, p *modelPacket, f *modelFlow, index int) modelStep {
	if f.protocol == sctp {
		if step := m.associationFromClient(p, f, index); step != translate {
			return step
		}
	} else if f.protocol == tcp && p.fragment != laterFragment {
		asked := f.state == KernelStateASKING || f.state == KernelStateMOVING
		if p.opens() && p.sequence == f.first && !f.direct && (f.state == KernelStateOPEN || f.state == KernelStateMOVING || f.state == KernelStateASKING && f.seen&KernelSeenPASSED != 0) {
			f.again[fromClient]++
		}
		if p.has(flagRST) && f.challenge != 0 && p.sequence == f.challenge {
			p.resequence(s, f.acked[fromEndpoint])
		}
		switch {
		case p.opens() && f.state == KernelStateOPEN && p.sequence != f.first && m.alive && !f.direct:
			m.challenge(f, index)
			return absorb
		case p.opens() && (f.state >= KernelStateCLOSED || asked && p.sequence != f.first):
			return restart
		case p.opens() && f.state == KernelStateMOVING:
			if f.seen&KernelSeenFIRST_WANTED != 0 && p.fragment == wholePacket && !s.gso && len(s.frame) <= longestUpcall {
				m.events = append(m.events, modelEvent{kind: KernelEventKindEVENT_BEGUN, flow: uint32(index), service: f.service, generation: f.generation, packet: string(s.frame)})
			}
			return absorb
		case p.opens() && asked:
			// The SYN may bring data (TCP Fast Open).
			f.progress(p.sequence+1, p.sequence+1+uint32(p.payload), fromClient)
		case !p.later:
			m.follow(s, p, f, index, fromClient)
		}
	}
	if f.protocol == udp {
		if p.fragment != laterFragment {
			f.end[fromClient] = p.sequence
		}
		if n := f.packets[fromClient]; f.state <= KernelStateMOVING && !f.direct && n >= 1 && n < MostUnanswered && m.alive &&
			p.fragment == wholePacket && !s.gso && len(s.frame) <= longestUpcall {
			m.events = append(m.events, modelEvent{kind: KernelEventKindEVENT_UNANSWERED, flow: uint32(index), generation: f.generation, packet: string(s.frame)})
		}
	}
	f.count(s, p, fromClient)
	return translate
}

// challenge tells userspace that a client may begin anew, if few events of the service port wait.
func (m *model) challenge(f *modelFlow, index int) {
	l := m.loads[f.service]
	if f.seen&KernelSeenCHALLENGED != 0 || l.asked-l.decided >= m.mostUndecided {
		return
	}
	f.seen |= KernelSeenCHALLENGED
	l.asked++
	m.events = append(m.events, modelEvent{kind: KernelEventKindEVENT_CHALLENGE, flow: uint32(index), service: f.service, generation: f.generation})
}

// fromEndpoint follows a packet E -> C:m.
func (m *model) fromEndpoint(s *skbuff, p *modelPacket, f *modelFlow, index int) modelStep {
	if p.fragment != laterFragment {
		if f.protocol == sctp {
			if step := m.associationFromEndpoint(s, p, f, index); step != translate {
				return step
			}
		} else if f.protocol == tcp && (f.state == KernelStateASKING || f.state == KernelStateMOVING) {
			if step := m.answer(s, p, f, index); step != translate {
				return step
			}
		} else if f.protocol == tcp {
			m.follow(s, p, f, index, fromEndpoint)
		} else if f.state == KernelStateASKING {
			if f.elsewhere && f.seen&KernelSeenPASSED == 0 && !f.moved { // perhaps nobody has asked
				if !s.forwarded { // or the endpoint is the node
					m.tell(s, KernelEventKindEVENT_COLLISION, index, 0)
				}
				return leave
			}
			f.state, f.answered = KernelStateOPEN, true
		}
		if p.payload > 0 {
			f.data = true
		}
	}
	f.count(s, p, fromEndpoint)
	return translate
}

// answer follows what an endpoint sends before it has accepted the connection. Only what
// acknowledges this SYN, or also its data, is an answer.
func (m *model) answer(s *skbuff, p *modelPacket, f *modelFlow, index int) modelStep {
	ours := f.acknowledgesSYN(p)
	accepts := ours && p.has(flagSYN) && !p.has(flagRST) && !p.has(flagFIN)
	refuses := ours && p.has(flagRST)
	moving := f.state == KernelStateMOVING
	switch {
	case accepts && moving:
		m.tell(s, KernelEventKindEVENT_LATE, index, 0)
		return absorb
	case refuses && moving:
		return absorb
	case refuses && m.alive && !f.direct:
		m.tell(s, KernelEventKindEVENT_REFUSED, index, KernelReasonREASON_RST)
		return absorb
	case refuses:
		m.reset(f, index, KernelSeenENDPOINT_RST)
		return translate
	case accepts:
		f.state, f.answered = KernelStateOPEN, true
		f.end[fromEndpoint] = p.sequence + 1 + uint32(p.payload)
		f.bytes[fromEndpoint] += uint64(p.payload)
		f.acked[fromEndpoint] = p.ack
		f.acked[fromClient] = p.sequence
		m.notice(KernelEventKindEVENT_OPEN, index, 0)
		return translate
	}
	if f.direct {
		return translate
	}
	m.tell(s, KernelEventKindEVENT_COLLISION, index, 0)
	return leave
}

// acknowledgesSYN reports whether a segment acknowledges the SYN, or also its data.
func (f *modelFlow) acknowledgesSYN(p *modelPacket) bool {
	return p.has(flagACK) && after(p.ack, f.first+1) && after(f.end[fromClient], p.ack)
}

// aheadMark says that segments behind a gap have come.
func aheadMark(from int) KernelSeen {
	return [2]KernelSeen{KernelSeenCLIENT_AHEAD, KernelSeenENDPOINT_AHEAD}[from]
}

// missedMark says that the receiver has told of the gap.
func missedMark(from int) KernelSeen {
	return [2]KernelSeen{KernelSeenCLIENT_MISSED, KernelSeenENDPOINT_MISSED}[from]
}

// progress counts a segment, unless it lies behind a gap: then it reports true. A window has
// 1 GiB at most.
func (f *modelFlow) progress(sequence, end uint32, from int) (gap bool) {
	n := int64(int32(end - f.end[from]))
	switch {
	case n <= 0 || n > 1<<30:
		return false
	case after(f.end[from], sequence):
		f.reach(end, from)
		return false
	}
	if f.seen&aheadMark(from) == 0 || after(end, f.ahead[from]) {
		f.ahead[from] = end
	}
	f.seen |= aheadMark(from)
	return true
}

// reach counts what is new up to a sequence number.
func (f *modelFlow) reach(end uint32, from int) {
	f.bytes[from] += uint64(end - f.end[from])
	f.end[from] = end
	if f.seen&aheadMark(from) != 0 && after(end, f.ahead[from]) {
		f.seen &^= aheadMark(from) | missedMark(from)
	}
}

// follow notes what a segment says about the connection's end. A SYN says nothing: it is
// old, or of another connection.
func (m *model) follow(s *skbuff, p *modelPacket, f *modelFlow, index, from int) {
	other := 1 - from
	fin, rst, otherFin, acks := KernelSeenCLIENT_FIN, KernelSeenCLIENT_RST, KernelSeenENDPOINT_FIN, KernelSeenENDPOINT_FIN_ACKED
	if from == fromEndpoint {
		fin, rst, otherFin, acks = KernelSeenENDPOINT_FIN, KernelSeenENDPOINT_RST, KernelSeenCLIENT_FIN, KernelSeenCLIENT_FIN_ACKED
	}
	if p.has(flagSYN) {
		if from == fromEndpoint && p.has(flagACK) && !p.has(flagFIN) && !p.has(flagRST) && f.acknowledgesSYN(p) {
			f.again[fromEndpoint]++
		}
		return
	}
	if p.has(flagRST) {
		if f.isBelieved(p, from) {
			m.reset(f, index, rst)
		} else if inWindow := p.sequence - f.acked[other]; f.state == KernelStateOPEN && inWindow < 1<<30 {
			// The receiver may believe it, and says nothing more.
			f.seen |= [2]KernelSeen{KernelSeenCLIENT_RST_DOUBTED, KernelSeenENDPOINT_RST_DOUBTED}[from]
			if m.alive && !f.direct {
				m.challenge(f, index)
			}
		}
		return
	}
	if f.state == KernelStateASKING || f.state == KernelStateMOVING {
		return // nothing has been agreed upon
	}
	end := p.sequence + uint32(p.payload)
	segments := uint32(1)
	if s.gso && p.payload > 0 {
		segments = uint32(math.Ceil(float64(p.payload) / float64(s.segment)))
	}
	gap := false
	if isOld := after(f.end[from], end) && f.end[from]-end < 1<<30; isOld && (p.payload > 0 || p.has(flagFIN) && f.seen&fin != 0) {
		f.again[from] += segments
	} else if f.seen&fin == 0 {
		if p.payload > 0 && p.sequence == f.end[from] && f.seen&missedMark(from) != 0 {
			f.missed[from] += segments
		}
		gap = f.progress(p.sequence, end, from)
	}
	ends := p.has(flagFIN) && !gap && end == f.end[from]
	if ends || p.has(flagFIN) && gap {
		f.fin[from] = end + 1
	}
	// Nobody can acknowledge what was not sent.
	sent := f.end[other]
	gone := f.seen&aheadMark(other) != 0
	if gone {
		sent = f.ahead[other]
	}
	if p.has(flagACK) && after(sent+1, p.ack) {
		if gone && p.ack == f.end[other] {
			f.seen |= missedMark(other)
		}
		// What the receiver acknowledges counts also behind a gap, and so does a FIN there.
		if (gone || p.ack == f.fin[other]) && f.seen&otherFin == 0 && !after(f.end[other], p.ack) {
			switch {
			case p.ack == f.fin[other]:
				f.reach(p.ack-1, other)
				f.ends(otherFin)
				f.seen |= otherFin
			case p.ack == f.ahead[other]+1:
				f.reach(p.ack-1, other)
			default:
				f.reach(p.ack, other)
			}
		}
		if !after(f.acked[from], p.ack) {
			f.acked[from] = p.ack
			if from == fromClient && f.state == KernelStateOPEN {
				m.confirm(f)
			}
		}
		if f.seen&otherFin != 0 && after(p.ack, f.fin[other]) {
			f.seen |= acks
		}
	}
	if ends { // the other end came first if this acknowledges it
		f.ends(fin)
		f.seen |= fin
	}
	if both := KernelSeenCLIENT_FIN_ACKED | KernelSeenENDPOINT_FIN_ACKED; f.seen&both == both {
		m.close(f, index)
	}
}

// ends notes which end came first.
func (f *modelFlow) ends(mark KernelSeen) {
	if f.firstEnd == 0 {
		f.firstEnd = mark
	}
}

// confirm notes that the client has completed the handshake: it acknowledges something
// that only a receiver of the SYN-ACK knows.
func (m *model) confirm(f *modelFlow) {
	if f.seen&KernelSeenCONFIRMED == 0 {
		f.seen |= KernelSeenCONFIRMED
		f.acknowledged = true
		m.loads[f.service].confirmed++
	}
}

func (m *model) reset(f *modelFlow, index int, mark KernelSeen) {
	f.ends(mark)
	f.seen |= mark
	m.close(f, index)
}

func (m *model) close(f *modelFlow, index int) {
	if f.seen&KernelSeenCLOSING_TOLD == 0 {
		f.seen |= KernelSeenCLOSING_TOLD
		f.state, f.closed = KernelStateCLOSED, true
		m.notice(KernelEventKindEVENT_CLOSED, index, KernelReason(f.seen))
	}
}

// notice tells userspace what has become of a flow, if it follows it.
func (m *model) notice(kind KernelEventKind, index int, reason KernelReason) {
	if m.flows[index].seen&KernelSeenKNOWN != 0 {
		m.tell(nil, kind, index, reason)
	}
}
