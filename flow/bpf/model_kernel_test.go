package bpf

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/race"
)

// tested is BPF's programs with the state that a model has, to compare both.
type tested struct {
	*Kernel
	*generator
	rings     [2]*ringbuf.Reader
	served    []KernelDestination // put into the map, as are the others
	relayed   []KernelTuple
	slots     []KernelSlot
	ranges    []KernelOriginKey
	sources   []KernelRange
	clients   []KernelClient
	members   []KernelMember
	list      uint32 // the latest number
	fragments map[modelFragment]bool
	ifindex   uint32  // of the packets' interface
	mac       [6]byte // its link address
	complete  uint32  // a flag of BPF_PROG_TEST_RUN, where the kernel has it
	priority  uint32  // of the last packet, afterwards
	counts    map[string]int
}

// checksumComplete has a packet's checksum taken as a device's (CHECKSUM_COMPLETE), and
// compared afterwards (BPF_F_TEST_SKB_CHECKSUM_COMPLETE, Linux 6.16).
const checksumComplete = 1 << 2

func newTested(t testing.TB, seed uint64) *tested {
	t.Helper()
	requireRoot(t)
	k, err := Open(64, nil)
	must.OK(t, err)
	t.Cleanup(k.Close)
	g := newGenerator(seed)
	g.hash = k.Index.Hash
	x := &tested{Kernel: k, generator: g, ifindex: 1, counts: make(map[string]int)}
	for i, m := range []*ebpf.Map{k.Maps.Upcalls, k.Maps.Notices} {
		if x.rings[i], err = ringbuf.NewReader(m); err != nil {
			t.Fatal(err)
		}
		x.rings[i].SetDeadline(time.Unix(1, 0))
		t.Cleanup(func() { _ = x.rings[i].Close() })
	}
	x.complete = checksumComplete
	if _, err := k.Ethernet.Ingress.Run(&ebpf.RunOptions{Data: make([]byte, 64), Flags: checksumComplete}); err != nil {
		x.complete = 0
	}
	return x
}

func newGenerator(seed uint64) *generator { return &generator{Rand: rand.New(rand.NewPCG(seed, 0))} }

// modelSeed is random, or SLUICE_MODEL_SEED.
func modelSeed(t testing.TB) uint64 {
	seed := rand.Uint64()
	if s := os.Getenv("SLUICE_MODEL_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("SLUICE_MODEL_SEED=%d", seed)
	return seed
}

func keyOf(t modelTuple) KernelTuple { return TupleOf(t.protocol, t.src, t.dst) }

// load puts the model's state into the kernel, in place of what was there.
func (x *tested) load(t testing.TB) {
	t.Helper()
	check := func(err error) {
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Fatal(err)
		}
	}
	clear(x.Index.Buckets)
	for i := 0; i < len(x.Index.Buckets); i += 2 { // tuples whose home this is have to move
		for j := range x.Index.Buckets[i].Slot {
			x.Index.Buckets[i].Slot[j] = x.Uint64()<<32 | MostFlows
		}
	}
	for _, k := range x.served {
		check(x.Maps.Destinations.Delete(k))
	}
	for _, k := range x.relayed {
		check(x.Maps.Relayed.Delete(k))
		check(x.Maps.Sessions.Delete(k))
	}
	for f := range x.fragments {
		key := TupleOf(f.protocol, netip.AddrPortFrom(f.src, 0), netip.AddrPortFrom(f.dst, 0))
		id := make([]byte, 4)
		if f.src.Is4() {
			binary.BigEndian.PutUint16(id, uint16(f.id))
		} else {
			binary.BigEndian.PutUint32(id, f.id)
		}
		key.Sport, key.Dport, key.Fragment = binary.NativeEndian.Uint16(id), binary.NativeEndian.Uint16(id[2:]), 1
		check(x.Maps.Fragments.Delete(key))
	}
	x.loadTables(check)
	x.served, x.relayed, x.fragments = nil, nil, make(map[modelFragment]bool)
	for key, e := range x.m.entries {
		k := keyOf(key)
		if !x.Index.Put(&k, ReferenceTo(uint32(e.flow), e.role)) {
			t.Fatal("no room for a tuple")
		}
	}
	for key, id := range x.m.served {
		k := KernelDestination{Addr: AddressOf(key.dst.Addr()), Port: Wire(key.dst.Port()), Protocol: key.protocol}
		check(x.Maps.Destinations.Put(k, x.servedOf(key, id, check)))
		x.served = append(x.served, k)
	}
	for key, later := range x.m.relayed {
		until := uint64(1)
		if later {
			until = 1 << 62
		}
		check(x.Maps.Relayed.Put(keyOf(key), until))
	}
	for key := range x.m.sessions {
		k := keyOf(key)
		check(x.Maps.Sessions.Put(k, uint64(0)))
		x.relayed = append(x.relayed, k)
	}
	for i := range x.m.flows {
		x.Flows[i] = KernelFlow{}
		if i > 0 {
			x.store(i)
		}
	}
	for id, l := range x.m.loads {
		x.Loads[id] = KernelLoad{Asked: uint64(l.asked), Decided: uint64(l.decided), Begun: uint64(l.begun), Confirmed: uint64(l.confirmed), Opened: uint64(l.opened), Ended: uint64(l.ended)}
		if l.distrusted {
			x.Loads[id].AskUntil = 1 << 62
		}
	}
	if x.Control.DecidesUntil = math.MaxUint64; x.m.stale {
		x.Control.DecidesUntil = 0
	}
	x.Control.MostUndecided, x.Control.MostUnconfirmed = uint32(x.m.mostUndecided), uint32(x.m.mostUnconfirmed)
	x.Control.Magic, x.Control.Hides = 0xabc00000, 1
}

// store writes a flow as userspace does.
func (x *tested) store(i int) {
	f := &x.m.flows[i]
	moment := func(is bool) uint64 {
		if is {
			return 1
		}
		return 0
	}
	k := KernelFlow{
		State: f.state, Generation: f.generation, Service: f.service, Ifindex: x.ifindex,
		Client: AddressOf(f.client.Addr()), Vip: AddressOf(f.vip.Addr()), Endpoint: AddressOf(f.endpoint.Addr()), Node: AddressOf(f.node.Addr()),
		ClientPort: Wire(f.client.Port()), VipPort: Wire(f.vip.Port()), EndpointPort: Wire(f.endpoint.Port()),
		MiddlePort: Wire(f.middle.Port()), NodePort: Wire(f.node.Port()),
		Protocol: f.protocol, FirstSequence: f.first, Seen: f.seen, FirstEnd: f.firstEnd, Fin: f.fin, Ahead: f.ahead, Challenge: f.challenge, Again: f.again, Missed: f.missed, Confirmed: moment(f.acknowledged),
		Answered: moment(f.answered), Data: moment(f.data), Closed: moment(f.closed),
	}
	if f.masquerade {
		k.Options |= KernelOptionOPTION_MASQUERADE
	}
	if f.direct {
		k.Options |= KernelOptionOPTION_DIRECT
	}
	if f.moved {
		k.Options |= KernelOptionOPTION_MOVED
	}
	if f.elsewhere {
		k.Ifindex++
	}
	if f.own {
		k.Ifindex = 0
	}
	for from := range k.Way {
		k.Way[from] = KernelDirection{Bytes: f.bytes[from], Packets: f.packets[from], End: f.end[from], Acked: f.acked[from]}
	}
	x.Flows[i] = k
}

// verdicts of tcx.
var modelVerdicts = map[uint32]modelVerdict{1<<32 - 1: pass, 2: drop, 7: sent}

// skBuff is struct __sk_buff with what a test may set.
func skBuff(ifindex, priority uint32, segments, size int, forwarded bool) []byte {
	b := make([]byte, 192)
	if forwarded {
		binary.NativeEndian.PutUint32(b[9*4:], 1)
	}
	binary.NativeEndian.PutUint32(b[8*4:], priority)
	binary.NativeEndian.PutUint32(b[10*4:], ifindex)
	binary.NativeEndian.PutUint32(b[41*4:], uint32(segments))
	binary.NativeEndian.PutUint32(b[44*4:], uint32(size))
	return b
}

// run has the kernel handle a packet.
func (x *tested) run(t testing.TB, s *skbuff, ingress bool) (modelVerdict, []byte, error) {
	programs := x.Ethernet
	o := &ebpf.RunOptions{Data: slices.Clone(s.frame), DataOut: make([]byte, len(s.frame)), Flags: x.complete}
	if s.link == 0 {
		programs, o.Flags = must.Get(x.Bare())(t), 0 // it would begin in the middle of the packet
	}
	segments, size := 0, 0
	if s.gso {
		// Packets of virtual machines (taps) do not say how many segments they have.
		segments, size = x.IntN(2)*2, segmentSize
	}
	o.Context = skBuff(x.ifindex, s.priority, segments, size, s.forwarded)
	after := skBuff(0, 0, 0, 0, false)
	o.ContextOut = after
	program := programs.Egress
	if ingress {
		program = programs.Ingress
	}
	x.Control.Beat = 0
	if x.m.alive { // userspace may say so after the packet has come, and this thread may be stopped here
		x.Control.Beat = uint64(sys.Monotonic() + int64(time.Hour))
	}
	if x.m.way != nil {
		x.age(t)
	}
	code, err := program.Run(o)
	verdict, ok := modelVerdicts[code]
	if !ok {
		verdict = modelVerdict(fmt.Sprintf("verdict %d", code))
	}
	x.priority = binary.NativeEndian.Uint32(after[8*4:])
	return verdict, o.DataOut, err
}

// drain empties the rings.
func (x *tested) drain() error {
	for _, r := range x.rings {
		for r.AvailableBytes() > 0 {
			if _, err := r.Read(); err != nil {
				return err
			}
		}
	}
	return nil
}

// told reads what userspace is told.
func (x *tested) told(t testing.TB) (told []modelEvent) {
	for _, r := range x.rings {
		for r.AvailableBytes() > 0 {
			rec := must.Get(r.Read())(t)
			var e KernelEvent
			ok := DecodeEvent(&e, rec.RawSample)
			if !ok || e.Time == 0 || e.Ifindex != x.ifindex {
				t.Fatalf("a wrong event: %+v", e)
			}
			told = append(told, modelEvent{
				kind: e.Kind, flow: e.Flow, service: e.Service, generation: e.Generation, reason: e.Reason,
				packet: string(rec.RawSample[EventSize : EventSize+int(e.Length)]),
			})
		}
	}
	return told
}

// compare has the model and the kernel handle a packet, and returns how they differ.
func (x *tested) compare(t testing.TB, s *skbuff, ingress bool) error {
	m := x.m
	in := slices.Clone(s.frame)
	hook := m.egress
	if ingress {
		hook = m.ingress
	}
	verdict, out, err := x.run(t, s, ingress)
	if err != nil {
		return fmt.Errorf("BPF_PROG_TEST_RUN: %w", err)
	}
	m.events = m.events[:0]
	s.others = s.frame[0]&1 == 0 && !bytes.Equal(s.frame[:6], x.mac[:])
	expected := hook(s)
	for f := range m.fragments {
		x.fragments[f] = true
	}
	for r := range m.relayed {
		x.relayed = append(x.relayed, keyOf(r))
	}
	name := string(expected)
	if expected == pass && !bytes.Equal(in, s.frame) {
		name = "translated"
	}
	for _, e := range m.events {
		name += fmt.Sprintf(", event %d", e.kind)
	}
	x.counts[name]++
	if verdict != expected {
		return fmt.Errorf("verdict %q, the model says %q", verdict, expected)
	}
	if told := x.told(t); !slices.Equal(told, m.events) {
		return fmt.Errorf("userspace is told %+v, the model says %+v", told, m.events)
	}
	for _, at := range s.checksums {
		if be16(out[at:]) == 0xffff && be16(s.frame[at:]) == 0 {
			copy(out[at:], []byte{0, 0}) // the same number
		}
	}
	if verdict != drop && !bytes.Equal(out, s.frame) {
		return fmt.Errorf("bytes\n%s, the model says\n%s, it was\n%s", hex.Dump(out), hex.Dump(s.frame), hex.Dump(in))
	}
	if verdict != drop && x.priority != s.priority {
		return fmt.Errorf("priority %d, the model says %d", x.priority, s.priority)
	}
	return x.compareFlows()
}

// compareFlows compares the state of all flows and loads.
func (x *tested) compareFlows() error {
	for i := 1; i < len(x.m.flows); i++ {
		f, k := &x.m.flows[i], &x.Flows[i]
		if f.state == KernelStateFREE {
			if k.State != KernelStateFREE || k.Generation != f.generation {
				return fmt.Errorf("flow %d is in state %d, generation %d; the model says free, generation %d", i, k.State, k.Generation, f.generation)
			}
			continue
		}
		node := f.node
		if f.masquerade {
			node = PortOf(k.Node, k.NodePort)
		}
		is := modelFlow{
			client: PortOf(k.Client, k.ClientPort), vip: PortOf(k.Vip, k.VipPort), endpoint: PortOf(k.Endpoint, k.EndpointPort),
			middle: netip.AddrPortFrom(f.middle.Addr(), Wire(k.MiddlePort)), node: node,
			masquerade: k.Options&KernelOptionOPTION_MASQUERADE != 0, direct: k.Options&KernelOptionOPTION_DIRECT != 0, protocol: f.protocol, first: f.first,
			generation: k.Generation, service: k.Service, state: k.State, seen: k.Seen, firstEnd: k.FirstEnd, fin: k.Fin, ahead: k.Ahead, again: k.Again, missed: k.Missed, acknowledged: k.Confirmed != 0,
			answered: k.Answered != 0, data: k.Data != 0, closed: k.Closed != 0, challenge: k.Challenge, elsewhere: k.Ifindex != x.ifindex, own: k.Ifindex == 0, moved: k.Options&KernelOptionOPTION_MOVED != 0,
		}
		for from, d := range k.Way {
			is.bytes[from], is.packets[from], is.end[from], is.acked[from] = d.Bytes, d.Packets, d.End, d.Acked
		}
		if is != *f {
			return fmt.Errorf("flow %d is\n%+v, the model says\n%+v", i, is, *f)
		}
	}
	if c := x.Control; int(c.Given-c.Taken) != len(x.m.spare) || int(c.Untold) != x.m.untold {
		return fmt.Errorf("%d flows are spare, %d untold of; the model says %d and %d", c.Given-c.Taken, c.Untold, len(x.m.spare), x.m.untold)
	}
	for id, l := range x.m.loads {
		is := x.Loads[id]
		undecided, begun, confirmed, opened := int(is.Asked-is.Decided), int(is.Begun), int(is.Confirmed), int(is.Opened)
		if undecided != l.asked-l.decided || begun != l.begun || confirmed != l.confirmed || opened != l.opened {
			return fmt.Errorf("load %d is %+v, the model says %+v", id, is, *l)
		}
	}
	return nil
}

func full() bool { return os.Getenv("SLUICE_TEST_FULL") == "1" }

// rounds is how many packets a test plays, of so many at full size.
func rounds(n int) int {
	if full() {
		return n
	}
	return race.Fewer(n / 50)
}

// TestModelOfPackets plays random packets: whatever their shape, BPF does what the model
// says.
func TestModelOfPackets(t *testing.T) {
	x := newTested(t, modelSeed(t))
	n := rounds(1_000_000)
	for i := range n {
		if i%500 == 0 {
			x.world(12)
			x.load(t)
		}
		s, ingress := x.packet(pick(x.generator, 0, ethernetHeader))
		in := slices.Clone(s.frame)
		if err := x.compare(t, s, ingress); err != nil {
			t.Fatalf("packet %d, link header %d, ingress %v, GSO %v: %v\n%s", i, s.link, ingress, s.gso, err, hex.Dump(in))
		}
	}
	t.Logf("%d packets, device's sums %v: %v", n, x.complete != 0, x.counts)
	for _, kind := range []string{"pass", "drop", "translated", "drop, event 1", "drop, event 2", "translated, event 8", "translated, event 10"} {
		if full() && x.counts[kind] < n/5000 {
			t.Errorf("too few: %s", kind)
		}
	}
	if full() && x.counts["drop, event 1, event 9"] == 0 {
		t.Error("the table has never met a way back that is taken")
	}
}
