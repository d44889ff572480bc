package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// packetClients are any number of TCP clients, and endpoints, made of packets alone: nobody
// needs a descriptor or memory for each connection. Clients have few states: a connection
// is one request of four bytes after the other, and never ends.
type packetClients struct {
	t         *testing.T
	clients   *os.File // the node's interface to them
	endpoints *os.File
	vips      []netip.Addr // connection i goes to the i-th in turn

	mu      sync.Mutex
	members []member // guarded by mu, as is all below
	flying  int      // members whose answer has not come
	room    *sync.Cond
	strange int    // packets that nobody expects
	oddity  string // the first of them
	again   int    // requests that were sent again, each of which may be answered again

	flooded int // first packets of deluge
}

// member is one connection.
type member struct {
	state    memberState
	requests uint8 // that were answered
	sent     time.Time
	took     time.Duration // from the last SYN or request to its answer
}

type memberState uint8

const (
	silent memberState = iota
	greeting
	greeted
	asking
)

// Addresses, sequence numbers and ports.
const (
	memberPort     = 8080
	firstSequence  = 1 << 20 // of clients
	firstAnswer    = 1 << 21 // of the endpoint
	membersPerHost = 16      // connections of each client
	memberPatience = 3 * time.Second
)

var (
	memberRange     = netip.MustParsePrefix("10.128.0.0/9")
	memberEndpoints = netip.MustParsePrefix("10.3.0.0/24")
)

// newPacketClients puts them around a node.
func newPacketClients(t *testing.T, node *netns.Host, size int, vips ...netip.Addr) *packetClients {
	t.Helper()
	c := &packetClients{
		t: t, vips: vips, members: make([]member, size),
		clients:   node.Tun(t, "clients", memberRange),
		endpoints: node.Tun(t, "endpoints", memberEndpoints),
	}
	c.room = sync.NewCond(&c.mu)
	go c.serve()
	go c.receive()
	return c
}

// endpointsOf are some addresses and ports that serve.
func endpointsOf(count int) (list []netip.AddrPort) {
	for a := memberEndpoints.Addr(); len(list) < count; {
		a = a.Next()
		list = append(list, netip.AddrPortFrom(a, memberPort))
	}
	return list
}

// source is the address and port of a connection's client.
func (c *packetClients) source(i int) netip.AddrPort {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(memberRange.Addr().AsSlice())+uint32(i/membersPerHost)+1)
	return netip.AddrPortFrom(netip.AddrFrom4(b), uint16(20000+i%membersPerHost))
}

// number undoes source.
func (c *packetClients) number(a netip.AddrPort) int {
	host := int(binary.BigEndian.Uint32(a.Addr().AsSlice()) - binary.BigEndian.Uint32(memberRange.Addr().AsSlice()) - 1)
	i := host*membersPerHost + int(a.Port()) - 20000
	if host < 0 || i >= len(c.members) {
		return -1
	}
	return i
}

func (c *packetClients) vip(i int) netip.AddrPort {
	return netip.AddrPortFrom(c.vips[i%len(c.vips)], 80)
}

// segment is a TCP segment.
type segment struct {
	from, to      netip.AddrPort
	sequence, ack uint32
	flags         byte
	data          []byte
}

// TCP flags of segments.
const (
	flagFIN = 1
	flagSYN = 2
	flagRST = 4
	flagPSH = 8
	flagACK = 16
)

// packet is an IPv4 packet with right checksums.
func (s *segment) packet() []byte {
	length := 40 + len(s.data)
	b := append(make([]byte, 0, length), 0x45, 0, byte(length>>8), byte(length), 0, 0, 0x40, 0, 64, 6, 0, 0)
	b = append(b, s.from.Addr().AsSlice()...)
	b = append(b, s.to.Addr().AsSlice()...)
	binary.BigEndian.PutUint16(b[10:], ^onesSum(0, b))
	b = binary.BigEndian.AppendUint16(b, s.from.Port())
	b = binary.BigEndian.AppendUint16(b, s.to.Port())
	b = binary.BigEndian.AppendUint32(b, s.sequence)
	b = binary.BigEndian.AppendUint32(b, s.ack)
	b = append(b, 5<<4, s.flags, 0xff, 0xff, 0, 0, 0, 0)
	b = append(b, s.data...)
	binary.BigEndian.PutUint16(b[36:], ^onesSum(uint32(6+length-20), b[12:]))
	return b
}

// onesSum is the sum of RFC 1071.
func onesSum(s uint32, b []byte) uint16 {
	for ; len(b) >= 2; b = b[2:] {
		s += uint32(b[0])<<8 | uint32(b[1])
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
	}
	s = s>>16 + s&0xffff
	return uint16(s>>16 + s&0xffff)
}

// parse reads a segment. It returns false for other packets, or wrong checksums.
func (s *segment) parse(b []byte) bool {
	if len(b) < 40 || b[0] != 0x45 || b[9] != 6 || len(b) != int(b[2])<<8|int(b[3]) {
		return false
	}
	if onesSum(0, b[:20]) != 0xffff || onesSum(uint32(6+len(b)-20), b[12:]) != 0xffff {
		return false
	}
	n := binary.BigEndian
	s.from = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[12:])), n.Uint16(b[20:]))
	s.to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[16:])), n.Uint16(b[22:]))
	s.sequence, s.ack, s.flags = n.Uint32(b[24:]), n.Uint32(b[28:]), b[33]
	s.data = b[min(20+int(b[32]>>4)*4, len(b)):]
	return true
}

// answer is what answers a segment, in its order of bytes.
func (s *segment) answer(flags byte, sequence uint32, data []byte) *segment {
	ack := s.sequence + uint32(len(s.data))
	if s.flags&flagSYN != 0 {
		ack++
	}
	return &segment{from: s.to, to: s.from, sequence: sequence, ack: ack, flags: flags, data: data}
}

// serve is all endpoints: it accepts each connection, and sends requests back.
func (c *packetClients) serve() {
	b := make([]byte, 1<<16)
	for {
		n, err := c.endpoints.Read(b)
		if err != nil {
			return
		}
		var s segment
		if !s.parse(b[:n]) || !memberEndpoints.Contains(s.to.Addr()) {
			continue
		}
		switch {
		case s.flags&flagRST != 0:
		case s.flags&flagSYN != 0:
			c.send(c.endpoints, s.answer(flagSYN|flagACK, firstAnswer, nil))
		case len(s.data) > 0:
			c.send(c.endpoints, s.answer(flagPSH|flagACK, s.ack, s.data))
		}
	}
}

// send writes a packet to one of the node's interfaces. A full queue loses it.
func (c *packetClients) send(f *os.File, s *segment) {
	if _, err := f.Write(s.packet()); err != nil && !errors.Is(err, os.ErrClosed) {
		c.t.Errorf("send a packet: %v", err)
	}
}

// receive is all clients.
func (c *packetClients) receive() {
	b := make([]byte, 1<<16)
	for {
		n, err := c.clients.Read(b)
		if err != nil {
			return
		}
		var s segment
		if !s.parse(b[:n]) {
			continue
		}
		c.mu.Lock()
		i := c.number(s.to)
		if i < 0 || s.from != c.vip(i) || s.flags&flagRST != 0 {
			c.wonder(i, &s)
			c.mu.Unlock()
			continue
		}
		m := &c.members[i]
		switch {
		case s.flags&flagSYN != 0 && m.state == greeting && s.sequence == firstAnswer && s.ack == firstSequence+1:
			c.answered(m, greeted)
			c.mu.Unlock()
			c.send(c.clients, s.answer(flagACK, firstSequence+1, nil))
			continue
		case s.flags&flagSYN != 0: // twice
		case m.state == asking && string(s.data) == string(request(i)) && s.sequence == firstAnswer+1+uint32(m.requests)*4:
			m.requests++
			c.answered(m, greeted)
		case c.again > 0 && m.requests > 0 && string(s.data) == string(request(i)) && s.sequence == firstAnswer+1+uint32(m.requests-1)*4:
			c.again--
		default:
			c.wonder(i, &s)
		}
		c.mu.Unlock()
	}
}

// wonder counts a packet that nobody expects, and keeps the first. The caller has mu.
func (c *packetClients) wonder(i int, s *segment) {
	if c.strange++; c.strange > 1 {
		return
	}
	c.oddity = fmt.Sprintf("%+v", *s)
	if i >= 0 {
		c.oddity += fmt.Sprintf(" to connection %d: %+v", i, c.members[i])
	}
}

// answered notes an answer. The caller has mu.
func (c *packetClients) answered(m *member, s memberState) {
	m.state, m.took = s, time.Since(m.sent)
	c.flying = max(c.flying-1, 0)
	c.room.Signal()
}

// request is what a connection asks: its number.
func request(i int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(i)) }

// each connects members, or asks once on those that are connected, at most atOnce at a time. It
// repeats what gets no answer.
func (c *packetClients) each(from, to, atOnce int, next memberState) {
	c.t.Helper()
	began := time.Now()
	wait.For(c.t, fmt.Sprintf("answers to connections %d to %d", from, to), 5*time.Minute, func() error {
		missing := 0
		for i := from; i < to; i++ {
			c.mu.Lock()
			m := &c.members[i]
			if m.state == greeted && (next == greeting || m.sent.After(began)) {
				c.mu.Unlock()
				continue
			}
			missing++
			if again := m.state == next; again && time.Since(m.sent) < memberPatience {
				c.mu.Unlock()
				continue
			} else if !again {
				c.flying++
			} else if next == asking {
				c.again++
			}
			for c.flying > atOnce {
				c.rest()
			}
			m.state, m.sent = next, time.Now()
			s := segment{from: c.source(i), to: c.vip(i), sequence: firstSequence, flags: flagSYN}
			if next == asking {
				s.sequence, s.ack = firstSequence+1+uint32(m.requests)*4, firstAnswer+1+uint32(m.requests)*4
				s.flags, s.data = flagPSH|flagACK, request(i)
			}
			c.mu.Unlock()
			c.send(c.clients, &s)
		}
		if missing > 0 {
			return fmt.Errorf("%d are missing", missing)
		}
		return nil
	})
}

// rest waits until there is room for another packet, or for a while. The caller has mu.
func (c *packetClients) rest() {
	wake := time.AfterFunc(memberPatience, func() {
		c.mu.Lock()
		c.flying = 0 // what was lost is sent again
		c.mu.Unlock()
		c.room.Signal()
	})
	c.room.Wait()
	wake.Stop()
}

// times are quantiles of how long the last answers took.
func (c *packetClients) times(from, to int) (p50, p99 time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []time.Duration
	for i := from; i < to; i++ {
		all = append(all, c.members[i].took)
	}
	slices.Sort(all)
	return all[len(all)/2], all[len(all)*99/100]
}
