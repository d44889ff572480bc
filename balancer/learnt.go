package balancer

import (
	"iter"
	"math/bits"
	"net/netip"

	"github.com/sluice-proxy/sluice/service"
)

// Learnt is what connections have shown a Balancer: where round-robin stands, and which endpoints
// fail or start slowly.
type Learnt struct {
	Turns     []uint64         `json:",omitempty"` // lists of candidates with their turn, see Balancer.cursors
	Endpoints []LearntEndpoint `json:",omitempty"`
}

// LearntEndpoint is an endpoint that has failed or that starts slowly. Times are in ns from the
// moment of Balancer.Learnt.
type LearntEndpoint struct {
	Endpoint  netip.AddrPort
	Suspected *LearntSuspicion `json:",omitempty"`
	Ejected   *LearntEjection  `json:",omitempty"`
	Started   int64            `json:",omitempty"` // for how long it has been starting; 0 = it has its full share
}

// LearntSuspicion is that of an endpoint.
type LearntSuspicion struct {
	Left    int64 // until the next connection tries it
	Doubled uint64
}

// LearntEjection is what outcomes say of an endpoint.
type LearntEjection struct {
	Out              bool  // it is ejected, or tried
	Left             int64 // until it is tried, or counts as mended
	Trying, Attempts bool
	Refused, Resets  int
	Doubled          int
}

// Learnt describes what the Balancer has learnt. It is safe for concurrent use.
func (b *Balancer) Learnt(now int64) (l Learnt) {
	c := b.config.Load()
	for i := range b.cursors {
		if v := b.cursors[i].Load(); v != 0 {
			l.Turns = append(l.Turns, v)
		}
	}
	for i := range b.views {
		if v := b.views[i].Load(); v != nil && v.config == c && v.sums != nil {
			l.Turns = append(l.Turns, v.list|v.turn.Load()%v.sums[v.n-1]&turnMask)
		}
	}
	for each := range c.endpoints() {
		key := endpointKey(each.Addr)
		e := LearntEndpoint{Endpoint: each.Addr, Suspected: b.suspicionOf(key, now), Ejected: c.loads.learnt(key, now)}
		if s := c.starting(now); s != nil && s.since[key] != 0 {
			e.Started = max(now-s.since[key], 1)
		}
		if e.Suspected != nil || e.Ejected != nil || e.Started != 0 {
			l.Endpoints = append(l.Endpoints, e)
		}
	}
	return l
}

// endpoints visits those of the service port.
func (c *config) endpoints() iter.Seq[*service.Endpoint] {
	return func(visit func(*service.Endpoint) bool) {
		if c.service == nil {
			return
		}
		for f := range c.service.Families {
			list := c.service.Families[f].Endpoints
			for i := range list {
				if !visit(&list[i]) {
					return
				}
			}
		}
	}
}

// Learn takes over what another process's Balancer of the service port has learnt, but for what
// connections have shown here by now. It is safe for concurrent use.
func (b *Balancer) Learn(l *Learnt, now int64) {
	for _, turn := range l.Turns {
		b.setTurn(turn&^turnMask, uint32(turn))
	}
	c, n := b.config.Load(), 0
	for range c.endpoints() {
		n++
	}
	started := make(map[netip.AddrPort]int64)
	for i := range l.Endpoints {
		e := &l.Endpoints[i]
		if s := e.Suspected; s != nil {
			b.suspectUntil(e.Endpoint, uint8(bits.Len(uint(n))), min(s.Doubled, doubledMask), now+min(s.Left, int64(longestSuspicion)))
		}
		if e.Ejected != nil {
			c.loads.learn(endpointKey(e.Endpoint), e.Ejected, now)
		}
		if e.Started > 0 {
			started[e.Endpoint] = now - e.Started
		}
	}
	b.restart(started, now)
}

// suspicionOf returns an endpoint's suspicion, or nil.
func (b *Balancer) suspicionOf(key uint64, now int64) *LearntSuspicion {
	s := b.suspects.Load()
	if s == nil {
		return nil
	}
	bucket, tag := s.bucket(key)
	at, word := bucket.find(tag)
	if at == nil {
		return nil
	}
	return &LearntSuspicion{Left: int64(word&untilMask<<unitBits) - now, Doubled: word >> untilBits & doubledMask}
}

// learnt returns an endpoint's failures, or nil.
func (s *Loads) learnt(key uint64, now int64) *LearntEjection {
	t := s.table.Load()
	if t == nil || s.ejections.settings.Load() == nil {
		return nil
	}
	l, _ := t.find(key)
	if l == nil {
		return nil
	}
	o := l.outcomes.Load()
	if o == nil {
		return nil
	}
	s.ejections.mu.Lock()
	defer s.ejections.mu.Unlock()
	e := &LearntEjection{Trying: o.trying, Attempts: o.attempts, Refused: o.refused, Resets: o.resets, Doubled: o.doubled}
	if until := o.until.Load(); until != 0 {
		e.Out, e.Left = true, until-now
	}
	if *e == (LearntEjection{Attempts: e.Attempts}) {
		return nil
	}
	return e
}

// learn takes over an endpoint's failures, unless it has failed here.
func (s *Loads) learn(key uint64, e *LearntEjection, now int64) {
	s.mu.Lock()
	l := s.addLocked(key)
	s.mu.Unlock()
	x := &s.ejections
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.settings.Load() == nil || !x.listed[key] || !l.outcomes.CompareAndSwap(nil, &outcomes{}) {
		return
	}
	o := l.outcomes.Load()
	o.refused, o.resets, o.doubled = max(e.Refused, 0), max(e.Resets, 0), min(max(e.Doubled, 0), mostDoubled)
	if e.Out && x.roomLocked() {
		o.trying, o.attempts = e.Trying, e.Attempts
		o.until.Store(now + min(e.Left, int64(longestEjection)))
		x.out.Add(1)
	}
}

// restart has endpoints start slowly that have begun to in another process.
func (b *Balancer) restart(since map[netip.AddrPort]int64, now int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.seen == nil || len(since) == 0 {
		return
	}
	next := *b.config.Load()
	for e := range next.endpoints() {
		if at, ok := since[e.Addr]; ok && b.seen[identityOf(e)] == 0 {
			b.seen[identityOf(e)] = at
		}
	}
	next.starts = b.startsLocked(next.service, now)
	b.config.Store(&next)
}
