package bpf

import (
	"encoding/binary"
	"encoding/hex"
	"slices"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

// walk is a connection between two peers that know nothing of BPF. It knows what really
// happened.
type walk struct {
	index     int
	next      [2]uint32 // sequence numbers that the peers send next
	got       [2]uint32 // what each has received in order
	acked     [2]uint32 // the latest acknowledgement of each
	sent      [2]uint64 // bytes
	again     [2]uint32 // segments with bytes that have come to BPF before
	missed    [2]uint32 // the same, of those that were lost before, and that the receiver asked for
	fin       [2]bool   // the FIN has arrived
	syn       bool
	open      bool       // the endpoint has accepted
	end       KernelSeen // what ended the connection first
	disturbed bool       // forged segments have come

	ended [2]bool // the FIN is sent
	gap   [2]gap
}

// gap is a segment of a peer that was lost before it came to BPF, and what follows it.
type gap struct {
	open   bool // it is not sent again yet
	told   bool // it has been sent again, but the receiver has not acknowledged what follows
	at     uint32
	length int
	behind uint64 // bytes that follow
	fin    bool   // a FIN follows
	asked  bool   // the receiver has asked for it
}

// acknowledged says that the receiver has told that there is no gap any more.
func (w *walk) acknowledged(from int) {
	g := &w.gap[from]
	if !g.told {
		return
	}
	w.sent[from] += g.behind
	if g.fin {
		w.finishes(from)
	}
	*g = gap{}
}

// finishes says that a FIN has arrived.
func (w *walk) finishes(from int) {
	w.fin[from] = true
	if w.end == 0 {
		w.end = [2]KernelSeen{KernelSeenCLIENT_FIN, KernelSeenENDPOINT_FIN}[from]
	}
}

func (w *walk) resets(from int) {
	if w.end == 0 {
		w.end = [2]KernelSeen{KernelSeenCLIENT_RST, KernelSeenENDPOINT_RST}[from]
	}
}

// segmentOf is a frame with a segment of one of the peers, as it comes to BPF.
func (g *generator) segmentOf(f *modelFlow, from int, flags byte, sequence, ack uint32, length int) *skbuff {
	t := modelTuple{f.client, f.vip, tcp}
	if from == fromEndpoint {
		t = modelTuple{f.endpoint, f.middle, tcp}
	}
	b := binary.BigEndian.AppendUint16(nil, t.src.Port())
	b = binary.BigEndian.AppendUint16(b, t.dst.Port())
	b = binary.BigEndian.AppendUint32(b, sequence)
	b = binary.BigEndian.AppendUint32(b, ack)
	b = append(b, 5<<4, flags, 0xff, 0xff, 0, 0, 0, 0)
	b = append(b, g.bytes(length)...)
	s := &skbuff{link: ethernetHeader, protocol: 0x0800}
	if f.client.Addr().Is6() {
		s.protocol = 0x86dd
	}
	s.frame = append(binary.BigEndian.AppendUint16(g.bytes(12), s.protocol), g.ip(t, b, wholePacket, g.Uint32())...)
	return s
}

// step makes the next segment of a walk. It returns nil if there is none.
func (w *walk) step(g *generator, f *modelFlow, forge bool) (s *skbuff, from int) {
	from = g.IntN(2)
	other := 1 - from
	segment := func(flags byte, sequence uint32, length int) *skbuff {
		if flags&flagACK != 0 && flags&flagRST == 0 {
			w.acked[from] = w.got[from]
			w.acknowledged(1 - from)
			missed := &w.gap[other]
			missed.asked = missed.asked || missed.open && w.got[from] == missed.at && f.seen&aheadMark(other) != 0
		}
		return g.segmentOf(f, from, flags, sequence, w.got[from], length)
	}
	lost := &w.gap[from]
	switch {
	case forge && g.one(5):
		w.disturbed = true
		flags, sequence, ack := g.numbers(f, from)
		return g.segmentOf(f, from, flags, sequence, ack, g.IntN(50)), from
	case !w.syn || !w.open && from == fromClient:
		if w.syn && (f.state == KernelStateMOVING || f.seen&KernelSeenPASSED != 0) {
			w.again[fromClient]++
		}
		w.syn, from = true, fromClient
		return g.segmentOf(f, fromClient, flagSYN, f.first, 0, 0), from
	case !w.open && g.one(3):
		return g.segmentOf(f, fromEndpoint, flagRST|flagACK, 0, f.first+1, 0), from
	case !w.open:
		isn := pick(g, g.Uint32(), 1<<32-1, 1<<31-1)
		w.open = true
		w.next, w.got = [2]uint32{f.first + 1, isn + 1}, [2]uint32{isn + 1, f.first + 1}
		w.acked = [2]uint32{isn, f.first + 1}
		return g.segmentOf(f, fromEndpoint, flagSYN|flagACK, isn, f.first+1, 0), from
	case g.one(12): // an old segment again
		n := uint32(g.IntN(3))
		return segment(flagACK, w.next[from]-n, 0), from
	case g.one(12) && w.sent[from] > 0 && !lost.open && !lost.told && !w.ended[from]: // one with bytes
		n := uint32(1 + g.IntN(int(w.sent[from])))
		w.again[from]++
		return segment(flagACK, w.next[from]-n, int(n)), from
	case g.one(40): // a reset that nobody believes
		return segment(flagRST, pick(g, w.acked[other]-1, w.next[from]+2, w.next[from]+1<<31), 0), from
	case lost.open && g.one(4): // it is sent again
		lost.open, lost.told = false, lost.behind > 0 || lost.fin
		w.sent[from] += uint64(lost.length)
		if lost.asked {
			w.missed[from]++
		}
		w.got[other] = w.next[from]
		return segment(flagACK, lost.at, lost.length), from
	case (lost.open || lost.told) && w.next[from]-f.end[from] > 1 && g.one(60): // userspace asks the peers what has become of it
		return segment(flagRST|byte(g.IntN(2))*flagACK, w.next[from], 0), from
	case !lost.open && !lost.told && g.one(60):
		w.resets(from)
		return segment(flagRST|byte(g.IntN(2))*flagACK, w.next[from], 0), from
	case w.ended[from]:
		return segment(flagACK, w.next[from], 0), from
	}
	n := g.IntN(60) * g.IntN(2)
	at := w.next[from]
	w.next[from] += uint32(n)
	if n > 0 && !lost.open && !lost.told && g.one(12) {
		*lost = gap{open: true, at: at, length: n}
		return w.step(g, f, forge)
	}
	w.acknowledged(other) // an end that this segment acknowledges came first
	flags := byte(flagACK)
	if g.one(15) {
		w.ended[from] = true
		w.next[from]++
		flags |= flagFIN
	}
	if lost.open || lost.told {
		lost.behind += uint64(n)
		lost.fin = lost.fin || w.ended[from]
	} else {
		w.sent[from] += uint64(n)
		if w.ended[from] {
			w.finishes(from)
		}
	}
	if !lost.open && (lost.told || !g.one(10)) { // else it is lost behind BPF
		defer func() { w.got[other] = w.next[from] }()
	}
	return segment(flags, at, n), from
}

// TestModelOfConnections plays connections from the SYN to the end, with resets inside and
// outside the window, refusals, segments that come again, and forged ones. BPF does what
// the model says, and both know in the end what the peers have really done.
func TestModelOfConnections(t *testing.T) {
	x := newTested(t, modelSeed(t))
	const flows, steps = 16, 640
	ends := make(map[KernelSeen]int)
	for range max(rounds(500_000)/steps, 3) {
		x.walkWorld(flows)
		x.plain = true
		x.load(t)
		walks := make([]walk, flows)
		for i := range walks {
			walks[i].index = i + 1
		}
		for range steps {
			i := x.IntN(len(walks))
			w, f := &walks[i], &x.m.flows[i+1]
			if f.state == KernelStateMOVING && !x.one(3) { // another endpoint
				for tuple := range f.entries() {
					delete(x.m.entries, tuple)
				}
				f.state = KernelStateASKING
				f.endpoint = x.addrPort(f.client.Addr().Is6())
				for tuple, role := range f.entries() {
					x.m.entries[tuple] = modelEntry{i + 1, role}
				}
				x.load(t)
			}
			s, from := w.step(x.generator, f, i%2 == 0)
			in := slices.Clone(s.frame)
			if err := x.compare(t, s, from == fromClient); err != nil {
				t.Fatalf("flow %d, from %d: %v\n%s", i+1, from, err, hex.Dump(in))
			}
			if p, ok := readPacket(s); ok && f.masquerade && p.tuple == (modelTuple{f.middle, f.endpoint, tcp}) {
				in = slices.Clone(s.frame)
				if err := x.compare(t, s, false); err != nil {
					t.Fatalf("flow %d, hidden: %v\n%s", i+1, err, hex.Dump(in))
				}
			}
			w.open = w.open && f.answered // else the answer came too late
			for _, e := range x.m.events {
				if e.kind == KernelEventKindEVENT_REFUSED && f.state == KernelStateASKING && !x.one(4) {
					f.state = KernelStateMOVING
					x.store(i + 1)
				}
			}
		}
		for i := range walks {
			w, f := &walks[i], &x.m.flows[i+1]
			if w.disturbed || !x.m.alive {
				continue
			}
			w.check(t, f)
			ends[f.firstEnd]++
		}
	}
	t.Logf("%v, ends: %v", x.counts, ends)
	if full() && len(ends) < 5 {
		t.Error("not all ends have been")
	}
}

// check compares what BPF knows about a connection with what has happened.
func (w *walk) check(t *testing.T, f *modelFlow) {
	if w.sent != f.bytes || w.again != f.again || w.missed != f.missed || w.end != f.firstEnd {
		t.Fatalf("%+v ended as\n%+v", w, f)
	}
	if w.fin[0] != (f.seen&KernelSeenCLIENT_FIN != 0) || w.fin[1] != (f.seen&KernelSeenENDPOINT_FIN != 0) {
		t.Fatalf("%+v: FINs of\n%+v", w, f)
	}
}

// walkWorld makes TCP flows whose endpoints are asked next.
func (g *generator) walkWorld(flows int) {
	g.world(1)
	g.m.entries = make(map[modelTuple]modelEntry)
	g.m.flows = make([]modelFlow, flows+1)
	g.tables(0)
	for i := 1; i <= flows; i++ {
		f := g.flow(g.one(2), tcp)
		for f.state != KernelStateASKING || f.direct {
			f = g.flow(g.one(2), tcp)
		}
		f.seen &^= KernelSeenPASSED
		g.m.flows[i] = f
		for tuple, role := range f.entries() {
			g.m.entries[tuple] = modelEntry{i, role}
		}
		g.m.served[modelTuple{dst: f.vip, protocol: tcp}] = f.service
	}
}

// FuzzTranslate lets the fuzzer change packets: BPF does with each what the model says.
func FuzzTranslate(f *testing.F) {
	const seed = 1
	x := newTested(f, seed)
	x.world(12)
	for range 200 {
		link := pick(x.generator, 0, ethernetHeader)
		s, ingress := x.packet(link)
		f.Add(s.frame, ingress, link == 0, s.gso)
	}
	f.Fuzz(func(t *testing.T, frame []byte, ingress, bare, gso bool) {
		if len(frame) < 15 || len(frame) > 3000 || len(frame) < shortest(frame) {
			return
		}
		x.generator = newGenerator(seed)
		x.world(12)
		x.load(t)
		s := &skbuff{frame: slices.Clone(frame), link: ethernetHeader, protocol: be16(frame[12:]), gso: gso, segment: segmentSize}
		if bare {
			s.link = 0
		}
		must.OK(t, x.compare(t, s, ingress))
	})
}
