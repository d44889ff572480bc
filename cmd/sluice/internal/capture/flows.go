package capture

import (
	"net/netip"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/live/api"
)

// slack is how much earlier or later than a connection's record says its packets are
// taken: the first one comes before the connection is accepted.
const slack = time.Second

// mostLegs bounds the memory for connections whose packets are taken.
const mostLegs = 1 << 18

// Flows are the connections whose packets are taken. It is safe for concurrent use.
type Flows struct {
	mu   sync.Mutex
	legs map[leg]window // guarded by mu
	// tried are endpoints that were tried in vain: the source of an attempt is not in the
	// record. Guarded by mu.
	tried          map[target]window
	count, leftOut int // connections, and those beyond mostLegs; guarded by mu
}

// target is where an attempt went.
type target struct {
	protocol uint8
	endpoint netip.AddrPort
}

// window is a time; it has no end if to is zero.
type window struct{ from, to time.Time }

func (w window) has(t time.Time) bool { return !t.Before(w.from) && (w.to.IsZero() || !t.After(w.to)) }

// with returns a window with that of the same connection, or of another one with the same
// ports, which may be the one before.
func (w window) with(news window) window {
	switch {
	case w.from.IsZero():
		return news
	case news.from.Before(w.from):
		return window{from: news.from, to: w.to}
	}
	return window{from: w.from, to: news.to}
}

// NewFlows returns no connections.
func NewFlows() *Flows {
	return &Flows{legs: make(map[leg]window), tried: make(map[target]window)}
}

var protocols = map[string]uint8{"TCP": tcp, "UDP": udp, "SCTP": sctp}

// Add adds an open connection, or one that has ended, or what is new of it.
func (f *Flows) Add(c *api.Connection) {
	f.mu.Lock()
	defer f.mu.Unlock()
	protocol := protocols[c.Protocol]
	if len(f.legs)+len(f.tried) >= mostLegs {
		f.leftOut++
		return
	}
	w := window{from: c.Time.Add(-slack)}
	if c.State == "" && c.Event == "" {
		w.to = c.Time.Add(time.Duration(c.DurationUS)*time.Microsecond + slack)
	}
	from := c.Client
	if c.Via != "" {
		from = c.Via
	}
	if f.leg(protocol, from, c.VIP, w) {
		f.count++
	}
	f.leg(protocol, c.SourceAddr, c.Endpoint, w)
	if w.to.IsZero() {
		w.to = time.Now().Add(slack)
	}
	for _, a := range c.Failed {
		if to, err := netip.ParseAddrPort(a.Endpoint); err == nil {
			k := target{protocol, to}
			old := f.tried[k].with(w)
			if old.to.Before(w.to) {
				old.to = w.to
			}
			f.tried[k] = old
		}
	}
}

// leg adds the packets between two addresses, if both are known, and reports whether they
// are another connection's; mu is held.
func (f *Flows) leg(protocol uint8, a, b string, w window) (another bool) {
	from, err := netip.ParseAddrPort(a)
	if err != nil {
		return false
	}
	to, err := netip.ParseAddrPort(b)
	if err != nil {
		return false
	}
	l := legOf(protocol, from, to)
	old, known := f.legs[l]
	f.legs[l] = old.with(w)
	return !known || !w.from.Equal(old.from) && !old.to.IsZero()
}

// take reports whether a packet is one of a connection's.
func (f *Flows) take(l leg, t time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if w, ok := f.legs[l]; ok && w.has(t) {
		return true
	}
	for _, end := range [2]netip.AddrPort{l.a, l.b} {
		if w, ok := f.tried[target{l.protocol, end}]; ok && w.has(t) {
			return true
		}
	}
	return false
}

// forget drops the connections that ended before a time.
func (f *Flows) forget(before time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for l, w := range f.legs {
		if !w.to.IsZero() && w.to.Before(before) {
			delete(f.legs, l)
		}
	}
	for k, w := range f.tried {
		if !w.to.IsZero() && w.to.Before(before) {
			delete(f.tried, k)
		}
	}
}

// Count returns the number of connections so far, and of those that are left out as there
// are too many at once.
func (f *Flows) Count() (connections, leftOut int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count, f.leftOut
}
