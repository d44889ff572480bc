package balancer

import (
	"net/netip"
	"time"
)

// Standing is what keeps connections off an endpoint now, or has it get fewer of them.
type Standing struct {
	Open int  // connections and sessions of this node
	Full bool // it has as many connections as it may have

	// Ejected is set while new connections pass it over, and when one of them tries it: then
	// Trying is set, too. For is how long it is ejected already, and Left how much longer; or
	// how long it is tried, and when it counts as mended.
	Ejected, Trying bool
	For, Left       time.Duration
	// Resets is set if connections that it reset ejected it, and not attempts that failed.
	Resets bool

	// Share is the part of its full share that it gets while it starts slowly; 1 afterwards.
	Share float64
}

// Standing tells about an endpoint, for people. It takes a lock that connections take only when
// endpoints fail.
func (b *Balancer) Standing(ep netip.AddrPort, now int64) Standing {
	c := b.config.Load()
	l := c.loads.Of(ep)
	out := Standing{Open: l.Open(), Full: c.full(ep), Share: 1}
	if s := c.starting(now); s != nil {
		out.Share = float64(s.share(ep, now)) / fullShare
	}
	o := l.outcomes.Load()
	if o == nil {
		return out
	}
	x := &c.loads.ejections
	x.mu.Lock()
	defer x.mu.Unlock()
	until := o.until.Load()
	if until == 0 || x.settings.Load() == nil {
		return out
	}
	whole := firstEjection
	if !o.trying {
		whole = min(firstEjection<<max(o.doubled-1, 0), longestEjection)
	}
	out.Ejected, out.Trying, out.Resets = true, o.trying, !o.attempts
	out.Left = time.Duration(max(until-now, 0))
	out.For = time.Duration(max(now-until, -int64(whole)) + int64(whole))
	return out
}

// Algorithm returns the algorithm in force.
func (b *Balancer) Algorithm() Algorithm { return b.config.Load().algorithm }
