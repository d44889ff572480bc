package flow

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/attach"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/host/drops"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// Options are what a Server works with.
type Options struct {
	// MaxFlows bounds the flows. Each takes 280 bytes of kernel memory from the start (up to
	// 344 if their number is no power of two), and 240 bytes of the process's while it is open.
	MaxFlows int
	// Namespace is a descriptor of the network namespace; 0 is the process's own.
	Namespace int
	// BPFRoot is the mount point of the BPF file system, where everything is pinned that outlives
	// the process; empty: nothing outlives it. Name is the proxy's name there.
	BPFRoot, Name string
	// Keep lets pinned flows go on when the Server stops.
	Keep bool
	// Loop is an event loop of its own, and Shard its part of Table.
	Loop  *poll.Loop
	Shard *conntrack.Shard
	Table *conntrack.Table
	// SameLink reports whether two hosts reach each other without this node's IP layer.
	SameLink func(a, b netip.Addr) bool
	// Links returns what SameLink goes by.
	Links func() []hostnet.Link
	// ReplyPorts are ports whose replies steering delivers to this node; 0 if none.
	ReplyPorts [2]uint16

	IdleTimeout       time.Duration // 0 for none
	HalfClosedTimeout time.Duration // 0 for none
	UDPTimeout        time.Duration
	UDPStreamTimeout  time.Duration
	// Shortcuts lets packets of open flows skip the node's IP stack where nobody else
	// looks at them there.
	Shortcuts bool
	// Waits lets the Server start on a node that forwards nothing: all is relayed until it does.
	Waits bool
	// Relayed visits the UDP sessions that the relay has when the kernel begins to forward. Session
	// hears of later ones.
	Relayed func(visit func(client, vip netip.AddrPort))
	// Drops knows what rules of this node drop; nil: nothing is known.
	Drops *drops.Watch
	// Judges names the rules of other programs that judge forwarded packets; nil: there are none.
	Judges func() ([]string, error)
	// Counted reports whether the metrics of the previous process include the adopted flows.
	Counted bool
	// WantsUDP reports whether a session's record goes to the access log.
	WantsUDP func(*conntrack.Record) bool
	// Dropped is called for each first packet that policy drops, on the Loop. It may be nil.
	Dropped func(client netip.Addr, vip netip.AddrPort, protocol service.Protocol, v *policy.Verdict)
	// NotAdmitted is called each second, on the Loop, with what source ranges have refused since
	// the last call, and the number of packets: more than are listed where the kernel's map had no
	// room. It may be nil.
	NotAdmitted func(list []conntrack.Refusal, packets uint64)
	Logger      zerolog.Logger

	// tests: instead of bpf.Open
	open func(flows int, p *bpf.Pins) (*bpf.Kernel, error)

	filters bool          // tests: as if there were no tcx
	ask     bool          // tests: userspace decides about all flows
	repair  time.Duration // tests: instead of 5 s
	old     time.Duration // tests: instead of oldPins
	waits   waits         // tests: instead of defaultWaits
}

const (
	// oldPins is how long programs of another version keep serving their connections.
	oldPins = time.Hour
	// othersAgain is when the next process looks again what these have: handshakes that were under way
	// have ended.
	othersAgain = 2 * time.Second
)

// Limits of each service port: beyond them, new flows pass to the relay.
const (
	mostUndecided   = 256
	mostUnconfirmed = 1024
)

// Server is the second data path. Its methods belong to one goroutine, except Stats and Started;
// Start may run on another one meanwhile.
type Server struct {
	options    Options
	log        zerolog.Logger
	kernel     *bpf.Kernel
	pins       *bpf.Pins // nil if nothing outlives the process
	interfaces *attach.Interfaces
	shortcuts  *shortcuts // nil: no packet takes one
	node       atomic.Pointer[nodeClients]
	tracking   sync.WaitGroup // goroutines that enter flows in connection tracking
	old        *time.Timer    // ends programs of other versions
	again      *time.Timer
	worker     *worker
	paths      [service.SCTP + 1]*Path
	inherits   bool   // an earlier process has left its maps
	lastList   uint32 // number of the last list that it made; 0: none
	forwarding *forwardingWatcher
	judges     judges
	once       once.Log
	warning    sync.Mutex // of once, where warn is called
	stats      stats
	began      int64       // when the Server was made, by CLOCK_MONOTONIC in ns
	started    atomic.Bool // Start has succeeded
	left       atomic.Bool // the next process has the maps, or is about to
	closed     bool
	uncounted  map[string]uint64                        // what BPF had counted before this process; nil until Start
	origins    map[bpf.KernelOriginKey]bpf.KernelOrigin // in the kernel's map; nil: unknown
	ranges     ranges
	seed       maphash.Seed // of the sums of lists
	buffers    tableBuffers
	inherited  map[bpf.KernelSet][]balancer.Pin // clients that an earlier process has added, by their group
}

// New returns a Server that forwards nothing until it has started. It fails if the process lacks
// a right, and on a node that forwards nothing, unless the Server Waits for that.
func New(o Options) (*Server, error) {
	s := &Server{options: o, log: o.Logger, seed: maphash.MakeSeed(), once: once.Log{Logger: o.Logger}, judges: judges{find: o.Judges, log: o.Logger}}
	if s.options.SameLink == nil {
		s.options.SameLink = func(netip.Addr, netip.Addr) bool { return false }
	}
	if s.options.open == nil {
		s.options.open = bpf.Open
	}
	if s.options.Links == nil {
		s.options.Links = func() []hostnet.Link { return nil }
	}
	if s.options.WantsUDP == nil {
		s.options.WantsUDP = func(*conntrack.Record) bool { return true }
	}
	if s.options.Relayed == nil {
		s.options.Relayed = func(func(client, vip netip.AddrPort)) {}
	}
	err := hasRights()
	if err != nil {
		return nil, err
	}
	if s.forwarding, err = openForwardingWatcher(o.Namespace, &s.judges, o.Logger); err != nil {
		return nil, err
	}
	if u, err := s.forwarding.check(); err != nil || u.none() && !o.Waits {
		s.forwarding.close()
		return nil, cmp.Or(err, errForwarding)
	}
	for _, p := range []service.Protocol{service.TCP, service.UDP, service.SCTP} {
		s.Over(nil, p) // all of it is relayed
	}
	s.began = sys.Monotonic()
	return s, nil
}

var errLoopEnded = errors.New("the event loop has ended")

// Start loads the programs and maps, or takes over those that are pinned, has the programs
// translate some packets, and attaches them to all interfaces. The loop runs, and the caller's
// thread is in the network namespace, as the loop's is. On a busy machine the kernel's verifier
// takes seconds. Until Start has returned, and if it fails, all is relayed; then Close has yet to
// release what it has opened.
func (s *Server) Start() (err error) {
	o := &s.options
	if o.BPFRoot != "" {
		if s.pins, err = bpf.OpenPins(o.BPFRoot, o.Name, o.Namespace, o.MaxFlows); err != nil {
			s.log.Info().Str("because", err.Error()).Msg("kernel flows end with the process")
		}
	}
	s.judges.check(true)
	if err := s.load(); err != nil {
		return err
	}
	before := s.counted()
	if err := s.onLoop(func() (err error) {
		s.worker, err = newWorker(s, o.Loop, o.Shard)
		return err
	}); err != nil {
		return err
	}
	if err := s.try(); err != nil {
		return err
	}
	if err := s.attach(); err != nil {
		return err
	}
	if err := s.onLoop(s.worker.start); err != nil {
		return err
	}
	left := 0
	if s.pins != nil {
		s.pins.DisarmOthers()
		left = s.takeOthers()
	}
	s.adoptUnserved()
	s.inherit()
	if s.pins != nil {
		s.again = time.AfterFunc(othersAgain, func() {
			if left == 0 || s.takeOthers() == 0 {
				s.removeOthers()
			}
		})
		s.old = time.AfterFunc(cmp.Or(o.old, oldPins), s.removeOthers)
	}
	s.forwarding.start()
	s.uncounted = before
	s.started.Store(true)
	return nil
}

// load loads the programs and maps, and sets the limits.
func (s *Server) load() (err error) {
	o := &s.options
	if s.kernel, err = o.open(o.MaxFlows, s.pins); err != nil {
		return err
	}
	s.ranges.server = s
	c := s.kernel.Control
	s.inherits, s.lastList = c.Magic != 0, c.LastList
	for c.Magic == 0 {
		c.Magic = rand.Uint32() &^ bpf.FlowMask
	}
	if s.pins != nil {
		c.Netns = s.pins.Netns
	}
	c.MostUndecided = mostUndecided
	c.MostFlows, c.LeastSpare = uint32(o.MaxFlows/serviceShare), uint32(o.MaxFlows/spareShare)
	s.boundHandshakes(s.judges.judged())
	c.FirstReply, c.LastReply = o.ReplyPorts[0], o.ReplyPorts[1]
	setHiding(s.kernel, bpf.KernelHidingHIDES, tableHides()) // the process before may still serve: other bits stay
	return nil
}

// attach puts the programs at all interfaces, and at each one that comes later.
func (s *Server) attach() (err error) {
	o := &s.options
	at := attach.Options{
		Ethernet: attach.Programs(s.kernel.Ethernet),
		Bare: func() (attach.Programs, error) {
			programs, err := s.kernel.Bare()
			return attach.Programs(programs), err
		},
		Namespace: o.Namespace, Logger: o.Logger, Filters: o.filters, Repair: o.repair,
	}
	node := openNodeClients(s.kernel, o)
	s.node.Store(node)
	if node.device != nil {
		at.Loopback.Egress = s.kernel.Ethernet.Egress
	}
	if s.pins != nil {
		at.Pin, at.First = s.pins.LinkPath, s.pins.HasOthers()
	}
	if o.Shortcuts {
		if s.shortcuts, err = openShortcuts(s.kernel, o.Namespace, o.Name, s.leaveShortcuts, node, o.Logger); err != nil {
			return err
		}
		at.Follower = s.shortcuts
	}
	if s.interfaces, err = attach.Open(at); err != nil {
		return err
	}
	return s.interfaces.Start()
}

// onLoop runs f on the loop, and waits for it.
func (s *Server) onLoop(f func() error) error {
	result := make(chan error, 1)
	if !s.options.Loop.Post(func() { result <- f() }) {
		return errLoopEnded
	}
	return <-result
}

// Started reports whether Start has succeeded: the kernel forwards. It is safe for concurrent use.
func (s *Server) Started() bool { return s.started.Load() }

// Changed receives when the node begins or stops to forward a family, or when rules of others begin
// or cease to judge forwarded packets. Then call Apply of each Path.
func (s *Server) Changed() <-chan struct{} { return s.forwarding.changed }

// Stop ends all flows, or leaves them to the next process. Nothing new is forwarded from
// then on. It fails if ctx ends before.
func (s *Server) Stop(ctx context.Context) error {
	if !s.Started() {
		return nil
	}
	done := make(chan struct{})
	end := func() { s.worker.stop(func() { close(done) }) }
	keep := s.options.Keep && s.pins != nil
	if keep {
		end = func() {
			s.worker.leave()
			close(done)
		}
		s.interfaces.Close(true)
	} else {
		s.interfaces.Close(false)
		if s.pins != nil {
			s.pins.Remove()
		}
	}
	s.closeShortcuts()
	if !s.worker.loop.Post(end) {
		return errLoopEnded
	}
	select {
	case <-done:
		s.node.Load().close(keep)
		return nil
	case <-ctx.Done():
		return fmt.Errorf("ending %d flows: %w", s.stats.open.Load(), ctx.Err())
	}
}

// HandOver leaves the flows to the next process, which starts with the same pins afterwards. It
// returns an error if there are no pins: then all flows end.
func (s *Server) HandOver(ctx context.Context) error {
	if !s.Started() {
		return nil
	}
	s.left.Store(true)
	if s.old != nil {
		s.old.Stop()
		s.again.Stop()
	}
	if s.pins == nil {
		return errors.Join(errNoPins, s.Stop(ctx))
	}
	err := s.onLoop(func() error { s.worker.decideAll(); return nil })
	s.options.Keep = true
	return errors.Join(err, s.Stop(ctx))
}

var errNoPins = errors.New("without a BPF file system, forwarded connections end with the process")

func (s *Server) closeShortcuts() {
	if s.shortcuts != nil {
		s.shortcuts.close()
		s.shortcuts = nil
	}
}

// Close releases everything. Either Start has failed, or the loop has ended or never ran. It may
// be called again.
func (s *Server) Close() {
	if s.closed {
		return
	}
	s.closed = true
	s.forwarding.close()
	if s.old != nil {
		s.old.Stop()
		s.again.Stop()
	}
	if s.interfaces != nil {
		s.interfaces.Close(s.Started() || s.worker.left > 0) // keep them if connections need them
	}
	s.tracking.Wait()
	s.closeShortcuts()
	if n := s.node.Load(); n != nil {
		n.close(s.Started() || s.worker.left > 0)
	}
	if s.worker != nil {
		s.worker.close()
	}
	if s.kernel != nil {
		s.kernel.Close()
	}
}

// stats counts what concerns no single flow.
type stats struct {
	open     atomic.Int64
	late     atomic.Uint64
	void     atomic.Uint64
	damaged  atomic.Uint64
	unserved atomic.Uint64
	passed   atomic.Uint64
}

// Stats are the counts of a Server.
type Stats struct {
	Open        int64             `metric:"sluice_flows" help:"Connections and UDP sessions that the kernel forwards."`
	Asked       uint64            `metric:"sluice_flows_asked_total" help:"First packets about which the kernel's data path asked the process."`
	Decided     uint64            `metric:"sluice_flows_decided_total" help:"Connections and UDP sessions about which the kernel's table decided."`
	NotAdmitted uint64            `metric:"sluice_flows_not_admitted_total" help:"First packets of clients outside of a Service's source ranges, dropped by the kernel's table."`
	Shortcuts   uint64            `metric:"sluice_flows_shortcuts_total" help:"Packets of the kernel's data path that skipped the node's IP stack."`
	Refused     uint64            `metric:"sluice_flows_refused_total" help:"Connections and UDP datagrams that the relay refused, as rules for forwarded packets would not have seen them."`
	PassedAll   uint64            `metric:"sluice_flows_passed_total" help:"Packets to Services that the kernel's data path left to the relay; of TCP, SYNs alone."` // Passed, and what BPF left
	Passed      uint64            // first packets that were decided to be the relay's
	Void        uint64            // upcalls that were too old
	Damaged     uint64            // first packets with a wrong checksum
	Unserved    uint64            // first packets that policy dropped
	Late        uint64            // SYN-ACKs and INIT ACKs of endpoints that had been given up
	Lost        uint64            `metric:"sluice_flows_packets_lost_total" help:"Packets that the kernel's data path could not send again after a decision."`
	Kernel      map[string]uint64 // counts of BPF, by name
}

// counterNames are the names of Stats.Kernel.
var counterNames = map[bpf.KernelCounter]string{
	bpf.KernelCounterCOUNT_TRANSLATED:     "translated",
	bpf.KernelCounterCOUNT_ASKED:          "asked",
	bpf.KernelCounterCOUNT_INJECTED:       "injected",
	bpf.KernelCounterCOUNT_REFUSED:        "refused",
	bpf.KernelCounterCOUNT_LATE:           "late",
	bpf.KernelCounterCOUNT_ICMP:           "icmp_errors",
	bpf.KernelCounterCOUNT_FRAGMENTS:      "fragments",
	bpf.KernelCounterCOUNT_COLLISIONS:     "collisions",
	bpf.KernelCounterCOUNT_DECIDED:        "decided",
	bpf.KernelCounterCOUNT_SCTP_FRAGMENTS: "sctp_fragments",
	bpf.KernelCounterCOUNT_SHORTCUTS:      "shortcuts",
	bpf.KernelCounterCOUNT_NOT_ADMITTED:   "not_admitted",
	bpf.KernelCounterPASSED_NO_HEARTBEAT:  "passed_no_heartbeat",
	bpf.KernelCounterPASSED_UNDECIDED:     "passed_undecided",
	bpf.KernelCounterPASSED_UNCONFIRMED:   "passed_unconfirmed",
	bpf.KernelCounterPASSED_RING_FULL:     "passed_ring_full",
	bpf.KernelCounterPASSED_SOCKET:        "passed_socket",
	bpf.KernelCounterPASSED_RELAYED:       "passed_relayed",
	bpf.KernelCounterPASSED_SHAPE:         "passed_shape",
}

// counted returns what BPF has counted, also for processes before.
func (s *Server) counted() map[string]uint64 {
	counts := make(map[string]uint64, len(counterNames))
	for which, name := range counterNames {
		counts[name] = s.count(which)
	}
	return counts
}

// count returns one of these counts.
func (s *Server) count(which bpf.KernelCounter) (n uint64) {
	var each []uint64
	if s.kernel.Maps.Counters.Lookup(&which, &each) == nil {
		for _, one := range each {
			n += one
		}
	}
	return n
}

// Stats returns the counts of this process; none before Start has succeeded. It is safe for concurrent use.
func (s *Server) Stats() Stats {
	if !s.Started() {
		return Stats{}
	}
	st := Stats{
		Open:     s.stats.open.Load(),
		Passed:   s.stats.passed.Load(),
		Void:     s.stats.void.Load(),
		Damaged:  s.stats.damaged.Load(),
		Unserved: s.stats.unserved.Load(),
		Late:     s.stats.late.Load(),
		Refused:  s.judges.refused.Load(),
		Lost:     s.worker.injector.lost.Load(),
		Kernel:   s.counted(),
	}
	for name, n := range s.uncounted {
		st.Kernel[name] -= n
	}
	st.Asked, st.Decided, st.NotAdmitted, st.Shortcuts = st.Kernel["asked"], st.Kernel["decided"], st.Kernel["not_admitted"], st.Kernel["shortcuts"]
	st.PassedAll = st.Passed
	for which, name := range counterNames {
		if which >= bpf.KernelCounterPASSED_NO_HEARTBEAT {
			st.PassedAll += st.Kernel[name]
		}
	}
	return st
}
