package flow

import (
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
)

// ranges are the sets of source ranges in the kernel's map, by which BPF refuses clients (A3.10).
// A set's name is a hash of its ranges, so Services with the same ranges share a set, and a set of
// an earlier process is found again.
type ranges struct {
	server *Server
	mu     sync.Mutex
	sets   map[bpf.KernelSet]*rangeSet
}

type rangeSet struct {
	list []netip.Prefix
	uses int // of service ports
}

// nameOf returns the name of a set.
func (r *ranges) nameOf(list []netip.Prefix) bpf.KernelSet {
	var b []byte
	for _, p := range list {
		addr := p.Masked().Addr().As16()
		b = append(append(b, addr[:]...), byte(p.Bits()))
	}
	return r.server.setOf(b)
}

// add uses a set. It fails if the map has no room for it.
func (r *ranges) add(list []netip.Prefix) (bpf.KernelSet, error) {
	set := r.nameOf(list)
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.sets[set]; s != nil {
		s.uses++
		return set, nil
	}
	keys, values := rangesOf(set, list)
	if len(keys) > 0 {
		if _, err := r.server.kernel.Maps.Ranges.BatchUpdate(keys, values, nil); err != nil {
			r.remove(keys)
			return bpf.KernelSet{}, fmt.Errorf("the kernel's table of source ranges: %w", err)
		}
	}
	if r.sets == nil {
		r.sets = make(map[bpf.KernelSet]*rangeSet)
	}
	r.sets[set] = &rangeSet{list: list, uses: 1}
	return set, nil
}

// release undoes add.
func (r *ranges) release(set bpf.KernelSet) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sets[set]
	if s.uses--; s.uses > 0 {
		return
	}
	delete(r.sets, set)
	keys, _ := rangesOf(set, s.list)
	r.remove(keys)
}

// purge removes the sets of an earlier process that are not used.
func (r *ranges) purge(used map[bpf.KernelSet]bool) {
	var key bpf.KernelRange
	var value uint32
	var unused []bpf.KernelRange
	for all := r.server.kernel.Maps.Ranges.Iterate(); all.Next(&key, &value); {
		if !used[key.Set] {
			unused = append(unused, key)
		}
	}
	r.remove(unused)
}

func (r *ranges) remove(keys []bpf.KernelRange) {
	for i := range keys {
		_ = r.server.kernel.Maps.Ranges.Delete(&keys[i]) // some may be missing
	}
}

// refusedInterval is how often refusals are reported.
const refusedInterval = time.Second

// takeRefused returns what source ranges have refused since its last call: by client and
// destination as far as the map had room, and the number of all packets.
func (w *worker) takeRefused() (each map[bpf.KernelTuple]uint64, packets uint64) {
	total := w.server.count(bpf.KernelCounterCOUNT_NOT_ADMITTED)
	if packets = total - w.refused; packets == 0 {
		return nil, 0
	}
	w.refused = total
	m := w.kernel.Maps.Refused
	keys, counts := make([]bpf.KernelTuple, m.MaxEntries()), make([]uint64, m.MaxEntries())
	each = make(map[bpf.KernelTuple]uint64)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookupAndDelete(&cursor, keys, counts, nil)
		for i := range n {
			each[keys[i]] = counts[i]
		}
		if err != nil { // the last ones, or the map cannot be read
			return each, packets
		}
	}
}

// reportRefused reports what source ranges have refused since the last report.
func (w *worker) reportRefused(now int64) {
	if now-w.told < int64(refusedInterval) || w.server.options.NotAdmitted == nil {
		return
	}
	w.told = now
	each, packets := w.takeRefused()
	if packets == 0 {
		return
	}
	list := make([]conntrack.Refusal, 0, len(each))
	for k, n := range each {
		protocol := bpf.ProtocolOf(k.Protocol)
		client, vip := k.Src.Addr(), bpf.PortOf(k.Dst, k.Dport)
		v := w.server.paths[protocol].state.Load().table.Resolve(protocol, client, vip)
		list = append(list, conntrack.Refusal{
			Client: client, VIP: vip, Protocol: protocol, Kind: v.Kind, Port: v.Port, Reason: conntrack.NotAdmitted, Packets: n, Path: conntrack.Kernel,
		})
	}
	w.server.options.NotAdmitted(list, packets)
}

// rangesOf returns the ranges of a set in the kernel's map.
func rangesOf(set bpf.KernelSet, list []netip.Prefix) (keys []bpf.KernelRange, values []uint32) {
	keys, values = make([]bpf.KernelRange, len(list)), make([]uint32, len(list))
	for i, p := range list {
		keys[i] = bpf.RangeOf(set, p)
	}
	return keys, values
}
