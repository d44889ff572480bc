package bpf

import "encoding/binary"

// modelQuote is the packet that an ICMP error quotes: its IP header, and at least the
// ports of what follows.
type modelQuote struct {
	tuple     modelTuple
	sequence  uint32 // of TCP; SCTP: the initiate tag of an INIT, else 0
	network   int
	transport int
}

// quoted reads the packet that an error quotes.
func (p *modelPacket) quoted(s *skbuff) (q *modelQuote, ok bool) {
	b := s.frame[p.transport:p.end]
	q = &modelQuote{network: p.transport + 8}
	inner := &modelPacket{}
	header := b[8:]
	if p.ipv6 {
		if b[0] < 1 || b[0] > 4 || len(header) < 40 || header[0]>>4 != 6 {
			return nil, false
		}
		inner.setAddresses(header[8:], 16)
		inner.tuple.protocol = header[6]
		q.transport = q.network + 40
	} else {
		if b[0] != 3 && b[0] != 11 && b[0] != 12 {
			return nil, false
		}
		if len(header) < 20 || header[0]>>4 != 4 || header[0]&15 < 5 || be16(header[6:])&0x1fff != 0 {
			return nil, false
		}
		inner.setAddresses(header[12:], 4)
		inner.tuple.protocol = header[9]
		q.transport = q.network + int(header[0]&15)*4
	}
	if known := inner.tuple.protocol == tcp || inner.tuple.protocol == udp || inner.tuple.protocol == sctp; !known || q.transport+8 > p.end {
		return nil, false
	}
	inner.setPorts(s.frame[q.transport:])
	q.tuple = inner.tuple
	switch at := s.frame[q.transport:p.end]; {
	case q.tuple.protocol == tcp, q.tuple.protocol == udp:
		q.sequence = be32(at[4:])
	case q.tuple.protocol == sctp && be32(at[4:]) == 0 && len(at) >= 20 && at[12] == chunkInit:
		q.sequence = be32(at[16:])
	}
	return q, true
}

// isOf reports whether it is a datagram of a session: its length and its checksum are those that
// the client sent, as far as the checksum was complete. 0 is of none that is known.
func (q *modelQuote) isOf(f *modelFlow, sent uint32) bool {
	length, check := uint16(sent>>16), uint16(sent)
	pseudo := words(f.client.Addr().AsSlice()) + words(f.vip.Addr().AsSlice()) + uint64(length) + udp
	if sent == 0 || uint16(q.sequence>>16) != length || check == 0 || uint64(check)%0xffff == pseudo%0xffff {
		return sent == 0 || uint16(q.sequence>>16) == length
	}
	// Without its addresses and ports, the same is left of both.
	rest := func(check uint16, t modelTuple) uint64 {
		n := words(t.src.Addr().AsSlice()) + words(t.dst.Addr().AsSlice()) + uint64(t.src.Port()) + uint64(t.dst.Port())
		return (uint64(^check) + 0xffff*uint64(1<<16) - n) % 0xffff
	}
	return rest(check, modelTuple{f.client, f.vip, udp}) == rest(uint16(q.sequence), q.tuple)
}

// unreachable is the reason for which an error refuses a flow, or -1. An error that says
// that a packet is too large refuses nothing.
func (p *modelPacket) unreachable(s *skbuff) int {
	kind, code := s.frame[p.transport], s.frame[p.transport+1]
	switch {
	case p.ipv6 && kind == 1 && code == 4, !p.ipv6 && kind == 3 && code == 3:
		return int(KernelReasonREASON_PORT)
	case p.ipv6 && kind == 1, !p.ipv6 && kind == 3 && code != 4:
		return int(KernelReasonREASON_HOST)
	}
	return -1
}

// A modelChecksum is at an offset, over a range of the frame, and may cover a pseudo header
// that has the addresses of an IP header. optional is UDP's: 0 is none.
type modelChecksum struct {
	at, from, to int
	pseudo       int // offset of the IP header, or -1
	ipv6         bool
	optional     bool
}

// words adds 16-bit words, modulo 65535.
func words(b []byte) (n uint64) {
	for i, v := range b {
		if i%2 == 0 {
			n += uint64(v) << 8
		} else {
			n += uint64(v)
		}
	}
	return n % 0xffff
}

// full is what a checksum has to be, without the constant part of the pseudo header.
func (c *modelChecksum) full(frame []byte) uint64 {
	n := words(frame[c.from:c.at]) + words(frame[c.at+2:c.to])
	if c.pseudo >= 0 && c.ipv6 {
		n += words(frame[c.pseudo+8 : c.pseudo+40])
	} else if c.pseudo >= 0 {
		n += words(frame[c.pseudo+12 : c.pseudo+20])
	}
	return (0xffff - n%0xffff) % 0xffff
}

// keeping changes the frame. Afterwards each checksum is as right, or as wrong,
// as it was before. Inner checksums come before those that cover them.
func (s *skbuff) keeping(checksums []modelChecksum, change func()) {
	frame := s.frame
	wrong := make([]uint64, len(checksums))
	for i := range checksums {
		c := &checksums[i]
		wrong[i] = 0xffff + uint64(be16(frame[c.at:])) - c.full(frame)
	}
	change()
	for i := range checksums {
		c := &checksums[i]
		if c.optional && be16(frame[c.at:]) == 0 {
			continue
		}
		n := (c.full(frame) + wrong[i]) % 0xffff
		if !c.optional {
			s.checksums = append(s.checksums, c.at)
		}
		if c.optional && n == 0 {
			n = 0xffff
		}
		binary.BigEndian.PutUint16(frame[c.at:], uint16(n))
	}
}

// transportChecksum is that of TCP or UDP, if there is room for it. A quoted CRC of SCTP
// stays as it is.
func transportChecksum(protocol byte, transport, end, network int, ipv6 bool) []modelChecksum {
	c := modelChecksum{at: transport + 16, from: transport, to: end, pseudo: network, ipv6: ipv6}
	if protocol == udp {
		c.at, c.optional = transport+6, true
	}
	if protocol == sctp || c.at+2 > end {
		return nil
	}
	return []modelChecksum{c}
}

func (p *modelPacket) headerChecksum() []modelChecksum {
	if p.ipv6 {
		return nil
	}
	return []modelChecksum{{at: p.network + 10, from: p.network, to: p.network + 20, pseudo: -1}}
}

func storeAddresses(frame []byte, network int, ipv6 bool, t modelTuple) {
	at := network + 12
	if ipv6 {
		at = network + 8
	}
	n := copy(frame[at:], t.src.Addr().AsSlice())
	copy(frame[at+n:], t.dst.Addr().AsSlice())
}

func storePorts(frame []byte, transport int, t modelTuple) {
	binary.BigEndian.PutUint16(frame[transport:], t.src.Port())
	binary.BigEndian.PutUint16(frame[transport+2:], t.dst.Port())
}

// rewrite gives a packet another tuple.
func (p *modelPacket) rewrite(s *skbuff, to modelTuple) {
	checksums := p.headerChecksum()
	if p.fragment != laterFragment {
		checksums = append(checksums, transportChecksum(to.protocol, p.transport, p.end, p.network, p.ipv6)...)
	}
	s.keeping(checksums, func() {
		storeAddresses(s.frame, p.network, p.ipv6, to)
		if p.fragment != laterFragment {
			storePorts(s.frame, p.transport, to)
		}
	})
}

// resequence gives a segment another sequence number.
func (p *modelPacket) resequence(s *skbuff, n uint32) {
	p.sequence = n
	s.keeping(transportChecksum(tcp, p.transport, p.end, p.network, p.ipv6), func() {
		binary.BigEndian.PutUint32(s.frame[p.transport+4:], n)
	})
}

// rewriteError gives an error the addresses that its receiver knows: the quoted packet is
// the one that answers to a tuple, and the error comes from where that comes from, unless
// another host, such as a router, has sent it.
func (p *modelPacket) rewriteError(s *skbuff, q *modelQuote, to modelTuple) {
	answer, outer := q.tuple.swapped(), p.tuple
	if outer.src.Addr() == answer.src.Addr() {
		outer.src = to.src
	}
	if outer.dst.Addr() == answer.dst.Addr() {
		outer.dst = to.dst
	}
	checksums := transportChecksum(q.tuple.protocol, q.transport, p.end, q.network, p.ipv6)
	if !p.ipv6 {
		checksums = append(checksums, modelChecksum{at: q.network + 10, from: q.network, to: q.network + 20, pseudo: -1})
	}
	whole := modelChecksum{at: p.transport + 2, from: p.transport, to: p.end, pseudo: -1, ipv6: p.ipv6}
	if p.ipv6 {
		whole.pseudo = p.network
	}
	checksums = append(checksums, whole)
	s.keeping(append(checksums, p.headerChecksum()...), func() {
		storeAddresses(s.frame, q.network, p.ipv6, to.swapped())
		storePorts(s.frame, q.transport, to.swapped())
		storeAddresses(s.frame, p.network, p.ipv6, outer)
	})
}
