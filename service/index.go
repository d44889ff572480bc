package service

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
)

// key is an address, port and protocol in a form that hashes fast. A node port has
// no address, and a cluster IP has neither port nor protocol.
type key struct {
	addr  [16]byte
	port  uint16
	proto Protocol
	class keyClass
}

type keyClass uint8

const (
	byAddress keyClass = iota
	byNodePort
	byClusterIP
)

func addrKey(d Destination) key {
	return key{addr: d.Addr.As16(), port: d.Port, proto: d.Protocol}
}

// nodePortKey stores the family in the last byte of the address.
func nodePortKey(f Family, p Protocol, port uint16) key {
	return key{addr: [16]byte{15: byte(f)}, port: port, proto: p, class: byNodePort}
}

func clusterIPKey(a netip.Addr) key {
	return key{addr: a.As16(), class: byClusterIP}
}

// String returns the key as it appears in problems.
func (k key) String() string {
	if k.class == byNodePort {
		return fmt.Sprintf("node port %d/%s", k.port, k.proto)
	}
	a := netip.AddrFrom16(k.addr).Unmap()
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(a, k.port), k.proto)
}

// pack returns a key without an IPv6 address as one word, which takes half the
// memory and is faster to find.
func (k *key) pack() (uint64, bool) {
	if k.class == byNodePort {
		return packed(uint32(k.addr[15]), k.port, k.proto, k.class), true
	}
	if a := netip.AddrFrom16(k.addr); a.Is4In6() {
		return packed(binary.BigEndian.Uint32(k.addr[12:]), k.port, k.proto, k.class), true
	}
	return 0, false
}

func packed(addr uint32, port uint16, p Protocol, c keyClass) uint64 {
	return uint64(addr)<<32 | uint64(port)<<16 | uint64(p)<<8 | uint64(c)
}

// wideKey is a packed key with an IPv6 address.
type wideKey struct{ high, low, rest uint64 }

func wide(addr [16]byte, port uint16, p Protocol, c keyClass) wideKey {
	return wideKey{binary.BigEndian.Uint64(addr[:8]), binary.BigEndian.Uint64(addr[8:]), packed(0, port, p, c)}
}

// ownerEdit builds the Snapshot's next index of node ports and cluster IPs.
type ownerEdit struct{ *IndexEdit[PortID] }

// enter is put, but does not copy a shard if nothing changes.
func (e ownerEdit) enter(k key, id PortID) {
	if old := e.Index().get(k); old == nil || *old != id {
		e.put(k, id)
	}
}

const (
	shardsEach = 64 // for each class of keys, so that frequently used ones share cache lines
	shardCount = 3 * shardsEach
)

// Index maps destinations to values. Package policy stores its compiled decisions
// in one. An Index is immutable and safe for concurrent use. An IndexEdit derives
// the next one; it copies only the shards that it changes, and both Indexes share
// the rest. The zero value is empty.
//
// In a large cluster, a lookup costs one cache miss, because values lie beside
// their keys. With an IPv4 address or a node port, the key takes 8 bytes, so a V of
// 56 bytes fills one cache line.
type Index[V any] struct {
	words [shardCount]flat[uint64, V]  // IPv4 and node ports
	keys  [shardCount]flat[wideKey, V] // IPv6
}

// seed differs in each process, so that tenants cannot choose external IPs that all
// collide.
var seed = rand.Uint64()

// hashWord and hashKey distribute keys over 64 bits. The high bits select the
// shard, the low bits the slot in it.
func hashWord(w uint64) uint64 { return mix(w ^ seed) }

func hashKey(k wideKey) uint64 { return mix(mix(mix(k.high^seed)^k.low) ^ k.rest) }

// mix is the finalizer of splitmix64. Each output bit depends on all input bits,
// even for consecutive addresses.
func mix(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

func shardOf(hash uint64, class uint64) int {
	return int(class&0xff)*shardsEach + int(hash>>(64-6))
}

// Get returns the value of an address and port, or nil. The value is read-only. Get
// takes no lock and does not allocate.
func (x *Index[V]) Get(d Destination) *V {
	if d.Port == 0 {
		return nil
	}
	return x.getAddr(d.Addr, d.Port, d.Protocol, byAddress)
}

// GetNodePort is Get for a node port of a family.
func (x *Index[V]) GetNodePort(f Family, p Protocol, port uint16) *V {
	if port == 0 {
		return nil
	}
	return x.getWord(packed(uint32(f), port, p, byNodePort))
}

func (x *Index[V]) getWord(w uint64) *V {
	h := hashWord(w)
	return x.words[shardOf(h, w)].get(h, w)
}

func (x *Index[V]) getWide(k wideKey) *V {
	h := hashKey(k)
	return x.keys[shardOf(h, k.rest)].get(h, k)
}

func (x *Index[V]) get(k key) *V {
	if w, ok := k.pack(); ok {
		return x.getWord(w)
	}
	return x.getWide(wide(k.addr, k.port, k.proto, k.class))
}

// getAddr is get for a key with an address. It avoids building a key for IPv4.
func (x *Index[V]) getAddr(a netip.Addr, port uint16, p Protocol, c keyClass) *V {
	if a.Is4() {
		b := a.As4()
		return x.getWord(packed(binary.BigEndian.Uint32(b[:]), port, p, c))
	}
	return x.getWide(wide(a.As16(), port, p, c))
}

// IndexEdit derives an Index from another one. It is not safe for concurrent use.
type IndexEdit[V any] struct {
	base *Index[V]
	next *Index[V] // nil while nothing has changed
	// The shards that next does not share with base.
	ownWords, ownKeys [shardCount]bool
}

// EditIndex starts an edit of an Index, which does not change.
func EditIndex[V any](base *Index[V]) *IndexEdit[V] { return &IndexEdit[V]{base: base} }

// Index returns the result and ends the edit. Without changes, it returns the Index
// that the edit started with.
func (e *IndexEdit[V]) Index() *Index[V] {
	if e.next != nil {
		return e.next
	}
	return e.base
}

// Put sets the value of an address and port.
func (e *IndexEdit[V]) Put(d Destination, v V) { e.put(addrKey(d), v) }

// PutNodePort is Put for a node port of a family.
func (e *IndexEdit[V]) PutNodePort(f Family, p Protocol, port uint16, v V) {
	e.put(nodePortKey(f, p, port), v)
}

// Remove deletes an address and port, if it is there.
func (e *IndexEdit[V]) Remove(d Destination) { e.remove(addrKey(d)) }

// RemoveNodePort is Remove for a node port of a family.
func (e *IndexEdit[V]) RemoveNodePort(f Family, p Protocol, port uint16) {
	e.remove(nodePortKey(f, p, port))
}

func (e *IndexEdit[V]) put(k key, v V) {
	if w, ok := k.pack(); ok {
		e.words(w).put(w, v, hashWord)
	} else {
		k := wide(k.addr, k.port, k.proto, k.class)
		e.keys(k).put(k, v, hashKey)
	}
}

func (e *IndexEdit[V]) remove(k key) {
	if e.Index().get(k) == nil {
		return
	}
	if w, ok := k.pack(); ok {
		e.words(w).remove(w, hashWord)
	} else {
		k := wide(k.addr, k.port, k.proto, k.class)
		e.keys(k).remove(k, hashKey)
	}
}

func (e *IndexEdit[V]) words(w uint64) *flat[uint64, V] {
	i := shardOf(hashWord(w), w)
	return writable(&e.edited().words[i], &e.ownWords[i])
}

func (e *IndexEdit[V]) keys(k wideKey) *flat[wideKey, V] {
	i := shardOf(hashKey(k), k.rest)
	return writable(&e.edited().keys[i], &e.ownKeys[i])
}

func (e *IndexEdit[V]) edited() *Index[V] {
	if e.next == nil {
		copied := *e.base
		e.next = &copied
	}
	return e.next
}

// writable returns a shard for writing. It copies the shard if that is still
// shared.
func writable[K comparable, V any](shard *flat[K, V], own *bool) *flat[K, V] {
	if !*own {
		*own = true
		*shard = shard.clone()
	}
	return shard
}

// eitherFamily is the family of node ports in the Snapshot's index, because a
// service has its node port in both.
const eitherFamily = IPv4

// FindNodePort returns the service port that has a node port. The caller must check
// that the connection's destination is a node address.
func (s *Snapshot) FindNodePort(p Protocol, port uint16) (PortID, bool) {
	if s.index == nil {
		return 0, false
	}
	id := s.index.GetNodePort(eitherFamily, p, port)
	if id == nil {
		return 0, false
	}
	return *id, true
}

// HasClusterIP reports whether an address is the cluster IP of a service (A3.12).
func (s *Snapshot) HasClusterIP(a netip.Addr) bool {
	if s.index == nil {
		return false
	}
	return s.index.getAddr(a, 0, 0, byClusterIP) != nil
}
