package balancer

import (
	"math/bits"
	"net/netip"

	"github.com/sluice-proxy/sluice/service"
)

const (
	// fullShare is a share of 1.
	fullShare = 1 << 10
	// leastShare is what a new endpoint begins with: a twentieth.
	leastShare = fullShare / 20
	// mostDraws bounds how often a connection is refused by endpoints that start. If all have
	// the least share, one in 30 connections comes to that, and the last one drawn takes it.
	mostDraws = 64
)

// starts are the endpoints of a service port that are new, and whose share grows. It never
// changes.
type starts struct {
	window int64            // in which a share grows to the full one, ns
	until  int64            // monotonic ns: when all have the full share
	since  map[uint64]int64 // when an endpoint began to start, by its key
}

// identity tells an endpoint from a later one at the same address: by the pod's UID, else by
// the address.
type identity struct {
	uid  service.UID
	addr netip.AddrPort
}

func identityOf(e *service.Endpoint) identity {
	if e.PodUID != (service.UID{}) {
		return identity{uid: e.PodUID}
	}
	return identity{addr: e.Addr}
}

// seen are the endpoints of a service port that have been ready, each with the time of that;
// 0 for those that did not start slowly, as no other one was there.
type seen map[identity]int64

// startsLocked compares the endpoints of a service port with those before. b.mu guards b.seen.
func (b *Balancer) startsLocked(port *service.Port, now int64) *starts {
	if port == nil || port.SlowStart == 0 {
		b.seen = nil
		return nil
	}
	was := b.seen
	b.seen = make(seen)
	s := &starts{window: int64(port.SlowStart), since: make(map[uint64]int64)}
	for f := range port.Families {
		for i := range port.Families[f].Endpoints {
			e := &port.Families[f].Endpoints[i]
			id := identityOf(e)
			since, known := was[id]
			switch {
			case known:
			case !e.Ready:
				continue
			case len(was) > 0:
				since = now
			}
			b.seen[id] = since
			if since != 0 && now-since < s.window {
				s.since[endpointKey(e.Addr)] = since
				s.until = max(s.until, since+s.window)
			}
		}
	}
	if len(s.since) == 0 {
		return nil
	}
	return s
}

// StartsUntil returns when all endpoints have their full share, in monotonic ns; 0 if none
// starts slowly.
func (b *Balancer) StartsUntil() int64 {
	if s := b.config.Load().starts; s != nil {
		return s.until
	}
	return 0
}

// starting returns the endpoints that start at this time, or nil if there are none.
func (c *config) starting(now int64) *starts {
	if s := c.starts; s != nil && now < s.until {
		return s
	}
	return nil
}

// share returns the share of an endpoint, of fullShare.
func (s *starts) share(ep netip.AddrPort, now int64) uint64 {
	since, ok := s.since[endpointKey(ep)]
	if !ok || now-since >= s.window {
		return fullShare
	}
	hi, lo := bits.Mul64(uint64(max(now-since, 0)), fullShare)
	grown, _ := bits.Div64(hi, lo, uint64(s.window))
	return max(grown, leastShare)
}

// refuses draws whether an endpoint that starts refuses a connection: as often as its share
// lacks of the full one.
func (s *starts) refuses(ep netip.AddrPort, now int64, lot uint64) bool {
	return lot%fullShare >= s.share(ep, now)
}

// byNumber is an algorithm that can name a candidate for any number, each as often as the
// algorithm is to choose it.
type byNumber interface {
	// number returns the number of a connection: a random one, or its hash.
	number(b *Balancer, c *config, conn Conn) uint64
	// named returns the index of the candidate of a number.
	named(b *Balancer, c *config, candidates []service.Endpoint, number uint64) int
}

// ease returns the choice of an algorithm, or another one by its numbers if that endpoint
// starts and refuses. A hash leads a client to the same endpoint each time, and to the one that
// starts from some moment on.
func (b *Balancer) ease(c *config, s *starts, candidates []service.Endpoint, conn Conn, choice int, now int64) int {
	a, ok := algorithms[c.algorithm].chooser.(byNumber)
	if !ok {
		return choice // it compares connections, and has looked at the shares
	}
	number := a.number(b, c, conn)
	for range mostDraws {
		if !s.refuses(candidates[choice].Addr, now, scramble(^number)) {
			break
		}
		number = scramble(number + 0x9e3779b97f4a7c15)
		choice = a.named(b, c, candidates, number)
	}
	return choice
}
