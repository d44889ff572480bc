package balancer

import (
	"encoding/binary"
	"net/netip"

	"github.com/sluice-proxy/sluice/service"
)

// The algorithms that choose by a hash. All nodes compute the same one.

// byHash takes the candidate that a hash of the client's or the destination's address
// names. Another number of candidates moves nearly all clients.
type byHash struct{ destination bool }

func (byHash) prepare(*view, *config, []service.Endpoint) {}

func (a byHash) choose(b *Balancer, c *config, candidates []service.Endpoint, conn Conn, _ int64) int {
	return a.named(b, c, candidates, a.number(b, c, conn))
}

func (a byHash) number(_ *Balancer, c *config, conn Conn) uint64 {
	if a.destination {
		return hashAddr(conn.Destination.Addr(), 0)
	}
	return conn.hash(c.hashPort)
}

func (byHash) named(_ *Balancer, _ *config, candidates []service.Endpoint, number uint64) int {
	return nth(number, len(candidates))
}

// maglevSize is the number of places in a table of Maglev, a prime. Each of n endpoints has
// 16381/n places or one more.
const maglevSize = 16381

// maglev takes the candidate that the client's place in a table names. Endpoints that come
// or go move few other clients (Eisenbud et al., Maglev, NSDI 2016, section 3.4).
type maglev struct{}

func (maglev) prepare(v *view, _ *config, candidates []service.Endpoint) {
	v.table = maglevTable(candidates)
}

func (m maglev) choose(b *Balancer, c *config, candidates []service.Endpoint, conn Conn, _ int64) int {
	return m.named(b, c, candidates, m.number(b, c, conn))
}

func (maglev) number(_ *Balancer, c *config, conn Conn) uint64 { return conn.hash(c.hashPort) }

func (maglev) named(b *Balancer, c *config, candidates []service.Endpoint, number uint64) int {
	return int(b.view(c, candidates).table[nth(number, maglevSize)])
}

// maglevTable has the candidates take places in turns, each by its own permutation.
func maglevTable(candidates []service.Endpoint) []uint16 {
	const empty = 1<<16 - 1
	n := min(len(candidates), maglevSize)
	table := make([]uint16, maglevSize)
	for i := range table {
		table[i] = empty
	}
	type walk struct{ at, step uint32 }
	walks := make([]walk, n)
	for i := range walks {
		h := stableKey(candidates[i].Addr)
		walks[i] = walk{uint32(h>>32) % maglevSize, uint32(h)%(maglevSize-1) + 1}
	}
	for taken := 0; ; {
		for i := range walks {
			w := &walks[i]
			for table[w.at] != empty {
				w.at = (w.at + w.step) % maglevSize
			}
			table[w.at] = uint16(i)
			if taken++; taken == maglevSize {
				return table
			}
		}
	}
}

// Conn is what algorithms may know of a connection.
type Conn struct {
	Client      netip.AddrPort // the source of the client's packets (A5.6)
	Destination netip.AddrPort // the Service's address that the client used
}

// hash returns a hash of the client's address, and of its port if that counts.
func (c Conn) hash(port bool) uint64 {
	if port {
		return hashAddr(c.Client.Addr(), c.Client.Port())
	}
	return hashAddr(c.Client.Addr(), 0)
}

func hashAddr(addr netip.Addr, port uint16) uint64 {
	a := addr.As16()
	hi, lo := binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(a[8:])
	return scramble(mix(hi^0xa0761d6478bd642f, lo^0xe7037ed1a0b428db) + uint64(port)<<32)
}
