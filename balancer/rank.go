package balancer

import (
	"encoding/binary"
	"hash/fnv"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/service"
)

// Rank is this node's place among the nodes of its cluster. Round-robin begins there, so
// that nodes which each open few connections use all endpoints evenly. The zero value is
// unknown: round-robin then begins at random. All methods are safe for concurrent use.
type Rank struct {
	known atomic.Uint64 // the rank + 1; 0 = unknown
}

// Set derives the rank from a node. The index of its first pod range in the cluster's
// range is the rank, as clusters give out such ranges one after another. If the cluster's
// range is not given, the index counts from address 0: the fullest endpoint may then have
// one connection more. Without a pod range, the node's name decides by a hash, which
// spreads as evenly as a random start. A node without range and name leaves the rank as it
// is.
func (r *Rank) Set(name string, podCIDRs, clusterCIDRs []netip.Prefix) {
	switch {
	case len(podCIDRs) > 0:
		pods := podCIDRs[0]
		var first uint32
		for _, c := range clusterCIDRs {
			if c.Bits() <= pods.Bits() && c.Contains(pods.Addr()) {
				first = rangeIndex(netip.PrefixFrom(c.Masked().Addr(), pods.Bits()))
			}
		}
		r.known.Store(uint64(rangeIndex(pods)-first) + 1)
	case name != "":
		h := fnv.New32a()
		_, _ = h.Write([]byte(name))
		r.known.Store(uint64(h.Sum32()) + 1)
	}
}

// rangeIndex returns the number of a range among all ranges of its length, modulo 2^32:
// ranges that follow each other have numbers that follow each other.
func rangeIndex(p netip.Prefix) uint32 {
	if p.Addr().Is4() {
		a := p.Addr().As4()
		return uint32(uint64(binary.BigEndian.Uint32(a[:])) >> (32 - p.Bits()))
	}
	a := p.Addr().As16()
	hi, lo := binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(a[8:])
	host := 128 - p.Bits()
	if host >= 64 {
		return uint32(hi >> (host - 64))
	}
	return uint32(hi<<(64-host) | lo>>host)
}

// start returns where round-robin begins in a list of n candidates, and false if the rank
// is unknown. n nodes in a row begin at n different places, and the next n are shifted by
// one: otherwise, clients on every third node alone would not use all of three endpoints.
func (r *Rank) start(n int) (uint32, bool) {
	if r == nil {
		return 0, false
	}
	known := r.known.Load()
	if known == 0 {
		return 0, false
	}
	rank := known - 1
	return uint32((rank + rank/uint64(n)) % uint64(n)), true
}

// primes exceed the length of any list, so each is coprime to it, and stepping through a
// list by one of them visits each candidate once.
var primes = [...]uint64{
	2147483647, 2147483629, 2147483587, 2147483579, 2147483563, 2147483549, 2147483543, 2147483497,
	2147483489, 2147483477, 2147483423, 2147483399, 2147483353, 2147483323, 2147483269, 2147483249,
}

// order is a permutation of a list of candidates. It is the same on all nodes, and differs
// between service ports, so that no node prefers the same endpoint for each of them.
type order struct {
	n, step, offset uint64
}

// orderOf returns the permutation of a list for a service port with the given hash.
func orderOf(port uint64, candidates []service.Endpoint) order {
	n := uint64(len(candidates))
	h := scramble(port ^ mix(stableKey(candidates[0].Addr), 0x9e3779b97f4a7c15+n))
	return order{n: n, step: primes[h%uint64(len(primes))], offset: h >> 32}
}

// at returns the index of the candidate at a place.
func (o order) at(place uint32) int {
	return int((uint64(place)%o.n*o.step + o.offset) % o.n)
}

// stableKey converts an endpoint's address to a number that is the same in all processes.
func stableKey(ep netip.AddrPort) uint64 {
	a := ep.Addr().As16()
	hi, lo := binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(a[8:])
	p, q := bits.Mul64(hi^0xbf58476d1ce4e5b9, lo^0x94d049bb133111eb)
	return scramble(p ^ q ^ uint64(ep.Port()))
}

// nameKey converts a service port's name to a number that is the same on all nodes.
func nameKey(n service.PortName) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(n.String()))
	return h.Sum64()
}

// Turns appends the addresses of the candidates in the order in which round-robin takes them, and
// returns the place in that order where it begins on this node.
func (b *Balancer) Turns(to []netip.AddrPort, candidates []service.Endpoint) (ordered []netip.AddrPort, start uint32) {
	c := b.config.Load()
	if len(candidates) == 0 {
		return to, 0
	}
	start, ranked := c.rank.start(len(candidates))
	o := orderOf(c.port, candidates)
	for i := range candidates {
		at := i
		if ranked {
			at = o.at(uint32(i))
		}
		to = append(to, candidates[at].Addr)
	}
	if !ranked {
		start = rand.Uint32()
	}
	return to, start
}
