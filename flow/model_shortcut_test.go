package flow

import (
	"bytes"
	"encoding/hex"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/netns"
)

// sent is the verdict about a packet that takes the shortcut.
const sent modelVerdict = "sent"

// modelWay is the way of all packets that take the shortcut.
type modelWay struct {
	mac  net.HardwareAddr // of the interface that they come in at
	macs []byte           // destination and source at the one that they leave by
	mtu  int
}

// direct reports whether a packet of a flow takes the shortcut.
func (m *model) direct(s *skbuff, p *modelPacket, f *modelFlow, from int) bool {
	w := m.way
	if w == nil || s.link != ethernetHeader {
		return false
	}
	// The SYN passes the IP stack, its answer need not.
	answer := f.state == kernelStateASKING && from == fromEndpoint && f.protocol == tcp && p.flags&(flagSYN|flagACK|flagRST|flagFIN) == flagSYN|flagACK &&
		after(p.ack, f.first+1) && after(f.end[fromClient], p.ack)
	if open := f.state == kernelStateOPEN && f.seen&kernelSeenBESIDE == 0 && p.flags&flagSYN == 0; !open && !answer {
		return false
	}
	header, ttl := 20, 8
	if p.ipv6 {
		header, ttl = 40, 7
	}
	length := p.end - s.link
	if s.gso {
		length += segmentSize - p.payload
	}
	return p.transport == s.link+header && p.fragment == wholePacket && s.frame[s.link+ttl] > 1 &&
		(p.tuple.protocol == tcp || p.isUDP()) && bytes.Equal(s.frame[:6], w.mac) && length <= w.mtu
}

// forward gives a packet what it gets at both hooks, and what a router does to it.
func (m *model) forward(s *skbuff, p *modelPacket, f *modelFlow, from int) modelVerdict {
	role := kernelRoleTO_CLIENT
	if from == fromClient {
		role = kernelRoleTO_ENDPOINT
		if f.masquerade {
			role = kernelRoleMASQUERADE
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
	return sent
}

// TestModelOfShortcuts plays random packets that come in at an interface of a node with
// routes: BPF does with them what the model says, whether they may go straight to the next
// interface, or to that one's peer.
func TestModelOfShortcuts(t *testing.T) {
	x := newTested(t, modelSeed(t))
	lab := netns.NewLab(t, 1)
	in, out := linkOf(t, lab.Node, "client"), linkOf(t, lab.Node, "b1")
	next := net.HardwareAddr{2, 0, 0, 0, 0, 9}
	for dst, via := range map[string]string{"0.0.0.0/0": "10.2.1.2", "::/0": "fd00:2:1::2"} {
		if err := lab.Node.Netlink().NeighSet(&netlink.Neigh{LinkIndex: out.Attrs().Index, IP: net.ParseIP(via), HardwareAddr: next, State: netlink.NUD_PERMANENT}); err != nil {
			t.Fatal(err)
		}
		if err := lab.Node.AddRoute(netip.MustParsePrefix(dst), netip.MustParseAddr(via)); err != nil {
			t.Fatal(err)
		}
	}
	x.ifindex = uint32(in.Attrs().Index)
	way := &modelWay{mac: in.Attrs().HardwareAddr, macs: slices.Concat(next, out.Attrs().HardwareAddr), mtu: out.Attrs().MTU}
	n := rounds(1_000_000)
	if err := lab.Node.Do(func() error {
		fresh := false
		for i := range n {
			if i%100 == 0 || !fresh {
				if x.one(3) {
					x.world(12)
				} else {
					x.openWorld()
				}
				x.load(t)
				x.openWays(t, way, uint32(out.Attrs().Index))
			}
			const tick = int64(20 * time.Millisecond) // of the clock that programs read
			began := second(sys.Monotonic() - tick)
			s, ingress := x.packet(ethernetHeader)
			ingress = ingress || !x.one(4)
			if !x.one(16) {
				copy(s.frame, way.mac)
			}
			in := slices.Clone(s.frame)
			err := x.compare(t, s, ingress)
			fresh = err == nil
			if err != nil && second(sys.Monotonic()) == began {
				t.Fatalf("packet %d, ingress %v, GSO %v, %+v: %v\n%s", i, ingress, s.gso, x.m.way, err, hex.Dump(in))
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d packets: %v", n, x.counts)
	if n >= 10_000 && x.counts["sent"] < n/500 {
		t.Error("too few have taken the shortcut")
	}
}

func linkOf(t *testing.T, n *netns.Host, name string) netlink.Link {
	t.Helper()
	l, err := n.Netlink().LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// openWays has packets take the shortcut, most of the time.
func (x *tested) openWays(t *testing.T, w *modelWay, out uint32) {
	t.Helper()
	from, into := pick(x.generator, 0, kernelWayWAY_FROM, kernelWayWAY_FROM, kernelWayWAY_FROM|kernelWayWAY_PEER), pick(x.generator, 0, kernelWayWAY_INTO, kernelWayWAY_INTO, kernelWayWAY_INTO|kernelWayWAY_FROM)
	if x.one(2) { // the kernel does not tell the test to which interface a packet goes
		into |= kernelWayWAY_PEER
	}
	until := int64(time.Hour)
	if x.one(8) {
		until = -int64(time.Second)
	}
	x.control.ShortcutsUntil = uint64(sys.Monotonic() + until)
	for index, way := range map[uint32]kernelWay{x.ifindex: from, out: into} {
		if err := x.Ways.Put(index, way); err != nil {
			t.Fatal(err)
		}
	}
	x.m.way = nil
	if from&kernelWayWAY_FROM != 0 && into&kernelWayWAY_INTO != 0 && until > 0 {
		x.m.way = w
	}
}

// refresh has no packet take the IP stack because a second has begun since the last one.
func (x *tested) refresh() {
	now := uint64(sys.Monotonic())
	for i := range x.flows {
		for way := range x.flows[i].Way {
			atomic.StoreUint64(&x.flows[i].Way[way].Last, now)
		}
	}
}

// second is a number that changes when a packet of each flow has to take the IP stack.
func second(at int64) int64 { return at >> 30 }
