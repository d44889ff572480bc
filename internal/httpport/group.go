package httpport

import (
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
)

// MaxConnections is the default bound of a Group. A node makes fewer probes at a
// time. Each connection takes a descriptor and about 24 KiB.
const MaxConnections = 32

// maxEnding bounds, as a multiple of Max, the closed connections whose goroutines
// still run. http.Server keeps some for half a second.
const maxEnding = 16

// Group bounds the connections of one or more servers together. In a full Group, a
// new connection evicts another one, so that a probe is answered however many
// connections others hold open; see victimLocked. The zero value is ready for use.
// It is safe for concurrent use.
type Group struct {
	// Max is the maximum number of connections; 0 means MaxConnections.
	Max int

	evicted atomic.Uint64

	mu      sync.Mutex
	open    map[*conn]struct{} // guarded by mu, like the following fields
	serving int                // connections whose goroutine has not ended
	ended   chan struct{}      // signals the end of one; nil unless admit waits
	turn    uint64             // counts state changes
}

// conn is a connection of a Group.
type conn struct {
	net.Conn
	group  *Group
	source netip.Prefix   // the client
	state  http.ConnState // guarded by the group's mu, like turn
	turn   uint64         // Group.turn at the last state change
	inUse  sync.RWMutex   // read-locked by calls that use the descriptor
}

// NetConn returns the connection that the listener accepted.
func (c *conn) NetConn() net.Conn { return c.Conn }

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

// groupListener accepts connections into a Group.
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

// Evicted returns the number of connections that were closed in favour of new ones.
func (g *Group) Evicted() uint64 { return g.evicted.Load() }

// admit adds a connection, and evicts another one if the Group is full.
func (g *Group) admit(nc net.Conn) *conn {
	c := &conn{Conn: nc, group: g, source: source(nc.RemoteAddr())}
	limit := g.Max
	if limit <= 0 {
		limit = MaxConnections
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.serving >= maxEnding*limit {
		if g.ended == nil {
			g.ended = make(chan struct{}) // that of all who wait
		}
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
		_ = victim.Conn.Close() // its server gets an error from the next read
		victim.inUse.Lock()     // waits until no call uses the descriptor
		victim.inUse.Unlock()   //nolint:staticcheck // see above
	}
	g.turn++
	c.turn = g.turn
	g.open[c] = struct{}{}
	g.serving++
	return c
}

// stateChanged is that of http.Server.ConnState.
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

// victimLocked selects the connection to evict: one of the client with most
// connections; among these, an idle one before one without a first request, and
// that before one that is being answered; among these, the one longest in its
// state.
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

// worth orders the states of connections for eviction.
func (c *conn) worth() int {
	switch c.state {
	case http.StateIdle:
		return 0
	case http.StateNew:
		return 1
	}
	return 2
}

// source identifies a client by its IPv4 address, or by its IPv6 /64, because one
// host can have all addresses of that.
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
