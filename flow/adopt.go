package flow

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
)

// A process that ends leaves its flows in pinned maps, whose programs go on. The next one
// finds out at its start which indices are free (survey). Once it knows the Services, it
// adopts the flows of each protocol (adopt): connections that are open get their timers and
// leave their record at the end; handshakes end, and the client's next SYN begins anew.

// survey finds the free indices, and removes leftover tuples that no later code would remove.
// BPF's table may decide about new flows meanwhile.
func (w *worker) survey() error {
	w.read(w.upcalls, math.MaxInt, func(e *bpf.KernelEvent, data []byte) {
		if e.Kind != bpf.KernelEventKindEVENT_ASK && int(e.Flow) < len(w.flows) { // first packets are void: no flow exists yet
			w.keepEarly(e, data[:e.Length])
		}
	})
	for i := range w.kernel.Loads {
		if l := &w.kernel.Loads[i]; l.Asked != l.Decided {
			atomic.StoreUint64(&l.Decided, atomic.LoadUint64(&l.Asked))
		}
	}
	if c := w.kernel.Control; c.SpareMask == 0 && c.Given == 0 {
		w.spares.Fill(len(w.flows) - 1)
		return nil
	}
	for i := 1; i < len(w.flows); i++ {
		if w.kernel.Flows[i].State != bpf.KernelStateFREE {
			w.left++
		}
	}
	if key, err := w.kernel.Maps.Destinations.NextKeyBytes(nil); err == nil && key == nil { // else flows may begin meanwhile
		w.countAgain()
	}
	w.missing = w.unaccounted()
	if err := w.forgetRelayed(); err != nil {
		return err
	}
	// Endpoints that were abandoned, and flows that ended just before the process did. Another version, whose
	// programs came first, may have begun connections with the tuples of those that are over.
	behind := w.server.pins != nil && w.server.pins.HasOthers()
	w.kernel.Index.Prune(func(r bpf.Reference) bool {
		if r.Role() == bpf.KernelRoleSTALE || int(r.Flow()) >= len(w.flows) {
			return true
		}
		k := &w.kernel.Flows[r.Flow()]
		return k.State == bpf.KernelStateFREE || behind && k.IsOver()
	})
	return nil
}

// countAgain counts the flows of each service port: another version may have taken some.
func (w *worker) countAgain() {
	loads := w.kernel.Loads
	for i := range loads {
		loads[i].Ended, loads[i].Confirmed = loads[i].Opened, loads[i].Begun
	}
	for i := 1; i < len(w.flows); i++ {
		k := &w.kernel.Flows[i]
		if k.State == bpf.KernelStateFREE {
			continue
		}
		l := &loads[k.Service]
		l.Ended--
		if bpf.ProtocolOf(k.Protocol) != service.UDP && k.Seen&bpf.KernelSeenCONFIRMED == 0 {
			l.Confirmed--
		}
	}
}

// forgetRelayed removes what the relay of an earlier process served; it ended with that process.
// This process's relay already serves: each datagram of its UDP sessions has prolonged their
// entries.
func (w *worker) forgetRelayed() error {
	var keys []bpf.KernelTuple
	var key bpf.KernelTuple
	var until uint64
	all := w.kernel.Maps.Relayed.Iterate()
	own := uint64(w.server.began + int64(relayedUDP))
	for all.Next(&key, &until) {
		if until < own {
			keys = append(keys, key)
		}
	}
	for i := range keys {
		_ = w.kernel.Maps.Relayed.Delete(&keys[i])
	}
	keys = keys[:0]
	sessions := w.kernel.Maps.Sessions.Iterate()
	for sessions.Next(&key, &until) {
		keys = append(keys, key)
	}
	for i := range keys {
		_ = w.kernel.Maps.Sessions.Delete(&keys[i])
	}
	if err := cmp.Or(all.Err(), sessions.Err()); err != nil {
		return fmt.Errorf("read what was relayed: %w", err)
	}
	return nil
}

// leaveToRelay records that the relay has these UDP sessions, each with its endpoint.
func (s *Server) leaveToRelay() {
	s.options.Relayed(func(client, vip netip.AddrPort) { s.Session(client, vip, true) })
}

// Session records that the relay has taken, or released, a client's UDP session. It is safe for
// concurrent use. Sessions for which the kernel's map has no room are known only while their
// clients keep sending.
func (s *Server) Session(client, vip netip.AddrPort, open bool) {
	if !s.Started() {
		return // leaveToRelay finds it
	}
	if s.left.Load() {
		return // of a client that the next process may serve
	}
	key, none := bpf.TupleOf(syscall.IPPROTO_UDP, client, vip), uint64(0)
	if open {
		_ = s.kernel.Maps.Sessions.Put(&key, &none)
	} else {
		_ = s.kernel.Maps.Sessions.Delete(&key)
	}
}

// unaccounted returns the indices that belong neither to a flow nor to the spares: the dead
// process held them. BPF may just have taken one, so only those count that are still missing after
// reclaimAfter.
func (w *worker) unaccounted() (missing []uint32) {
	spare := make([]bool, len(w.flows))
	w.spares.Mark(spare)
	for _, index := range w.freed {
		spare[index] = true
	}
	for _, f := range w.flows {
		if f == nil || f.handshake == nil {
			continue
		}
		for _, s := range f.handshake.stale {
			spare[s.index] = true
		}
	}
	for i := 1; i < len(w.flows); i++ {
		if !spare[i] && w.flows[i] == nil && w.kernel.Flows[i].State == bpf.KernelStateFREE {
			missing = append(missing, uint32(i))
		}
	}
	return missing
}

// reclaimAfter is longer than a BPF program runs.
const reclaimAfter = time.Second

// reclaim returns indices that are still missing to the spares.
func (w *worker) reclaim() {
	if len(w.missing) == 0 || w.loop.Now()-w.began < int64(reclaimAfter) {
		return
	}
	still := make(map[uint32]bool)
	for _, index := range w.unaccounted() {
		still[index] = true
	}
	for _, index := range w.missing {
		if still[index] {
			w.spares.Give(index)
		}
	}
	w.missing = nil
}

// adopt takes over the flows of a protocol, by its first configuration.
func (w *worker) adopt(path *Path, st *state) {
	path.ready = true
	defer w.replay()
	if w.left == 0 && w.kernel.Control.Taken == w.tried {
		return // no index is in use
	}
	now := poll.Nanotime()
	n := 0
	for i := 1; i < len(w.flows); i++ {
		k := &w.kernel.Flows[i]
		if k.State == bpf.KernelStateFREE || w.flows[i] != nil || bpf.ProtocolOf(k.Protocol) != path.protocol {
			continue
		}
		w.left--
		n++
		if k.Seen&bpf.KernelSeenKNOWN != 0 {
			w.take(path, st, uint32(i), now)
		} else {
			w.discover(uint32(i))
		}
		// No process has challenged the sender yet, or its answer has not arrived.
		if f := w.flows[i]; f != nil && f.seen()&(bpf.KernelSeenCLIENT_RST_DOUBTED|bpf.KernelSeenENDPOINT_RST_DOUBTED) != 0 {
			f.challenge()
		}
	}
	w.giveFreed()
	if n > 0 {
		w.server.log.Info().Int("flows", n).Stringer("took", time.Duration(poll.Nanotime()-now).Round(time.Microsecond)).Stringer("protocol", path.protocol).Msg("adopted what an earlier process forwarded")
	}
}

// takeOthers goes on with what programs of another version forward, before it begins anything new. Later,
// adopt finds it among the flows of an earlier process. It returns how many flows that version keeps.
func (s *Server) takeOthers() (left int) {
	n := 0
	err := s.onLoop(func() (err error) {
		if s.left.Load() {
			return nil
		}
		left, err = s.pins.TakeOthers(func(k *bpf.KernelFlow) *bpf.KernelFlow {
			own := s.worker.put(k)
			if own != nil {
				n++
			}
			return own
		})
		s.worker.untold-- // makes it look for flows that it does not know
		return err
	})
	if err != nil {
		left++
		s.log.Info().Str("because", err.Error()).Msg("kernel flows: connections of an earlier version stay with its programs")
	}
	if n > 0 {
		s.log.Info().Int("flows", n).Int("left", left).Msg("kernel flows: took over what an earlier version forwarded")
	}
	return left
}

// put copies a flow of another version to a free index. It returns nil if there is none.
func (w *worker) put(k *bpf.KernelFlow) *bpf.KernelFlow {
	index, ok := w.spares.Take()
	if !ok {
		return nil
	}
	own := &w.kernel.Flows[index]
	k.Generation, k.Service, k.Inject = own.Generation+1, 0, 0 // that version's service ports have other numbers
	*own = *k
	if own.State < bpf.KernelStateCLOSED { // else its client may use the tuple for a connection that is relayed
		w.giveWayTo(index)
		if !w.kernel.Index.PutAll(index) {
			own.State = bpf.KernelStateFREE
			w.spares.Give(index)
			return nil
		}
	}
	w.left++
	if own.Options&bpf.KernelOptionOPTION_DIRECT != 0 {
		return own // no service port has it
	}
	l := &w.kernel.Loads[own.Service] // free counts its end there
	atomic.AddUint64(&l.Opened, 1)
	if bpf.ProtocolOf(own.Protocol) != service.UDP && own.Seen&bpf.KernelSeenCONFIRMED == 0 {
		atomic.AddUint64(&l.Begun, 1)
	}
	return own
}

// giveWayTo ends flows that an earlier process of this version has left if another version has begun a
// newer one with a tuple of theirs. Its programs saw all packets first: the older ones are over.
func (w *worker) giveWayTo(index uint32) {
	x, flows := &w.kernel.Index, w.kernel.Flows
	for _, r := range x.References(index) {
		t := x.Tuple(r)
		old := x.Find(&t).Flow()
		if flows[old].State != bpf.KernelStateFREE && w.flows[old] == nil && !w.direct[old] && flows[old].Started < flows[index].Started {
			w.server.stats.open.Add(1) // free counts it
			w.free(old)
			w.left--
		}
	}
}

// removeOthers removes the programs of other versions, unless these may be the next process's.
func (s *Server) removeOthers() {
	if s.left.Load() {
		return
	}
	if err := s.pins.RemoveOthers(); err != nil {
		s.log.Warn().Err(err).Msg("kernel flows: pins of an earlier version stay")
	}
}

// adoptUnserved stops the kernel from beginning flows of protocols that are no longer served, and
// adopts the flows of these that an earlier process, with other flags, forwarded: no Apply would.
func (s *Server) adoptUnserved() {
	for _, p := range s.paths {
		if p == nil || p.relay != nil {
			continue
		}
		p.purge()
		p.onLoop(func() { s.worker.adopt(p, p.state.Load()) })
	}
}

// early is an event of a flow that is not adopted yet.
type early struct {
	event bpf.KernelEvent
	data  []byte
}

// mostEarly bounds them: Services may never come.
const mostEarly = 4096

// keepEarly keeps an event whose flow is not adopted yet. The table decides all the time; without
// its first packet, such a flow could not move to another endpoint.
func (w *worker) keepEarly(e *bpf.KernelEvent, data []byte) bool {
	if w.flows[e.Flow] != nil || e.Kind == bpf.KernelEventKindEVENT_UNUSED || e.Kind == bpf.KernelEventKindEVENT_CHALLENGE || len(w.early) == mostEarly {
		return false
	}
	path := w.server.paths[bpf.ProtocolOf(w.kernel.Flows[e.Flow].Protocol)]
	if path == nil || path.ready {
		return false
	}
	w.early = append(w.early, early{*e, bytes.Clone(data)})
	return true
}

// replay handles the events of flows that are adopted now, and keeps the others.
func (w *worker) replay() {
	events := w.early
	w.early = nil
	for i := range events {
		w.handle(&events[i].event, events[i].data)
	}
}

// take adopts one flow.
func (w *worker) take(path *Path, st *state, index uint32, now int64) {
	k := &w.kernel.Flows[index]
	f := w.newFlow(index)
	v := f.describe(path, st)
	r := f.record
	r.Attempts = uint16(k.Attempts)
	if r.Connected = path.protocol != service.UDP && k.Answered != 0; r.Connected {
		r.ConnectTime = w.loopTime(k.Answered) - r.Start
	}
	endpoint := bpf.PortOf(k.Endpoint, k.EndpointPort)
	found, serves := endpointOf(v.Port, endpoint)
	if r.Endpoint = found; found == nil {
		r.Endpoint = &service.Endpoint{Addr: endpoint}
	}
	w.flows[index] = f
	f.service.add(f)
	w.server.stats.open.Add(1)
	if f.seen()&bpf.KernelSeenRECORDED != 0 {
		f.ended = true
		f.drop()
		return
	}
	if w.server.options.Counted {
		w.shard.Adopt(r)
	} else {
		w.shard.Open(r)
	}
	f.addPlace()
	r.Resume()
	switch {
	case f.state() >= bpf.KernelStateCLOSED:
		f.closed(w.loopTime(k.Closed), f.seen())
	case f.state() == bpf.KernelStateASKING && !f.isUDP():
		f.catchUp(&v)
	case f.state() == bpf.KernelStateMOVING && f.protocol == service.TCP:
		f.handshake = w.newHandshake()
		f.awaitFirst(now)
	case f.state() != bpf.KernelStateOPEN && !f.isUDP():
		f.end(conntrack.Shutdown, now)
		f.drop()
	case f.isUDP() && (!serves || f.state() == bpf.KernelStateMOVING): // A8.2
		f.retire(conntrack.EndpointGone, now)
	default:
		w.loop.Schedule(&f.timer, now, f) // it may be idle already; processes may follow each other at any pace
		f.park()
	}
}

// endpointOf finds an endpoint of a port, and reports whether it keeps its sessions.
func endpointOf(port *service.Port, at netip.AddrPort) (*service.Endpoint, bool) {
	if port == nil {
		return nil, false
	}
	list := port.Families[service.FamilyOf(at.Addr())].Endpoints
	for i := range list {
		if list[i].Addr == at {
			return &list[i], list[i].Serving || list[i].Ready
		}
	}
	return nil, false
}
