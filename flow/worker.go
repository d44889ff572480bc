package flow

import (
	"cmp"
	"errors"
	"math"
	"os"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf/ringbuf"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// upcallShare is how many events are handled before other work of the loop.
	upcallShare = 128
	// noticeInterval is how often notices are read while they come. With more at once, this thread keeps
	// others from a CPU for longer: on two CPUs, connections of one request are 2.7 % slower at 10 ms.
	noticeInterval = 5 * time.Millisecond
	// beatInterval is how often userspace reports to BPF that it is alive, and looks at its flows while no
	// notices come. The report holds for two seconds (DEAD_AFTER).
	beatInterval = 250 * time.Millisecond
	// tableAge is how long the table decides without a process: longer than an update takes. After
	// that, the Services may have changed, and another service proxy may serve them.
	tableAge = 5 * time.Minute
	// askTimeout is the age at which an upcall is void: the client has repeated its SYN, which the
	// relay may have accepted.
	askTimeout = 500 * time.Millisecond
	// spareObjects bounds the unused flows and handshakes that are kept.
	spareObjects = 16384
	// serviceShare: one service port may have one part in so many of all flows, and more while
	// one part in spareShare is free for others.
	serviceShare, spareShare = 2, 8
)

// waits are times that tests lengthen: a busy machine may stop any thread for seconds.
type waits struct {
	ask    time.Duration // askTimeout
	resend time.Duration // resendable
	dead   time.Duration // by how much BPF believes longer that userspace is alive
}

// worker decides about flows. All of its state belongs to its loop.
type worker struct {
	server     *Server
	loop       *poll.Loop
	shard      *conntrack.Shard
	kernel     *bpf.Kernel
	injector   *injector
	sources    *sources
	neighbours kernel.Neighbours
	ports      ports

	upcalls, notices *ringbuf.Reader
	record           ringbuf.Record  // the event that is read
	event            bpf.KernelEvent // the same, decoded
	beat, tick       poll.Timer
	asked, noticed   poll.Registration // of both rings
	waits            waits
	clock            int64 // CLOCK_MONOTONIC at time 0 of the loop's clock
	unix             int64 // Unix time then, by the last tick

	flows      []*flow // by index
	spares     *bpf.Spares
	freed      []uint32                  // of flows that ended in this round
	ended      lingering                 // whose tuples stay
	direct     map[uint32]bool           // indices of clients' own connections
	asking     map[bpf.KernelTuple]*flow // without an answer
	crowd      crowd
	decided    []uint32     // services whose upcalls are answered in this round
	challenged []challenged // in the order of their times
	spare      []*handshake
	copied     int                 // bytes of the handshakes' others
	idle       []*flow             // objects of flows that are gone
	gone       []*flow             // the same, of this round
	records    []*conntrack.Record // unused ones
	untold     uint64              // Control.Untold at the last read
	missing    []uint32            // indices without a flow
	began      int64               // start of the worker
	early      []early             // events of flows that are not adopted yet
	left       int                 // flows of an earlier process that are not adopted yet
	tried      uint64              // indices that a trial has taken
	told       int64               // time of the last report of refusals
	refused    uint64              // their number then, earlier processes' included
}

func newWorker(s *Server, loop *poll.Loop, shard *conntrack.Shard) (*worker, error) {
	w := &worker{
		server: s, loop: loop, shard: shard, kernel: s.kernel,
		ports:  newPorts(s.options.ReplyPorts),
		waits:  cmp.Or(s.options.waits, waits{ask: askTimeout, resend: resendable}),
		clock:  zeroOfClock(),
		flows:  make([]*flow, len(s.kernel.Flows)),
		asking: make(map[bpf.KernelTuple]*flow),
		direct: make(map[uint32]bool),
		spares: &s.kernel.Spares,
		untold: s.kernel.Control.Untold,
		ended:  newLingering(len(s.kernel.Flows)),
	}
	var err error
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.upcalls, err = ringbuf.NewReader(s.kernel.Maps.Upcalls); err != nil {
		return nil, err
	}
	if w.notices, err = ringbuf.NewReader(s.kernel.Maps.Notices); err != nil {
		return nil, err
	}
	past := time.Unix(1, 0)
	w.upcalls.SetDeadline(past)
	w.notices.SetDeadline(past)
	if err = w.survey(); err != nil {
		return nil, err
	}
	if w.injector, err = newInjector(s.kernel.Control.Magic); err != nil {
		return nil, err
	}
	if w.sources, err = newSources(s.options.Namespace); err != nil {
		return nil, err
	}
	w.neighbours.Namespace = s.options.Namespace
	w.readClock()
	return w, nil
}

// zeroOfClock is CLOCK_MONOTONIC at time 0 of the loop's clock. It takes the best of several
// attempts, because the thread may be suspended between the two readings of one attempt.
func zeroOfClock() (zero int64) {
	shortest := int64(math.MaxInt64)
	for range 5 {
		before := poll.Nanotime()
		monotonic := sys.Monotonic()
		if took := poll.Nanotime() - before; took < shortest {
			shortest, zero = took, monotonic-before
		}
	}
	return zero
}

// start begins to handle upcalls, on the loop.
func (w *worker) start() error {
	var err error
	if w.asked, err = w.loop.Add(w.kernel.Maps.Upcalls.FD(), upcallTag, poll.Readable, w); err != nil {
		return err
	}
	if w.noticed, err = w.loop.Add(w.kernel.Maps.Notices.FD(), noticeTag, poll.Readable|poll.Edge, w); err != nil {
		return err
	}
	w.loop.AtTick(w.endRound)
	w.began = w.loop.Now()
	w.takeRefused() // those that the process before did not report
	w.HandleTimer(nil)
	(*beater)(w).HandleTimer(nil)
	return nil
}

func (w *worker) close() {
	if w.upcalls != nil {
		_ = w.upcalls.Close()
	}
	if w.notices != nil {
		_ = w.notices.Close()
	}
	if w.injector != nil {
		w.injector.close()
	}
	if w.sources != nil {
		w.sources.close()
	}
	w.neighbours.Close()
}

// loopTime converts a time of BPF to the loop's clock.
func (w *worker) loopTime(t uint64) int64 { return int64(t) - w.clock }

// unixTime converts a time of the loop's clock.
func (w *worker) unixTime(t int64) int64 { return t + w.unix }

// readClock follows changes of the system's time.
func (w *worker) readClock() { w.unix = time.Now().UnixNano() - poll.Nanotime() }

// kernelTime undoes loopTime.
func (w *worker) kernelTime(t int64) uint64 { return uint64(t + w.clock) }

// beater is the worker as the handler of its heartbeat.
type beater worker

// HandleTimer reports to BPF that userspace is alive. While the worker sleeps, it looks at the flows.
func (b *beater) HandleTimer(*poll.Timer) {
	now := sys.Monotonic()
	atomic.StoreUint64(&b.kernel.Control.DecidesUntil, uint64(now+int64(tableAge)))
	atomic.StoreUint64(&b.kernel.Control.Beat, uint64(now+int64(b.waits.dead)))
	b.loop.Schedule(&b.beat, b.loop.Now()+int64(beatInterval), b)
	if !b.tick.Scheduled() {
		(*worker)(b).HandleTimer(nil)
	}
}

// HandleTimer reads notices and does the other periodic work. While notices come, BPF wakes nobody for
// them; after a time without any, the worker sleeps until BPF wakes it.
func (w *worker) HandleTimer(*poll.Timer) {
	w.readClock()
	n := w.readNotices()
	w.discoverAll()
	w.expire(w.loop.Now())
	w.unchallenge(w.loop.Now())
	w.reclaim()
	w.reportRefused(w.loop.Now())
	if n == 0 {
		atomic.StoreUint32(&w.kernel.Control.Sleeps, 1)
		if w.notices.AvailableBytes() == 0 { // else BPF has written one without a wake-up
			return
		}
	}
	w.wake()
}

// wake makes the worker read notices soon.
func (w *worker) wake() {
	if !w.tick.Scheduled() {
		w.loop.Schedule(&w.tick, w.loop.Now()+int64(noticeInterval), w)
	}
}

// readNotices reads what has come since the last tick, and returns how many events.
func (w *worker) readNotices() int { return w.read(w.notices, math.MaxInt, w.handle) }

// Tags of the rings.
const (
	upcallTag = iota
	noticeTag
)

// HandleEvents handles upcalls, and wakes the worker for a notice. It reads notices before upcalls, which may
// depend on them.
func (w *worker) HandleEvents(ring uint8, _ poll.Events) {
	if ring == noticeTag {
		w.wake() // not at once: others may follow the first
		return
	}
	if w.readNotices() > 0 {
		w.wake() // epoll reports no ring that is empty
	}
	w.read(w.upcalls, upcallShare, w.handle)
}

// read handles so many events at most, and returns how many.
func (w *worker) read(r *ringbuf.Reader, most int, handle func(*bpf.KernelEvent, []byte)) (n int) {
	for ; n < most && r.AvailableBytes() > 0; n++ {
		if err := r.ReadInto(&w.record); err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				w.server.log.Error().Err(err).Msg("kernel flows: the ring of events cannot be read")
			}
			return n
		}
		if bpf.DecodeEvent(&w.event, w.record.RawSample) {
			handle(&w.event, w.record.RawSample[bpf.EventSize:])
		}
	}
	return n
}

// handle handles one event.
func (w *worker) handle(e *bpf.KernelEvent, data []byte) {
	data = data[:e.Length]
	if e.Kind == bpf.KernelEventKindEVENT_ASK || e.Kind == bpf.KernelEventKindEVENT_CHALLENGE {
		w.decided = append(w.decided, e.Service)
	}
	if e.Kind == bpf.KernelEventKindEVENT_ASK {
		w.ask(e, data)
		return
	}
	if int(e.Flow) >= len(w.flows) {
		return
	}
	if w.keepEarly(e, data) {
		return
	}
	if e.Kind == bpf.KernelEventKindEVENT_LATE {
		if p, ok := parseFrame(data, int(e.Header)); ok {
			w.server.stats.late.Add(1)
			w.late(&p)
		}
		return
	}
	switch e.Kind {
	case bpf.KernelEventKindEVENT_DIRECT:
		w.followDirect(e.Flow)
		return
	case bpf.KernelEventKindEVENT_BEGUN:
		w.begun(e, data)
		return
	case bpf.KernelEventKindEVENT_UNUSED:
		if w.flows[e.Flow] == nil && !w.direct[e.Flow] { // else its end frees it
			w.spares.Give(e.Flow)
		}
		return
	}
	f := w.flows[e.Flow]
	if f == nil {
		f = w.discover(e.Flow) // its notice found no room in the ring
	}
	if f == nil || f.generation != e.Generation {
		return
	}
	now := w.loopTime(e.Time)
	switch e.Kind {
	case bpf.KernelEventKindEVENT_REFUSED:
		f.refused(e, now)
	case bpf.KernelEventKindEVENT_OPEN:
		f.opened(w.loopTime(atomic.LoadUint64(&f.shared().Answered)))
	case bpf.KernelEventKindEVENT_CLOSED:
		f.closed(now, bpf.KernelSeen(e.Reason))
	case bpf.KernelEventKindEVENT_COLLISION:
		f.collision()
	case bpf.KernelEventKindEVENT_CHALLENGE:
		f.challenge()
	case bpf.KernelEventKindEVENT_UNREACHABLE:
		f.gone(now)
	case bpf.KernelEventKindEVENT_UNANSWERED:
		f.sent(e, data)
	}
}

// ask decides about a packet of an unknown flow.
func (w *worker) ask(e *bpf.KernelEvent, data []byte) {
	now := w.loop.Now()
	at := w.loopTime(e.Time)
	if now-at > int64(w.waits.ask) {
		w.server.stats.void.Add(1)
		return
	}
	p, ok := parseFrame(data, int(e.Header))
	if !ok || !p.complete() {
		w.server.stats.damaged.Add(1)
		return
	}
	key := bpf.TupleOf(p.protocol, p.client, p.vip)
	if f := w.asking[key]; f != nil {
		if f.isUDP() {
			w.keep(f.handshake, &p)
			w.injector.putCopy(f, p.ipv6, p.data)
			return
		}
		if f.shared().FirstSequence == p.sequence {
			return // sent again while the first one was on its way
		}
	}
	if bpf.ProtocolOf(p.protocol) != service.UDP && !w.giveWay(&key, now) {
		w.injector.pass(int(e.Ifindex), p.ipv6, p.data) // BPF handles it as a packet of the open flow
		return
	}
	if before := e.Flow; int(before) < len(w.flows) && w.kernel.Index.Tuple(bpf.ReferenceTo(before, bpf.KernelRoleTO_ENDPOINT)) == key {
		if old := w.flows[before]; old != nil {
			old.replaced(now)
		} else {
			w.kernel.Index.EraseAll(before) // it lingers
		}
	}
	w.begin(e, &p, key)
}

// begin begins the flow of a first packet, or hands the packet to the relay, or drops it.
func (w *worker) begin(e *bpf.KernelEvent, p *frame, key bpf.KernelTuple) {
	path := w.server.paths[bpf.ProtocolOf(p.protocol)]
	if path.relay == nil { // an earlier process would have decided
		w.pass(e, p, key, relayedFor(path.protocol))
		return
	}
	st := path.state.Load()
	v := st.table.Resolve(path.protocol, p.client.Addr(), p.vip)
	var s *portService
	switch v.Action {
	case policy.Drop:
		w.server.stats.unserved.Add(1)
		if dropped := w.server.options.Dropped; dropped != nil {
			dropped(p.client.Addr(), p.vip, path.protocol, &v)
		}
		return
	case policy.Refuse:
		w.pass(e, p, key, relayedRefusal)
		return
	case policy.Accept:
		s = st.services[v.Port.ID]
	}
	now := w.loop.Now()
	if s != nil && s.inKernel && path.protocol == service.UDP && !w.hasRoom(s) && !w.isRelayed(key) {
		s.makeRoom(w, now)
	}
	if s == nil || !s.inKernel || !w.hasRoom(s) || w.leavesToRelay(e, s) {
		w.pass(e, p, key, relayedFor(path.protocol))
		return
	}
	if path.protocol == service.UDP && w.isRelayed(key) {
		w.pass(e, p, key, relayedUDP)
		return
	}
	end, ok := w.takePlace(s, &v.Port.Limits, now)
	if !ok && (path.protocol == service.UDP || end == conntrack.EndNone && !st.judged) {
		w.pass(e, p, key, relayedFor(path.protocol)) // it waits there, or takes the place of a session
		return
	}
	f := w.open(e, p, key, s, &v)
	switch {
	case f != nil && ok:
		f.counted = s.places != nil
		f.dial(st, &v)
	case f != nil:
		f.failBy(cmp.Or(end, conntrack.LimitReached))
	case ok && s.places != nil:
		s.places.Give()
	}
}

// takePlace takes a place for a new flow; a UDP session may replace another one. Its results are those
// of conntrack.Places.Take.
func (w *worker) takePlace(s *portService, l *service.Limits, now int64) (end conntrack.End, ok bool) {
	end, ok = s.take(l)
	for range 2 { // limits: of the Service, and of all
		if ok || s.path.protocol != service.UDP || !w.makePlace(s.name, end, now) {
			break
		}
		end, ok = s.take(l)
	}
	return end, ok
}

// giveWay ends what a client's tuple was used for, because the client begins a new connection with
// it. It returns false if a flow has opened meanwhile: then the new packet may be forged.
func (w *worker) giveWay(key *bpf.KernelTuple, now int64) bool {
	if w.asking[*key] != nil {
		w.injector.flush() // a packet that is queued would come up again without its flow
	}
	if r := w.kernel.Index.Find(key); r.Role() == bpf.KernelRoleTO_ENDPOINT {
		f := w.flows[r.Flow()]
		if f != nil {
			f.stopAsking() // it opens no more
		}
		if atomic.LoadUint32((*uint32)(&w.kernel.Flows[r.Flow()].State)) == uint32(bpf.KernelStateOPEN) {
			return false
		}
		if f != nil {
			f.replaced(now)
		}
	}
	if f := w.asking[*key]; f != nil {
		f.replaced(now)
	}
	return true
}

// hasRoom reports whether a service port may have another flow: has_room in bpf/table.h.
func (w *worker) hasRoom(s *portService) bool {
	l, c, spare := &w.kernel.Loads[s.load], w.kernel.Control, w.spares.Len()
	has := int(atomic.LoadUint64(&l.Opened) - atomic.LoadUint64(&l.Ended))
	return spare > 0 && (has < int(c.MostFlows) || spare > int(c.LeastSpare))
}

// Shortest times for which the relay gets a client's packets: after a refusal, for a handshake, for
// a session. Each packet extends the time of a session only.
const (
	relayedRefusal = 10 * time.Millisecond
	relayedTCP     = time.Second
	relayedUDP     = 3 * time.Minute
)

func relayedFor(p service.Protocol) time.Duration {
	if p == service.UDP {
		return relayedUDP
	}
	return relayedTCP
}

// isRelayed reports whether the relay has the session, or has received another datagram of the
// client since this one came up.
func (w *worker) isRelayed(key bpf.KernelTuple) bool {
	var until uint64
	return w.kernel.Maps.Sessions.Lookup(&key, &until) == nil || w.kernel.Maps.Relayed.Lookup(&key, &until) == nil && until > uint64(sys.Monotonic())
}

// pass hands a packet to the relay, and makes BPF pass those that follow it for some time.
func (w *worker) pass(e *bpf.KernelEvent, p *frame, key bpf.KernelTuple, keep time.Duration) {
	until := w.kernelTime(w.loop.Now() + int64(keep))
	if err := w.kernel.Maps.Relayed.Put(&key, &until); err != nil {
		return // else the packet would come up again
	}
	w.server.stats.passed.Add(1)
	w.injector.pass(int(e.Ifindex), p.ipv6, p.data)
}

// open begins a flow that has no endpoint yet. It returns nil if BPF has taken the last
// index meanwhile: the client's next packet comes up again.
func (w *worker) open(e *bpf.KernelEvent, p *frame, key bpf.KernelTuple, s *portService, v *policy.Verdict) *flow {
	index, ok := w.spares.Take()
	if !ok {
		return nil
	}
	k := &w.kernel.Flows[index]
	*k = bpf.KernelFlow{
		Generation: k.Generation + 1, Ifindex: e.Ifindex, Service: e.Service,
		Client: key.Src, Vip: key.Dst, ClientPort: key.Sport, VipPort: key.Dport,
		Protocol: key.Protocol, FirstSequence: p.sequence, Started: e.Time, Seen: bpf.KernelSeenKNOWN,
	}
	if p.ipv6 {
		k.Options = bpf.KernelOptionOPTION_IPV6
	}
	if w.isFromNode(e) {
		k.Options |= bpf.KernelOptionOPTION_NODE
	}
	k.Way[0].Last = e.Time
	switch s.path.protocol {
	case service.TCP:
		k.Way[0].End, k.Way[1].Acked = p.sequence+1, p.sequence+1
	case service.SCTP:
		k.Way[1].End = p.sequence
	}
	h := w.newHandshake()
	h.key = key
	h.keepFirst(p)
	f := w.newFlow(index)
	f.service, f.handshake = s, h
	f.protocol = s.path.protocol
	started := w.loopTime(e.Time)
	*f.record = conntrack.Record{
		Start:    started,
		Wall:     w.unixTime(started),
		Client:   p.client,
		VIP:      p.vip,
		Port:     v.Port,
		Protocol: s.path.protocol,
		Kind:     v.Kind,
		Path:     conntrack.Kernel,
		Counters: s.counters,
		Owner:    f,
	}
	if s.path.protocol == service.SCTP {
		f.record.StreamsFromClient, f.record.StreamsToClient = streamsOf(p.data[p.transport:])
	}
	w.flows[index] = f
	w.asking[key] = f
	s.add(f)
	w.server.stats.open.Add(1)
	w.shard.Open(f.record)
	l := &w.kernel.Loads[e.Service]
	atomic.AddUint64(&l.Opened, 1)
	if s.path.protocol != service.UDP {
		atomic.AddUint64(&l.Begun, 1)
	}
	return f
}

// replaced ends a flow whose client uses its tuple for a new connection.
func (f *flow) replaced(now int64) {
	if f.state() >= bpf.KernelStateCLOSED {
		f.endClosed(f.worker.loopTime(f.shared().Closed), f.seen())
	}
	f.end(conntrack.ClientReset, now)
	f.drop()
}

func (w *worker) newHandshake() *handshake {
	if n := len(w.spare); n > 0 {
		h := w.spare[n-1]
		w.spare = w.spare[:n-1]
		return h
	}
	return new(handshake)
}

func (w *worker) freeHandshake(h *handshake, f *flow) {
	w.forget(f, h)
	// The outbox may hold its packets.
	w.injector.flush()
	w.forgetOthers(h)
	for _, s := range h.stale {
		w.kernel.Index.Erase(s.index, s.key)
		w.freed = append(w.freed, s.index)
	}
	if len(w.spare) < spareObjects {
		*h = handshake{data: h.data[:0], stale: h.stale[:0]}
		w.spare = append(w.spare, h)
	}
}

// forget records that a flow no longer waits for a decision.
func (w *worker) forget(f *flow, h *handshake) {
	if w.asking[h.key] == f {
		delete(w.asking, h.key)
	}
}

// endRound does what the round's events share: indices are given back, and packets put back.
func (w *worker) endRound() {
	w.giveFreed()
	w.injector.flush()
	for _, s := range w.decided {
		atomic.AddUint64(&w.kernel.Loads[s].Decided, 1)
	}
	w.decided = w.decided[:0]
	// Nothing refers to them any more.
	w.idle = append(w.idle, w.gone[:min(len(w.gone), max(spareObjects-len(w.idle), 0))]...)
	clear(w.gone)
	w.gone = w.gone[:0]
}

// giveFreed returns released indices to the ring.
func (w *worker) giveFreed() {
	for _, index := range w.freed {
		w.spares.Give(index)
	}
	w.freed = w.freed[:0]
}

// decideAll stops BPF from asking, and answers what it has asked. It pauses for longer than a
// program runs, because a running one may still ask.
func (w *worker) decideAll() {
	w.loop.Cancel(&w.beat)
	atomic.StoreUint64(&w.kernel.Control.Beat, 0)
	for range 2 {
		w.readNotices()
		w.read(w.upcalls, math.MaxInt, w.handle)
		w.endRound()
		time.Sleep(handOverPause)
	}
}

// handOverPause is longer than a BPF program runs after it has asked.
const handOverPause = time.Millisecond

// leave ends the worker, and leaves the flows to the next process.
func (w *worker) leave() {
	w.loop.Remove(w.asked) // what comes is the next process's
	w.loop.Remove(w.noticed)
	w.endRound()
	for _, f := range w.flows {
		if f != nil {
			w.loop.Cancel(&f.timer)
		}
	}
	w.loop.Cancel(&w.tick)
	w.loop.Cancel(&w.beat)
	atomic.StoreUint64(&w.kernel.Control.Beat, 0)
	w.shard.Flush()
}
