package service

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
)

// key is an address, port and protocol in a form that hashes fast. Node ports
// have no address; a cluster IP by itself has neither port nor protocol.
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

func nodePortKey(p Protocol, port uint16) key {
	return key{port: port, proto: p, class: byNodePort}
}

func clusterIPKey(a netip.Addr) key {
	return key{addr: a.As16(), class: byClusterIP}
}

// String gives the key as problems name it.
func (k key) String() string {
	if k.class == byNodePort {
		return fmt.Sprintf("node port %d/%s", k.port, k.proto)
	}
	a := netip.AddrFrom16(k.addr).Unmap()
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(a, k.port), k.proto)
}

// pack gives the form of a key that holds no IPv6 address in one word, which
// takes half the memory and is found faster.
func (k *key) pack() (uint64, bool) {
	if k.class == byNodePort {
		return packed(0, k.port, k.proto, k.class), true
	}
	if a := netip.AddrFrom16(k.addr); a.Is4In6() {
		return packed(binary.BigEndian.Uint32(k.addr[12:]), k.port, k.proto, k.class), true
	}
	return 0, false
}

func packed(addr uint32, port uint16, p Protocol, c keyClass) uint64 {
	return uint64(addr)<<32 | uint64(port)<<16 | uint64(p)<<8 | uint64(c)
}

// wideKey is the form of a key that holds an IPv6 address.
type wideKey struct{ high, low, rest uint64 }

func wide(addr [16]byte, port uint16, p Protocol, c keyClass) wideKey {
	return wideKey{binary.BigEndian.Uint64(addr[:8]), binary.BigEndian.Uint64(addr[8:]), packed(0, port, p, c)}
}

// place is what the index knows of a key. Its kind is never 0.
type place struct {
	id   PortID
	kind AddressKind
}

const (
	shardsEach = 64 // for each class of keys, so that the busy ones lie close together
	shardCount = 3 * shardsEach
)

// index finds service ports by destination. It is immutable once published;
// the next one is made by an indexEdit, which copies only the shards that it
// changes.
type index struct {
	words [shardCount]flat[uint64]  // IPv4 and node ports
	keys  [shardCount]flat[wideKey] // IPv6
}

// seed is another one in each process, so that nobody can choose external IPs
// that all fall on one slot.
var seed = rand.Uint64()

// hashWord and hashKey spread keys over 64 bits. The first ones choose the
// shard, the last ones the slot in it.
func hashWord(w uint64) uint64 { return mix(w ^ seed) }

func hashKey(k wideKey) uint64 { return mix(mix(mix(k.high^seed)^k.low) ^ k.rest) }

// mix has each bit depend on all, also where keys follow each other as the
// addresses of a cluster do (the finalizer of SplitMix64).
func mix(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

func shardOf(hash uint64, class uint64) int {
	return int(class&0xff)*shardsEach + int(hash>>(64-6))
}

func (x *index) getWord(w uint64) (place, bool) {
	h := hashWord(w)
	return x.words[shardOf(h, w)].get(h, w)
}

func (x *index) getWide(k wideKey) (place, bool) {
	h := hashKey(k)
	return x.keys[shardOf(h, k.rest)].get(h, k)
}

func (x *index) get(k key) (place, bool) {
	if w, ok := k.pack(); ok {
		return x.getWord(w)
	}
	return x.getWide(wide(k.addr, k.port, k.proto, k.class))
}

// getAddr is get for what has an address, without making a key for IPv4.
func (x *index) getAddr(a netip.Addr, port uint16, p Protocol, c keyClass) (place, bool) {
	if a.Is4() {
		b := a.As4()
		return x.getWord(packed(binary.BigEndian.Uint32(b[:]), port, p, c))
	}
	return x.getWide(wide(a.As16(), port, p, c))
}

// indexEdit makes the next index from the last one.
type indexEdit struct {
	base *index
	next *index // nil while nothing has changed
	// The shards that next does not share with base.
	ownWords, ownKeys [shardCount]bool
}

func (e *indexEdit) put(k key, p place) {
	if old, ok := e.current().get(k); ok && old == p {
		return
	}
	if w, ok := k.pack(); ok {
		e.words(w).put(w, p, hashWord)
	} else {
		k := wide(k.addr, k.port, k.proto, k.class)
		e.keys(k).put(k, p, hashKey)
	}
}

func (e *indexEdit) remove(k key) {
	if _, ok := e.current().get(k); !ok {
		return
	}
	if w, ok := k.pack(); ok {
		e.words(w).remove(w, hashWord)
	} else {
		k := wide(k.addr, k.port, k.proto, k.class)
		e.keys(k).remove(k, hashKey)
	}
}

func (e *indexEdit) current() *index {
	if e.next != nil {
		return e.next
	}
	return e.base
}

func (e *indexEdit) words(w uint64) *flat[uint64] {
	i := shardOf(hashWord(w), w)
	return writable(&e.edited().words[i], &e.ownWords[i])
}

func (e *indexEdit) keys(k wideKey) *flat[wideKey] {
	i := shardOf(hashKey(k), k.rest)
	return writable(&e.edited().keys[i], &e.ownKeys[i])
}

func (e *indexEdit) edited() *index {
	if e.next == nil {
		copied := *e.base
		e.next = &copied
	}
	return e.next
}

// writable gives a shard for writing, a copy when it is still shared.
func writable[K comparable](shard *flat[K], own *bool) *flat[K] {
	if !*own {
		*own = true
		*shard = shard.clone()
	}
	return shard
}

// Lookup finds the service port that a destination belongs to by its address:
// a cluster IP, external IP or load balancer IP with the service's port
// (A3.1). An address that is both external IP and load balancer IP of a port
// counts as the latter, so that its source ranges hold. It takes no lock and
// allocates nothing.
func (s *Snapshot) Lookup(d Destination) (*Port, AddressKind, bool) {
	id, kind, ok := s.Find(d)
	if !ok {
		return nil, 0, false
	}
	return s.Ports[id], kind, true
}

// Find is Lookup for those who keep a table of their own: it gives the place
// in Ports and leaves the Port itself unread.
func (s *Snapshot) Find(d Destination) (PortID, AddressKind, bool) {
	if d.Port == 0 || s.index == nil {
		return 0, 0, false
	}
	p, ok := s.index.getAddr(d.Addr, d.Port, d.Protocol, byAddress)
	return p.id, p.kind, ok
}

// FindNodePort finds the service port that has a node port. Whether the
// address that it was reached by is a node address is for the caller to know.
func (s *Snapshot) FindNodePort(p Protocol, port uint16) (PortID, bool) {
	if port == 0 || s.index == nil {
		return 0, false
	}
	at, ok := s.index.getWord(packed(0, port, p, byNodePort))
	return at.id, ok
}

// HasClusterIP tells whether an address is the cluster IP of some service
// (A3.12).
func (s *Snapshot) HasClusterIP(a netip.Addr) bool {
	if s.index == nil {
		return false
	}
	_, ok := s.index.getAddr(a, 0, 0, byClusterIP)
	return ok
}
