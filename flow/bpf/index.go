package bpf

import (
	"encoding/binary"
	"sync/atomic"
)

// Index finds a flow by a packet's tuple, and lies in memory that is shared with BPF:
// index.h describes it. BPF enters tuples, userspace those of other versions' flows (PutAll); both
// sides take them out. Its methods are safe for concurrent use with BPF, but not with each other.
type Index struct {
	Buckets []KernelBucket // a power of two
	flows   []KernelFlow
	seed    uint64
}

// Reference is the lower half of a slot: a flow, and the role of its packets with a tuple.
type Reference uint32

// ReferenceTo returns the reference to a role in a flow.
func ReferenceTo(flow uint32, role KernelRole) Reference {
	return Reference(uint32(role)<<FlowBits | flow)
}

// Flow returns the index of the flow.
func (r Reference) Flow() uint32 { return uint32(r) & FlowMask }

// Role returns the role of the packets.
func (r Reference) Role() KernelRole { return KernelRole(r >> FlowBits) }

// Hash is hash_of in index.h.
func (x *Index) Hash(t *KernelTuple) uint64 {
	n := binary.NativeEndian
	b := n.AppendUint32(make([]byte, 0, 40), t.Src.Word[0])
	for _, w := range [...]uint32{t.Src.Word[1], t.Src.Word[2], t.Src.Word[3], t.Dst.Word[0], t.Dst.Word[1], t.Dst.Word[2], t.Dst.Word[3]} {
		b = n.AppendUint32(b, w)
	}
	b = append(n.AppendUint16(n.AppendUint16(b, t.Sport), t.Dport), t.Protocol, t.Fragment, 0, 0)
	h := x.seed
	for at := len(b) - 8; at >= 0; at -= 8 {
		h = (h ^ n.Uint64(b[at:])) * 0x9e3779b97f4a7c15
		h ^= h >> 32
	}
	h *= 0xd6e8feb86659fd93
	return h ^ h>>32
}

// Places is how many buckets a tuple may be in: PLACES in index.h.
const Places = 8

// Place returns a bucket where a tuple may be. The first one is its home.
func (x *Index) Place(hash uint64, n int) *KernelBucket {
	return &x.Buckets[(hash+uint64(n)*(hash>>32|1))&uint64(len(x.Buckets)-1)]
}

// Tuple returns the tuple of the packets that a reference is for.
func (x *Index) Tuple(r Reference) KernelTuple {
	k := &x.flows[r.Flow()]
	t := KernelTuple{Protocol: k.Protocol}
	switch r.Role() {
	case KernelRoleTO_ENDPOINT:
		t.Src, t.Sport, t.Dst, t.Dport = k.Client, k.ClientPort, k.Vip, k.VipPort
	case KernelRoleMASQUERADE:
		t.Src, t.Sport, t.Dst, t.Dport = k.Client, k.MiddlePort, k.Endpoint, k.EndpointPort
	case KernelRoleUNMASQUERADE:
		t.Src, t.Sport, t.Dst, t.Dport = k.Endpoint, k.EndpointPort, k.Node, k.NodePort
	default:
		t.Src, t.Sport, t.Dst, t.Dport = k.Endpoint, k.EndpointPort, k.Client, k.MiddlePort
		if k.Options&KernelOptionOPTION_NODE != 0 {
			t.Dst, t.Dport = k.Node, k.NodePort
		}
	}
	return t
}

// Find returns what a tuple refers to, or 0.
func (x *Index) Find(t *KernelTuple) Reference {
	hash := x.Hash(t)
	home := x.Place(hash, 0)
	for n := 0; n == 0 || n < Places && atomic.LoadUint64(&home.Moved) > 0; n++ {
		b := x.Place(hash, n)
		for i := range b.Slot {
			slot := atomic.LoadUint64(&b.Slot[i])
			if r := Reference(slot); slot != 0 && slot>>32 == hash>>32 && int(r.Flow()) < len(x.flows) && x.Tuple(r) == *t {
				return r
			}
		}
	}
	return 0
}

// Put enters a tuple, while BPF does not. It reports false if it is there, or if there is no room.
func (x *Index) Put(t *KernelTuple, r Reference) bool {
	if x.Find(t) != 0 {
		return false
	}
	hash := x.Hash(t)
	home := x.Place(hash, 0)
	for n := range Places {
		if n == 1 {
			atomic.AddUint64(&home.Moved, 1) // first: whoever finds the slot knows that
		}
		if x.Place(hash, n).put(hash, r) {
			return true
		}
	}
	atomic.AddUint64(&home.Moved, ^uint64(0))
	return false
}

func (b *KernelBucket) put(hash uint64, r Reference) bool {
	for i := range b.Slot {
		if atomic.CompareAndSwapUint64(&b.Slot[i], 0, hash>>32<<32|uint64(r)) {
			return true
		}
	}
	return false
}

// PutAll enters all tuples of a flow, or none. The way there is the last one, and the only one of a
// connection whose endpoint was given up.
func (x *Index) PutAll(flow uint32) bool {
	for _, r := range x.References(flow) {
		if t := x.Tuple(r); !x.Put(&t, r) {
			x.EraseAll(flow)
			return false
		}
	}
	return true
}

// References returns the references to a flow that PutAll enters.
func (x *Index) References(flow uint32) (list []Reference) {
	k := &x.flows[flow]
	var roles []KernelRole
	switch {
	case k.isGivenUp():
	case k.isOnNode():
		return []Reference{ReferenceTo(flow, KernelRoleUNMASQUERADE), ReferenceTo(flow, KernelRoleMASQUERADE)}
	case k.Options&KernelOptionOPTION_MASQUERADE != 0:
		roles = []KernelRole{KernelRoleTO_CLIENT, KernelRoleUNMASQUERADE, KernelRoleMASQUERADE}
	default:
		roles = []KernelRole{KernelRoleTO_CLIENT}
	}
	for _, role := range append(roles, KernelRoleTO_ENDPOINT) {
		list = append(list, ReferenceTo(flow, role))
	}
	return list
}

// isOnNode is is_on_node in direct.h.
func (k *KernelFlow) isOnNode() bool {
	const both = KernelOptionOPTION_DIRECT | KernelOptionOPTION_MASQUERADE
	return k.Options&both == both
}

// Exchange replaces the reference that a tuple has to a flow by another one, or removes it (0). It
// reports whether the flow had the tuple.
func (x *Index) Exchange(t *KernelTuple, flow uint32, to Reference) bool {
	return x.exchange(x.Hash(t), flow, to)
}

func (x *Index) exchange(hash uint64, flow uint32, to Reference) bool {
	home := x.Place(hash, 0)
	if home.exchange(hash, flow, to) {
		return true
	}
	if atomic.LoadUint64(&home.Moved) == 0 {
		return false
	}
	for n := 1; n < Places; n++ {
		if x.Place(hash, n).exchange(hash, flow, to) {
			if to == 0 {
				atomic.AddUint64(&home.Moved, ^uint64(0))
			}
			return true
		}
	}
	return false
}

func (b *KernelBucket) exchange(hash uint64, flow uint32, to Reference) bool {
	var with uint64
	if to != 0 {
		with = hash>>32<<32 | uint64(to)
	}
	for i := range b.Slot {
		slot := atomic.LoadUint64(&b.Slot[i])
		if slot>>32 == hash>>32 && Reference(slot).Flow() == flow && atomic.CompareAndSwapUint64(&b.Slot[i], slot, with) {
			return true
		}
	}
	return false
}

// Erase takes tuples from a flow. Another flow may have got some of them meanwhile.
func (x *Index) Erase(flow uint32, tuples ...KernelTuple) {
	for i := range tuples {
		x.Exchange(&tuples[i], flow, 0)
	}
}

// EraseAll takes all of their tuples from flows. A flow's way there goes first: while the index has
// it, it must have the others, or the endpoint would see a client that is hidden. Few buckets are in
// the CPU's caches: those of several flows are loaded at once, as each takes a quarter of a microsecond.
func (x *Index) EraseAll(flows ...uint32) {
	type entry struct {
		hash uint64
		flow uint32
	}
	var room [32]entry
	all := room[:0]
	for _, flow := range flows {
		if KernelState(atomic.LoadUint32((*uint32)(&x.flows[flow].State))) == KernelStateVACATED {
			continue // BPF has
		}
		var tuples [1 + MostTuples]KernelTuple
		list := x.EndpointTuples(flow, append(tuples[:0], x.Tuple(ReferenceTo(flow, KernelRoleTO_ENDPOINT))))
		for i := range list {
			all = append(all, entry{x.Hash(&list[i]), flow})
		}
	}
	for i := range all {
		atomic.LoadUint64(&x.Place(all[i].hash, 0).Moved)
	}
	for i := range all {
		x.exchange(all[i].hash, all[i].flow, 0)
	}
}

// EraseEndpoint takes the tuples from a flow that depend on the endpoint.
func (x *Index) EraseEndpoint(flow uint32) {
	var tuples [MostTuples]KernelTuple
	x.Erase(flow, x.EndpointTuples(flow, tuples[:0])...)
}

// MostTuples is how many tuples of a flow depend on the endpoint, at most.
const MostTuples = 3

// EndpointTuples appends all tuples of a flow that depend on the endpoint.
func (x *Index) EndpointTuples(flow uint32, tuples []KernelTuple) []KernelTuple {
	tuples = append(tuples, x.Tuple(ReferenceTo(flow, KernelRoleTO_CLIENT)))
	if x.flows[flow].Options&KernelOptionOPTION_MASQUERADE != 0 {
		tuples = append(tuples, x.Tuple(ReferenceTo(flow, KernelRoleUNMASQUERADE)), x.Tuple(ReferenceTo(flow, KernelRoleMASQUERADE)))
	}
	return tuples
}

// Prune takes out the references that are orphans.
func (x *Index) Prune(orphan func(Reference) bool) {
	for i := range x.Buckets {
		for j := range x.Buckets[i].Slot {
			at := &x.Buckets[i].Slot[j]
			slot := atomic.LoadUint64(at)
			r := Reference(slot)
			if slot == 0 || !orphan(r) {
				continue
			}
			if int(r.Flow()) < len(x.flows) {
				t := x.Tuple(r)
				x.Exchange(&t, r.Flow(), 0)
			}
			atomic.CompareAndSwapUint64(at, slot, 0) // it is not the flow's tuple any more
		}
	}
}
