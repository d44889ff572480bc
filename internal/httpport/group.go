package httpport

import (
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
)

// MaxConnections is how many connections a Group has at most if it does not say
// otherwise. Probes of a node are fewer; each connection takes a descriptor and
// about 24 KiB.
const MaxConnections = 32

// maxEnding is how many connections for each one of the bound may be closed while
// their goroutines still run: http.Server keeps some for half a second.
const maxEnding = 16

// Group bounds the connections of one or more servers together. When it is full,
// a new connection takes the place of another, so that a probe is answered
// whatever others hold open: see victimLocked. The zero value is ready.
type Group struct {
	// Max is the number of connections; 0 means MaxConnections.
	Max int

	evicted atomic.Uint64

	mu      sync.Mutex
	open    map[*conn]struct{} // guarded by mu, as is what follows
	serving int                // connections whose goroutine has not ended
	ended   chan struct{}      // one of them has; nil unless admit waits for it
	turn    uint64             // counts changes of state
}

// conn is a connection of a Group.
type conn struct {
	net.Conn
	group  *Group
	source netip.Prefix   // the client
	state  http.ConnState // guarded by the group's mu, as is turn
	turn   uint64         // of the last change of state
	inUse  sync.RWMutex   // read-locked by calls that keep the descriptor open
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	c.inUse.RLock()
	defer c.inUse.RUnlock()
	return c.Conn.Read(p)
}

// Write implements net.Conn.
func (c *conn) Write(p []byte) (int, error) {
	c.inUse.RLock()
	defer c.inUse.RUnlock()
	return c.Conn.Write(p)
}

// Close implements net.Conn.
func (c *conn) Close() error {
	g := c.group
	g.mu.Lock()
	delete(g.open, c)
	g.mu.Unlock()
	return c.Conn.Close()
}

// groupListener gives connections of a Group.
type groupListener struct {
	net.Listener
	group *Group
}

// Accept implements net.Listener.
func (l groupListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.group.admit(c), nil
}

// Evicted returns the number of connections that were closed to make room.
func (g *Group) Evicted() uint64 { return g.evicted.Load() }

// admit makes room for a connection and takes it in.
func (g *Group) admit(nc net.Conn) *conn {
	c := &conn{Conn: nc, group: g, source: source(nc.RemoteAddr())}
	limit := g.Max
	if limit <= 0 {
		limit = MaxConnections
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.serving >= maxEnding*limit {
		g.ended = make(chan struct{})
		ended := g.ended
		g.mu.Unlock()
		<-ended
		g.mu.Lock()
	}
	if g.open == nil {
		g.open = make(map[*conn]struct{}, limit)
	}
	for len(g.open) >= limit {
		victim := g.victimLocked()
		delete(g.open, victim)
		g.evicted.Add(1)
		_ = victim.Conn.Close() // its server deals with the error of its next read
		victim.inUse.Lock()     // the descriptor is free when nobody uses it any more
		victim.inUse.Unlock()   //nolint:staticcheck // see above
	}
	g.turn++
	c.turn = g.turn
	g.open[c] = struct{}{}
	g.serving++
	return c
}

// stateChanged is an http.Server's ConnState.
func (g *Group) stateChanged(nc net.Conn, state http.ConnState) {
	c, ok := nc.(*conn)
	if !ok {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.turn++
	c.state, c.turn = state, g.turn
	if state == http.StateClosed || state == http.StateHijacked {
		g.serving--
		if g.ended != nil {
			close(g.ended)
			g.ended = nil
		}
	}
}

// victimLocked returns the connection to close: one of the client that has most;
// of these an idle one before one whose first request has not come yet, and that
// before one that is being answered; of these the one that has been so longest.
func (g *Group) victimLocked() (victim *conn) {
	held := make(map[netip.Prefix]int, len(g.open))
	for c := range g.open {
		held[c.source]++
	}
	for c := range g.open {
		if victim == nil || c.goesBefore(victim, held) {
			victim = c
		}
	}
	return victim
}

func (c *conn) goesBefore(o *conn, held map[netip.Prefix]int) bool {
	if held[c.source] != held[o.source] {
		return held[c.source] > held[o.source]
	}
	if c.worth() != o.worth() {
		return c.worth() < o.worth()
	}
	return c.turn < o.turn
}

// worth orders the states of connections.
func (c *conn) worth() int {
	switch c.state {
	case http.StateIdle:
		return 0
	case http.StateNew:
		return 1
	}
	return 2
}

// source names a client: an IPv4 address, or an IPv6 network of 64 bits, all
// addresses of which one host can have.
func source(a net.Addr) netip.Prefix {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	addr := tcp.AddrPort().Addr().Unmap().WithZone("")
	bits := 64
	if addr.Is4() {
		bits = 32
	}
	p, err := addr.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}
