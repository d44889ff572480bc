package redirect

import (
	"fmt"
	"hash/maphash"
	"iter"
	"maps"
	"net/netip"

	"github.com/sluice-proxy/sluice/service"
)

// Key is what the maps of a Plan go by.
type Key interface {
	service.Destination | netip.Addr | netip.Prefix
}

// Map is an immutable map. With and Without return other maps, which share the
// unchanged parts with it, so that comparing two plans costs what differs between
// them, not what they hold. The zero value is empty.
type Map[K Key, V comparable] struct {
	shards *shards[K, V] // nil while nothing was ever in it
	size   int
}

// Set is a Map of keys alone.
type Set[K Key] = Map[K, struct{}]

const shardCount = 256

type shards[K Key, V comparable] [shardCount]*shard[K, V]

// shard is a part of a map, which several maps may share. An empty one may be nil.
type shard[K Key, V comparable] struct{ m map[K]V }

// SetOf returns a Set of keys.
func SetOf[K Key](keys ...K) Set[K] {
	var b Builder[K, struct{}]
	for _, k := range keys {
		b.Set(k, struct{}{})
	}
	return b.Map()
}

// Get finds a key's value.
func (m Map[K, V]) Get(k K) (v V, is bool) {
	if m.size == 0 {
		return v, false
	}
	s := m.shards[shardOf(k)]
	if s == nil {
		return v, false
	}
	v, is = s.m[k]
	return v, is
}

// Has reports whether a key is in the map.
func (m Map[K, V]) Has(k K) bool {
	_, is := m.Get(k)
	return is
}

// Len is the number of keys.
func (m Map[K, V]) Len() int { return m.size }

// All returns the keys and their values, in no order.
func (m Map[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		if m.size == 0 {
			return
		}
		for _, s := range m.shards {
			if s == nil {
				continue
			}
			for k, v := range s.m {
				if !yield(k, v) {
					return
				}
			}
		}
	}
}

// Keys returns the keys, in no order.
func (m Map[K, V]) Keys() iter.Seq[K] {
	return func(yield func(K) bool) {
		for k := range m.All() {
			if !yield(k) {
				return
			}
		}
	}
}

// With returns a map that has a key and its value, too.
func (m Map[K, V]) With(k K, v V) Map[K, V] {
	b := Builder[K, V]{made: m}
	b.Set(k, v)
	return b.Map()
}

// Without returns a map that does not have a key.
func (m Map[K, V]) Without(k K) Map[K, V] {
	b := Builder[K, V]{made: m}
	b.Remove(k)
	return b.Map()
}

// Equal reports whether two maps hold the same.
func (m Map[K, V]) Equal(o Map[K, V]) bool {
	if m.size != o.size {
		return false
	}
	for range changes(m, o) {
		return false
	}
	return true
}

// String returns the map as fmt shows one.
func (m Map[K, V]) String() string { return fmt.Sprint(maps.Collect(m.All())) }

// at returns a shard; nil if it is empty.
func (m Map[K, V]) at(i int) *shard[K, V] {
	if m.shards == nil {
		return nil
	}
	return m.shards[i]
}

// changed is what became of a key from one map to another.
type changed[V comparable] struct {
	old, new V
	was, is  bool
}

// changes yields the keys that two maps differ by, in no order. It skips what the
// maps share without reading it.
func changes[K Key, V comparable](from, to Map[K, V]) iter.Seq2[K, changed[V]] {
	return func(yield func(K, changed[V]) bool) {
		if from.shards == to.shards {
			return
		}
		for i := range shardCount {
			a, b := from.at(i), to.at(i)
			if a != b && !a.changes(b, yield) {
				return
			}
		}
	}
}

func (s *shard[K, V]) changes(to *shard[K, V], yield func(K, changed[V]) bool) bool {
	var was, is map[K]V
	if s != nil {
		was = s.m
	}
	if to != nil {
		is = to.m
	}
	for k, v := range is {
		old, had := was[k]
		if (!had || old != v) && !yield(k, changed[V]{old, v, had, true}) {
			return false
		}
	}
	for k, v := range was {
		if _, still := is[k]; !still && !yield(k, changed[V]{old: v, was: true}) {
			return false
		}
	}
	return true
}

// Builder makes Maps. The zero value begins with an empty one.
type Builder[K Key, V comparable] struct {
	made Map[K, V]
	// Which parts of made no other map shares.
	own       bool
	ownShards [shardCount]bool
}

// Map returns what was built. The Builder stays usable: it shares unchanged parts
// with the Map.
func (b *Builder[K, V]) Map() Map[K, V] {
	if b.own {
		b.own, b.ownShards = false, [shardCount]bool{}
	}
	return b.made
}

// Has reports whether a key is there.
func (b *Builder[K, V]) Has(k K) bool { return b.made.Has(k) }

// Len is the number of keys.
func (b *Builder[K, V]) Len() int { return b.made.size }

// All yields the keys and their values, in no order. Keys that it has yielded may be
// removed meanwhile.
func (b *Builder[K, V]) All() iter.Seq2[K, V] { return b.made.All() }

// Set gives a key a value.
func (b *Builder[K, V]) Set(k K, v V) {
	old, was := b.made.Get(k)
	if was && old == v {
		return
	}
	b.shard(k).m[k] = v
	if !was {
		b.made.size++
	}
}

// Put has a key of a Set be in it, or not.
func (b *Builder[K, V]) Put(k K, in bool) {
	if in {
		var v V
		b.Set(k, v)
	} else {
		b.Remove(k)
	}
}

// Remove takes a key out.
func (b *Builder[K, V]) Remove(k K) {
	if b.made.Has(k) {
		delete(b.shard(k).m, k)
		b.made.size--
	}
}

// shard returns the one of a key for writing.
func (b *Builder[K, V]) shard(k K) *shard[K, V] {
	if !b.own {
		b.own = true
		next := new(shards[K, V])
		if b.made.shards != nil {
			*next = *b.made.shards
		}
		b.made.shards = next
	}
	i := shardOf(k)
	s := b.made.shards[i]
	if b.ownShards[i] {
		return s
	}
	b.ownShards[i] = true
	if s == nil {
		s = &shard[K, V]{make(map[K]V)}
	} else {
		s = &shard[K, V]{maps.Clone(s.m)}
	}
	b.made.shards[i] = s
	return s
}

// shardOf returns the shard of a key. The seed differs in each process, so that nobody
// can choose external IPs that all fall into one shard.
func shardOf[K Key](k K) int {
	var hashed struct {
		addr [16]byte
		rest uint64
	}
	switch k := any(k).(type) {
	case service.Destination:
		hashed.addr, hashed.rest = k.Addr.As16(), uint64(k.Port)<<8|uint64(k.Protocol)
	case netip.Addr:
		hashed.addr = k.As16()
	case netip.Prefix:
		hashed.addr, hashed.rest = k.Addr().As16(), uint64(k.Bits())
	}
	return int(maphash.Comparable(seed, hashed) % shardCount)
}

var seed = maphash.MakeSeed()
