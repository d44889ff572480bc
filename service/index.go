package service

import (
	"encoding/binary"
	"fmt"
	"maps"
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

// place is what the index knows of a key.
type place struct {
	id   PortID
	kind AddressKind
}

const shardCount = 256

// index finds service ports by destination. It is immutable once published;
// the next one is made by an indexEdit, which copies only the shards that it
// changes.
type index struct {
	shards [shardCount]map[key]place
}

func (k *key) shard() int {
	h := binary.LittleEndian.Uint64(k.addr[8:]) ^ binary.LittleEndian.Uint64(k.addr[:8])*0x9e3779b97f4a7c15
	h ^= uint64(k.port)<<8 ^ uint64(k.proto)
	h *= 0xd6e8feb86659fd93
	h ^= h >> 32
	return int(h * 0xd6e8feb86659fd93 >> 56)
}

func (x *index) get(k key) (place, bool) {
	p, ok := x.shards[k.shard()][k]
	return p, ok
}

// indexEdit makes the next index from the last one.
type indexEdit struct {
	base *index
	next *index // nil while nothing has changed
	own  [shardCount]bool
}

func (e *indexEdit) put(k key, p place) {
	if old, ok := e.current().get(k); !ok || old != p {
		e.shard(k)[k] = p
	}
}

func (e *indexEdit) remove(k key) {
	if _, ok := e.current().get(k); ok {
		delete(e.shard(k), k)
	}
}

func (e *indexEdit) current() *index {
	if e.next != nil {
		return e.next
	}
	return e.base
}

// shard gives the shard of a key, for writing.
func (e *indexEdit) shard(k key) map[key]place {
	if e.next == nil {
		copied := *e.base
		e.next = &copied
	}
	i := k.shard()
	if !e.own[i] {
		e.own[i] = true
		if m := e.next.shards[i]; m != nil {
			e.next.shards[i] = maps.Clone(m)
		} else {
			e.next.shards[i] = make(map[key]place)
		}
	}
	return e.next.shards[i]
}

// Lookup finds the service port that a destination belongs to by its address:
// a cluster IP, external IP or load balancer IP with the service's port
// (A3.1). An address that is both external IP and load balancer IP of a port
// counts as the latter, so that its source ranges hold. It takes no lock and
// allocates nothing.
func (s *Snapshot) Lookup(d Destination) (*Port, AddressKind, bool) {
	if d.Port == 0 || s.index == nil {
		return nil, 0, false
	}
	p, ok := s.index.get(addrKey(d))
	if !ok {
		return nil, 0, false
	}
	return s.Ports[p.id], p.kind, true
}

// LookupNodePort finds the service port that has a node port. Whether the
// address that it was reached by is a node address is for the caller to know.
func (s *Snapshot) LookupNodePort(p Protocol, port uint16) (*Port, bool) {
	if port == 0 || s.index == nil {
		return nil, false
	}
	at, ok := s.index.get(nodePortKey(p, port))
	if !ok {
		return nil, false
	}
	return s.Ports[at.id], true
}

// HasClusterIP tells whether an address is the cluster IP of some service
// (A3.12).
func (s *Snapshot) HasClusterIP(a netip.Addr) bool {
	if s.index == nil {
		return false
	}
	_, ok := s.index.get(clusterIPKey(a))
	return ok
}
