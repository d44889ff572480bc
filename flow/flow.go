package flow

import (
	"net/netip"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// flow is one connection or UDP session. Its worker's loop owns it. What BPF reads and
// writes of it is its bpf.KernelFlow.
type flow struct {
	record     *conntrack.Record // nil while it is parked
	timer      poll.Timer
	worker     *worker
	service    *portService
	handshake  *handshake // nil once it is not needed any more
	prev, next uint32     // indices in the service port's list; 0: none
	index      uint32
	generation uint32
	protocol   service.Protocol
	ended      bool // its record is written
	counted    bool // among those that limits bound

	// Fields of a parked record that BPF does not know.
	kind     service.AddressKind
	source   policy.Source
	affinity balancer.Affinity
	port     *service.Port
	endpoint *service.Endpoint
	place    conntrack.Parked
}

// handshake holds what a flow needs until an endpoint has answered, and while other endpoints may
// still answer late.
type handshake struct {
	plan  balancer.Dial
	key   bpf.KernelTuple // of the client's packets
	data  []byte          // the first packet
	ipv6  bool
	moved bool // the endpoint has not been asked from the flow's new ports yet
	unanswered
	stale []staleWay // ways back of endpoints that were given up
}

// staleWay is the way back of an abandoned endpoint. The flow moved to another one, so the tuple
// belongs to an index of its own.
type staleWay struct {
	key   bpf.KernelTuple
	index uint32
}

func (f *flow) shared() *bpf.KernelFlow { return &f.worker.kernel.Flows[f.index] }

func (f *flow) state() bpf.KernelState {
	return bpf.KernelState(atomic.LoadUint32((*uint32)(&f.shared().State)))
}

func (f *flow) setState(s bpf.KernelState) {
	atomic.StoreUint32((*uint32)(&f.shared().State), uint32(s))
}

// stopAsking sets the state to MOVING, unless BPF has changed it since the flow asked.
func (f *flow) stopAsking() bool {
	return atomic.CompareAndSwapUint32((*uint32)(&f.shared().State), uint32(bpf.KernelStateASKING), uint32(bpf.KernelStateMOVING))
}

func (f *flow) seen() bpf.KernelSeen {
	return bpf.KernelSeen(atomic.LoadUint32((*uint32)(&f.shared().Seen)))
}

func (f *flow) isUDP() bool { return f.protocol == service.UDP }

// last is when the last packet came, either way.
func (f *flow) last() int64 { return f.worker.loopTime(f.shared().Last()) }

// Refresh implements conntrack.Refresher.
func (f *flow) Refresh(r *conntrack.Record) {
	k := f.shared()
	if f.protocol != service.TCP {
		r.DatagramsFromClient = atomic.LoadUint64(&k.Way[0].Packets)
		r.DatagramsFromEndpoint = atomic.LoadUint64(&k.Way[1].Packets)
	}
	if first := atomic.LoadUint64(&k.Data); first != 0 {
		r.FirstByte = max(f.worker.loopTime(first)-r.Start, r.ConnectTime, 1)
	}
	r.Progress(atomic.LoadUint64(&k.Way[0].Bytes), atomic.LoadUint64(&k.Way[1].Bytes))
}

// Inspect implements conntrack.Inspector, by what BPF has seen.
func (f *flow) Inspect(t *conntrack.Transport) {
	k, now := f.shared(), poll.Nanotime()
	t.Idle = max(now-f.last(), 0)
	if f.protocol != service.TCP || f.state() < bpf.KernelStateOPEN || atomic.LoadUint64(&k.Answered) == 0 {
		return
	}
	for i, side := range []*conntrack.Side{&t.Client, &t.Endpoint} {
		side.Known = conntrack.ByPackets
		side.Idle = max(now-f.worker.loopTime(max(atomic.LoadUint64(&k.Way[i].Last), k.Started)), 0)
		// The other side's bytes count as sent once a packet has shown them.
		sent, acked := atomic.LoadUint32(&k.Way[1-i].End), atomic.LoadUint32(&k.Way[i].Acked)
		side.Unacked = uint64(max(int32(sent-acked), 0))
		side.Retransmits, side.Lost = atomic.LoadUint32(&k.Again[1-i]), atomic.LoadUint32(&k.Missed[i])
	}
	if k.Attempts == 1 {
		t.Endpoint.RTT = f.connectTime(f.worker.loopTime(k.Started))
	}
	if confirmed := atomic.LoadUint64(&k.Confirmed); confirmed != 0 {
		t.Client.RTT = max(int64(confirmed-atomic.LoadUint64(&k.Answered)), 0)
	}
}

// noteSource records the address that the endpoint sees.
func (f *flow) noteSource() {
	f.record.SourceAddr = f.seenFrom()
}

// seenFrom is the address that the endpoint sees.
func (f *flow) seenFrom() netip.AddrPort {
	k := f.shared()
	if k.Options&bpf.KernelOptionOPTION_MASQUERADE != 0 {
		return bpf.PortOf(k.Node, k.NodePort)
	}
	return f.middle()
}

// middle returns the client's address and port between the hooks; for a client on this node, the
// address and port that the endpoint sees.
func (f *flow) middle() netip.AddrPort {
	k := f.shared()
	if f.isOfNode() {
		return bpf.PortOf(k.Node, k.NodePort)
	}
	return bpf.PortOf(k.Client, k.MiddlePort)
}

// isOfNode reports whether the client is on this node itself.
func (f *flow) isOfNode() bool { return f.shared().Options&bpf.KernelOptionOPTION_NODE != 0 }

// wayThere is the tuple of packets from the client.
func (f *flow) wayThere() bpf.KernelTuple {
	return f.worker.kernel.Index.Tuple(bpf.ReferenceTo(f.index, bpf.KernelRoleTO_ENDPOINT))
}

// wayBack is the tuple of packets from the endpoint to the client.
func (f *flow) wayBack() bpf.KernelTuple {
	return f.worker.kernel.Index.Tuple(bpf.ReferenceTo(f.index, bpf.KernelRoleTO_CLIENT))
}

// endpointsWay is the tuple of what the endpoint sends: another one than wayBack if the client is hidden.
func (f *flow) endpointsWay() bpf.KernelTuple {
	if f.shared().Options&bpf.KernelOptionOPTION_MASQUERADE == 0 {
		return f.wayBack()
	}
	return f.worker.kernel.Index.Tuple(bpf.ReferenceTo(f.index, bpf.KernelRoleUNMASQUERADE))
}

// client is the client's address.
func (f *flow) client() netip.Addr { return f.record.Client.Addr() }
