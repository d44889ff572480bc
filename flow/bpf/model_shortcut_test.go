package bpf

import (
	"bytes"
	"encoding/hex"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// sent is the verdict about a packet that takes the shortcut.
const sent modelVerdict = "sent"

// modelWay is the way of all packets that take the shortcut.
type modelWay struct {
	mac  net.HardwareAddr // of the interface that they come in at
	macs []byte           // destination and source at the one that they leave by
	mtu  int
	peer bool // they go to its peer at once

	now  int64    // by the clock that programs read
	last [2]int64 // when the last packet of each flow came, from the client (0), from the endpoint (1)
}

const (
	modelSecond      = 1 << 30 // ns
	modelHalfAMinute = 1 << 35
	modelPause       = int64(20 * time.Millisecond)
)

// refreshes reports whether a packet takes the IP stack so that the kernel checks neighbours:
// the first one of each second, but of a UDP stream without a pause one of each half a minute.
func (w *modelWay) refreshes(protocol byte, from int) bool {
	last := w.last[from]
	if last/modelSecond == w.now/modelSecond {
		return false
	}
	return protocol == tcp || w.now-last >= modelPause || last/modelHalfAMinute != w.now/modelHalfAMinute
}

// direct reports whether a packet of a flow takes the shortcut.
func (m *model) direct(s *skbuff, p *modelPacket, f *modelFlow, from int) bool {
	w := m.way
	if w == nil || s.link != ethernetHeader || w.refreshes(f.protocol, from) || f.seen&KernelSeenPASSED == 0 {
		return false
	}
	// The SYN passes the IP stack, its answer need not.
	answer := f.state == KernelStateASKING && from == fromEndpoint && f.protocol == tcp && p.flags&(flagSYN|flagACK|flagRST|flagFIN) == flagSYN|flagACK &&
		after(p.ack, f.first+1) && after(f.end[fromClient], p.ack)
	if open := f.state == KernelStateOPEN && p.flags&flagSYN == 0; !open && !answer {
		return false
	}
	header, ttl := 20, 8
	if p.ipv6 {
		header, ttl = 40, 7
	}
	length := len(s.frame) - s.link
	if s.gso {
		length += segmentSize - p.payload
	}
	return p.transport == s.link+header && p.fragment == wholePacket && s.frame[s.link+ttl] > 1 &&
		(p.tuple.protocol == tcp || p.isUDP()) && bytes.Equal(s.frame[:6], w.mac) && length <= w.mtu
}

// forward gives a packet what it gets at both hooks, and what a router does to it.
func (m *model) forward(s *skbuff, p *modelPacket, f *modelFlow, from int) modelVerdict {
	role := KernelRoleTO_CLIENT
	if from == fromClient {
		role = KernelRoleTO_ENDPOINT
		if f.masquerade {
			role = KernelRoleMASQUERADE
		}
	}
	p.rewrite(s, f.tuple(role))
	at := s.link
	if p.ipv6 {
		s.frame[at+7]--
	} else {
		s.keeping([]modelChecksum{{at: at + 10, from: at, to: p.transport, pseudo: -1}}, func() { s.frame[at+8]-- })
	}
	copy(s.frame, m.way.macs)
	switch {
	case m.way.peer: // which has no queues, and takes nothing from elsewhere
		s.priority = 0
	case !p.ipv6:
		const bulk, interactive, interactiveBulk = 2, 6, 4 // linux/pkt_sched.h
		s.priority = [16]uint32{
			4: bulk, 5: bulk, 6: bulk, 7: bulk,
			8: interactive, 9: interactive, 10: interactive, 11: interactive,
			12: interactiveBulk, 13: interactiveBulk, 14: interactiveBulk, 15: interactiveBulk,
		}[s.frame[at+1]&0x1e>>1]
	}
	return sent
}

// TestModelOfShortcuts plays random packets that come in at an interface of a node with
// routes: BPF does with them what the model says, whether they may go straight to the next
// interface, or to that one's peer.
func TestModelOfShortcuts(t *testing.T) {
	x := newTested(t, modelSeed(t))
	lab := netns.NewLab(t, 1)
	in, out := lab.Node.Link(t, "client"), lab.Node.Link(t, "b1")
	next := net.HardwareAddr{2, 0, 0, 0, 0, 9}
	for dst, via := range map[string]string{"0.0.0.0/0": "10.2.1.2", "::/0": "fd00:2:1::2"} {
		must.OK(t, lab.Node.Netlink().NeighSet(&netlink.Neigh{LinkIndex: out.Attrs().Index, IP: net.ParseIP(via), HardwareAddr: next, State: netlink.NUD_PERMANENT}))
		must.OK(t, lab.Node.AddRoute(netip.MustParsePrefix(dst), netip.MustParseAddr(via)))
	}
	x.ifindex, x.mac = uint32(in.Attrs().Index), [6]byte(in.Attrs().HardwareAddr)
	way := &modelWay{mac: in.Attrs().HardwareAddr, macs: slices.Concat(next, out.Attrs().HardwareAddr), mtu: out.Attrs().MTU}
	n, played := rounds(1_000_000), 0
	must.OK(t, lab.Node.Do(func() error {
		fresh, began := false, (coarse(t)-modelPause)/modelSecond
		// Packets come also before a second is as old as a pause.
		for i := 0; i < n || (coarse(t)-modelPause)/modelSecond == began; i++ {
			played++
			if i%100 == 0 || !fresh {
				if x.one(3) {
					x.world(12)
				} else {
					x.openWorld()
				}
				x.load(t)
				x.Control.Hides = 0 // here, BPF would find a route by which to hide clients
				x.openWays(t, way, uint32(out.Attrs().Index))
			}
			s, ingress := x.packet(ethernetHeader)
			ingress = ingress || !x.one(4)
			if !x.one(16) {
				copy(s.frame, way.mac)
			}
			if x.one(4) && !s.gso { // what follows a packet goes with it
				s.frame = append(s.frame, x.bytes(max(way.mtu-50+x.IntN(100)-len(s.frame), 0))...)
			}
			s.priority = pick(x.generator, 0, x.Uint32())
			in := slices.Clone(s.frame)
			err := x.compare(t, s, ingress)
			fresh = err == nil
			if err != nil && (x.m.way == nil || x.m.way.now == coarse(t)) { // else the clock has ticked meanwhile
				t.Fatalf("packet %d, ingress %v, GSO %v, %+v: %v\n%s", i, ingress, s.gso, x.m.way, err, hex.Dump(in))
			}
		}
		return nil
	}))
	t.Logf("%d packets: %v", played, x.counts)
	if n >= 10_000 && x.counts["sent"] < n/500 {
		t.Error("too few have taken the shortcut")
	}
}

// openWays has packets take the shortcut, most of the time.
func (x *tested) openWays(t *testing.T, w *modelWay, out uint32) {
	t.Helper()
	from, into := pick(x.generator, 0, KernelWayWAY_FROM, KernelWayWAY_FROM, KernelWayWAY_FROM|KernelWayWAY_PEER), pick(x.generator, 0, KernelWayWAY_INTO, KernelWayWAY_INTO, KernelWayWAY_INTO|KernelWayWAY_FROM)
	if x.one(2) { // the kernel does not tell the test to which interface a packet goes
		into |= KernelWayWAY_PEER
	}
	until := int64(time.Hour)
	if x.one(8) {
		until = -int64(time.Second)
	}
	x.Control.ShortcutsUntil = uint64(sys.Monotonic() + until)
	for index, way := range map[uint32]KernelWay{x.ifindex: from, out: into} {
		must.OK(t, x.Maps.Ways.Put(index, way))
	}
	x.Control.WaysNumber++
	x.m.way = nil
	if from&KernelWayWAY_FROM != 0 && into&KernelWayWAY_INTO != 0 && until > 0 {
		x.m.way, w.peer = w, into&KernelWayWAY_PEER != 0
	}
}

// coarse is the clock that programs read.
func coarse(t testing.TB) int64 {
	t.Helper()
	var now unix.Timespec
	must.OK(t, unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now))
	return now.Nano()
}

// age says when the last packets came: most of the time just now, so that a packet need not take
// the IP stack.
func (x *tested) age(t testing.TB) {
	t.Helper()
	w := x.m.way
	w.now = coarse(t)
	second, half := w.now/modelSecond*modelSecond, w.now/modelHalfAMinute*modelHalfAMinute
	for from := range w.last {
		w.last[from] = w.now
		switch {
		case w.now-second < modelPause:
			w.last[from] = pick(x.generator, w.now, second-1)
		case x.one(3): // or another CPU sees what comes next earlier: there is no pause
			w.last[from] = max(pick(x.generator, second, second-1, second+modelSecond, half-1, half+modelHalfAMinute), 1)
		}
		for i := range x.Flows {
			x.Flows[i].Way[from].Last = uint64(w.last[from])
		}
	}
}
