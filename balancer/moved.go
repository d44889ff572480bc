package balancer

import (
	"cmp"
	"net/netip"
	"slices"
)

// Pin is a client that session affinity remembers, with its endpoint.
type Pin struct {
	Client   netip.Addr
	Endpoint netip.AddrPort
	Used     int64 // when it was used last, monotonic ns
}

// Pinned returns the pins that were used at since or later and have not expired, those used longest
// ago first. It is safe for concurrent use.
func (b *Balancer) Pinned(since, now int64) []Pin {
	c := b.config.Load()
	if c.pins == nil {
		return nil
	}
	var list []Pin
	for i := range c.pins.shards {
		s := &c.pins.shards[i]
		s.mu.Lock()
		for at := s.newest; at != none; at = s.pins[at].next {
			p := &s.pins[at]
			if p.used >= since && now-p.used < c.window {
				list = append(list, Pin{netip.AddrFrom16(p.client).Unmap(), p.endpoint(), p.used})
			}
		}
		s.mu.Unlock()
	}
	slices.SortFunc(list, func(a, b Pin) int { return cmp.Compare(a.Used, b.Used) })
	return list
}

// Restore pins the clients of another process's Pinned, unless they have a pin here by now. It is
// safe for concurrent use.
func (b *Balancer) Restore(list []Pin, now int64) {
	c := b.config.Load()
	if c.pins == nil {
		return
	}
	for _, p := range list {
		key := clientKey(p.Client.As16())
		s := c.pins.shard(key)
		s.mu.Lock()
		if _, ok := s.index[key]; !ok && now-p.Used < c.window {
			s.setLocked(key, p.Endpoint, p.Used, c.window)
		}
		s.mu.Unlock()
	}
}
