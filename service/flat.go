package service

import "slices"

// flat is an open-addressing hash table with linear probing that stores values
// beside their keys. In a large cluster, memory latency dominates a lookup. flat
// reads one cache line where Go's map reads three or four. The zero value is empty.
//
// The zero key marks a free slot and cannot be stored.
type flat[K comparable, V any] struct {
	slots []slot[K, V] // none, or a power of two, at most half of them taken
	taken int
}

type slot[K comparable, V any] struct {
	key   K
	value V
}

func (s *slot[K, V]) free() bool {
	var none K
	return s.key == none
}

const leastSlots = 4

// get returns the value of a key with this hash, or nil.
func (f *flat[K, V]) get(hash uint64, k K) *V {
	if len(f.slots) == 0 {
		return nil
	}
	for i := hash; ; i++ {
		s := &f.slots[i&uint64(len(f.slots)-1)]
		if s.key == k {
			return &s.value
		}
		if s.free() {
			return nil
		}
	}
}

// clone returns an independent copy.
func (f *flat[K, V]) clone() flat[K, V] { return flat[K, V]{slices.Clone(f.slots), f.taken} }

// put sets the value of a key.
func (f *flat[K, V]) put(k K, v V, hash func(K) uint64) {
	if 2*(f.taken+1) > len(f.slots) {
		f.resize(max(2*len(f.slots), leastSlots), hash)
	}
	s := f.find(k, hash)
	if s.free() {
		f.taken++
	}
	*s = slot[K, V]{k, v}
}

// find returns the slot of a key, or the free slot for it.
func (f *flat[K, V]) find(k K, hash func(K) uint64) *slot[K, V] {
	for i := hash(k); ; i++ {
		if s := &f.slots[i&uint64(len(f.slots)-1)]; s.free() || s.key == k {
			return s
		}
	}
}

func (f *flat[K, V]) resize(to int, hash func(K) uint64) {
	old := f.slots
	f.slots = make([]slot[K, V], to)
	for i := range old {
		if s := &old[i]; !s.free() {
			*f.find(s.key, hash) = *s
		}
	}
}

// remove deletes a key. It closes the gap by moving up following entries, if that
// brings them closer to the slot of their hash.
func (f *flat[K, V]) remove(k K, hash func(K) uint64) {
	if len(f.slots) == 0 {
		return
	}
	if s := f.find(k, hash); s.free() {
		return
	}
	mask := uint64(len(f.slots) - 1)
	gap := hash(k) & mask
	for f.slots[gap].key != k {
		gap = (gap + 1) & mask
	}
	for i := (gap + 1) & mask; !f.slots[i].free(); i = (i + 1) & mask {
		if home := hash(f.slots[i].key) & mask; (i-home)&mask >= (i-gap)&mask {
			f.slots[gap] = f.slots[i]
			gap = i
		}
	}
	f.slots[gap] = slot[K, V]{}
	f.taken--
	if len(f.slots) > leastSlots && 8*f.taken < len(f.slots) {
		f.resize(len(f.slots)/2, hash)
	}
}
