package flow

import (
	"encoding/binary"
	"sync/atomic"
)

// index finds a flow by a packet's tuple, and lies in memory that is shared with BPF:
// bpf/index.h describes it. BPF enters tuples, and both sides take them out. Its methods are
// safe for concurrent use with BPF, but not with each other.
type index struct {
	buckets []kernelBucket // a power of two
	flows   []kernelFlow
	seed    uint64
}

// reference is what a slot says in its lower half.
type reference uint32

func referenceTo(flow uint32, role kernelRole) reference {
	return reference(uint32(role)<<flowBits | flow)
}

func (r reference) flow() uint32 { return uint32(r) & flowMask }

func (r reference) role() kernelRole { return kernelRole(r >> flowBits) }

// hash is hash_of in bpf/index.h.
func (x *index) hash(t *kernelTuple) uint64 {
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

// places is how many buckets a tuple may be in: PLACES in bpf/index.h.
const places = 8

// place returns a bucket where a tuple may be. The first one is its home.
func (x *index) place(hash uint64, n int) *kernelBucket {
	return &x.buckets[(hash+uint64(n)*(hash>>32|1))&uint64(len(x.buckets)-1)]
}

// tuple is that of the packets which a reference is for.
func (x *index) tuple(r reference) kernelTuple {
	k := &x.flows[r.flow()]
	t := kernelTuple{Protocol: k.Protocol}
	switch r.role() {
	case kernelRoleTO_ENDPOINT:
		t.Src, t.Sport, t.Dst, t.Dport = k.Client, k.ClientPort, k.Vip, k.VipPort
	case kernelRoleMASQUERADE:
		t.Src, t.Sport, t.Dst, t.Dport = k.Client, k.MiddlePort, k.Endpoint, k.EndpointPort
	case kernelRoleUNMASQUERADE:
		t.Src, t.Sport, t.Dst, t.Dport = k.Endpoint, k.EndpointPort, k.Node, k.NodePort
	default:
		t.Src, t.Sport, t.Dst, t.Dport = k.Endpoint, k.EndpointPort, k.Client, k.MiddlePort
	}
	return t
}

// find returns what a tuple refers to, or 0.
func (x *index) find(t *kernelTuple) reference {
	hash := x.hash(t)
	home := x.place(hash, 0)
	for n := 0; n == 0 || n < places && atomic.LoadUint64(&home.Moved) > 0; n++ {
		b := x.place(hash, n)
		for i := range b.Slot {
			slot := atomic.LoadUint64(&b.Slot[i])
			if r := reference(slot); slot != 0 && slot>>32 == hash>>32 && int(r.flow()) < len(x.flows) && x.tuple(r) == *t {
				return r
			}
		}
	}
	return 0
}

// exchange puts a reference, or 0 for none, in the place of what a tuple has for a flow. It
// reports whether the flow had the tuple.
func (x *index) exchange(t *kernelTuple, flow uint32, to reference) bool {
	hash := x.hash(t)
	home := x.place(hash, 0)
	if home.exchange(hash, flow, to) {
		return true
	}
	if atomic.LoadUint64(&home.Moved) == 0 {
		return false
	}
	for n := 1; n < places; n++ {
		if x.place(hash, n).exchange(hash, flow, to) {
			if to == 0 {
				atomic.AddUint64(&home.Moved, ^uint64(0))
			}
			return true
		}
	}
	return false
}

func (b *kernelBucket) exchange(hash uint64, flow uint32, to reference) bool {
	var with uint64
	if to != 0 {
		with = hash>>32<<32 | uint64(to)
	}
	for i := range b.Slot {
		slot := atomic.LoadUint64(&b.Slot[i])
		if slot>>32 == hash>>32 && reference(slot).flow() == flow && atomic.CompareAndSwapUint64(&b.Slot[i], slot, with) {
			return true
		}
	}
	return false
}

// erase takes tuples from a flow. Another flow may have got some of them meanwhile.
func (x *index) erase(flow uint32, tuples ...kernelTuple) {
	for i := range tuples {
		x.exchange(&tuples[i], flow, 0)
	}
}

// eraseAll takes all of its tuples from a flow. The way there goes first: while the index has
// it, it must have the others, or the endpoint would see a client that is hidden.
func (x *index) eraseAll(flow uint32) {
	x.erase(flow, x.tuple(referenceTo(flow, kernelRoleTO_ENDPOINT)))
	x.eraseEndpoint(flow)
}

// eraseEndpoint takes the tuples from a flow that depend on the endpoint.
func (x *index) eraseEndpoint(flow uint32) {
	var tuples [mostTuples]kernelTuple
	x.erase(flow, x.endpointTuples(flow, tuples[:0])...)
}

// mostTuples is how many tuples of a flow depend on the endpoint, at most.
const mostTuples = 3

// endpointTuples appends all tuples of a flow that depend on the endpoint.
func (x *index) endpointTuples(flow uint32, tuples []kernelTuple) []kernelTuple {
	tuples = append(tuples, x.tuple(referenceTo(flow, kernelRoleTO_CLIENT)))
	if x.flows[flow].Options&kernelOptionOPTION_MASQUERADE != 0 {
		tuples = append(tuples, x.tuple(referenceTo(flow, kernelRoleUNMASQUERADE)), x.tuple(referenceTo(flow, kernelRoleMASQUERADE)))
	}
	return tuples
}

// prune takes out the references that are orphans.
func (x *index) prune(orphan func(reference) bool) {
	for i := range x.buckets {
		for j := range x.buckets[i].Slot {
			at := &x.buckets[i].Slot[j]
			slot := atomic.LoadUint64(at)
			r := reference(slot)
			if slot == 0 || !orphan(r) {
				continue
			}
			if int(r.flow()) < len(x.flows) {
				t := x.tuple(r)
				x.exchange(&t, r.flow(), 0)
			}
			atomic.CompareAndSwapUint64(at, slot, 0) // it is not the flow's tuple any more
		}
	}
}
