package route

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// clients are the client addresses that our sockets are bound to in modes without
// marks (F11). Two reply tables have a route for each of them and no other route, so
// that the node forwards answers to clients of other nodes.
//
// A pod may be a client of two nodes: of its own by a cluster IP, and of another by
// a node port there. An endpoint on that other node then answers both proxies at the
// pod's address. So the two use different ports: clients behind this node have the
// first half of the range and the first table, other clients the second half and the
// second table.
//
// A route stays for clientLinger after the last socket of its client was closed, as
// the kernel answers packets for such a socket for that long.
type clients struct {
	router *Router

	mu      sync.Mutex // guards everything below; held for a few requests to the kernel
	handles            // others than the Router's, which may be in use for long
	ports   [2]uint16
	held    map[netip.Addr]*client // nil while no rule leads to the tables
	unused  []unusedClient         // oldest first
	uplinks [2][]int               // interfaces that lead to other nodes, by family
	failed  error                  // of a Hold since the last apply, which reports it
}

// client is an address that has a route.
type client struct {
	behind  bool // the client reaches other nodes through this one
	sockets int
	unused  time.Time // since when there are none; zero while there are
}

// unusedClient had no socket at a time. It may have one again.
type unusedClient struct {
	addr  netip.Addr
	since time.Time
}

const (
	// clientLinger covers the FIN_WAIT and TIME_WAIT of a socket.
	clientLinger = 2 * time.Minute
	// mostUnused bounds the routes of clients without sockets.
	mostUnused = 16384
)

var (
	_ redirect.Clients = (*clients)(nil)

	errNoReplies = errors.New("answers to clients' addresses are not brought back")
)

func (c *clients) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = nil
	c.handles.close()
}

// splitPorts returns the two halves of a range of ports.
func splitPorts(ports [2]uint16) (behind, others [2]uint16) {
	middle := ports[0] + (ports[1]-ports[0])/2
	return [2]uint16{ports[0], middle}, [2]uint16{min(middle+1, ports[1]), ports[1]}
}

func (c *clients) setPorts(ports [2]uint16) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ports = ports
}

// Hold brings answers to an address back until Release is called as often.
func (c *clients) Hold(addr netip.Addr) (ports [2]uint16, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held == nil {
		return ports, errNoReplies
	}
	k := c.held[addr]
	if k == nil {
		k = &client{behind: c.isBehindLocked(addr)}
		if err := c.add(addr, k); err != nil {
			c.failed = err
			return ports, err
		}
		c.held[addr] = k
	}
	k.sockets++
	behind, others := splitPorts(c.ports)
	if k.behind {
		return behind, nil
	}
	return others, nil
}

// isBehindLocked reports whether a client reaches other nodes through this one: there
// is no router on the way to it, it is not on the network of this node's own router,
// and not at the other end of a tunnel.
func (c *clients) isBehindLocked(addr netip.Addr) bool {
	routes, err := c.nl.RouteGet(addr.AsSlice())
	if err != nil || len(routes) == 0 {
		return false
	}
	k := &routes[0]
	if k.Gw != nil || k.Via != nil || len(k.MultiPath) > 0 {
		return false
	}
	return !slices.Contains(c.uplinks[service.FamilyOf(addr)], k.LinkIndex)
}

// Release takes back what Hold did.
func (c *clients) Release(addr netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.held[addr]
	if k == nil {
		return
	}
	if k.sockets--; k.sockets > 0 {
		return
	}
	k.unused = time.Now()
	c.unused = append(c.unused, unusedClient{addr, k.unused})
	if len(c.unused) > mostUnused {
		_ = c.dropOldestLocked() // a route that stays is removed by the next apply
	}
}

// Held returns the clients that have a route.
func (c *clients) Held() []netip.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.held))
}

// Expect keeps the routes of clients that another process has added. The first apply adds
// what is missing.
func (c *clients) Expect(held []netip.Addr) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for f := range c.uplinks {
		var err error
		if c.uplinks[f], err = c.readUplinksLocked(service.Family(f)); err != nil {
			return err
		}
	}
	if c.held == nil {
		c.held = make(map[netip.Addr]*client)
	}
	for _, addr := range held {
		if c.held[addr] == nil {
			c.held[addr] = &client{behind: c.isBehindLocked(addr)}
		}
		c.held[addr].sockets++
	}
	return nil
}

// dropOldestLocked removes the route of the client that has been unused longest,
// unless it has a socket again.
func (c *clients) dropOldestLocked() error {
	u := c.unused[0]
	c.unused = c.unused[1:]
	k := c.held[u.addr]
	if k == nil || k.sockets > 0 || k.unused != u.since {
		return nil
	}
	delete(c.held, u.addr)
	return c.removeRoute(c.route(u.addr, k))
}

// stop makes Hold fail, so that the tables can be emptied.
func (c *clients) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held, c.unused = nil, nil
}

// apply makes the reply tables of a family hold just the routes of the clients, and
// forgets those that have been unused for long.
func (c *clients) apply(f service.Family) (changed bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	errs := []error{c.failed}
	c.failed = nil
	if c.held == nil {
		c.held = make(map[netip.Addr]*client)
	}
	for len(c.unused) > 0 && time.Since(c.unused[0].since) > clientLinger {
		errs = append(errs, c.dropOldestLocked())
	}
	if c.uplinks[f], err = c.readUplinksLocked(f); err != nil {
		errs = append(errs, err)
	}
	there := make(map[netip.Addr]bool)
	for _, table := range []int{c.router.opts.ReplyTable, c.router.opts.ReplyTable + 1} {
		have, err := c.routes(f, table)
		if err != nil {
			return changed, errors.Join(append(errs, err)...)
		}
		for _, r := range have {
			if !c.router.isOurRoute(&r) {
				continue
			}
			p := prefixOf(r.Dst, f)
			if k := c.held[p.Addr()]; p.IsSingleIP() && k != nil && c.table(k) == table {
				there[p.Addr()] = true
				continue
			}
			changed = true
			errs = append(errs, c.removeRoute(&r))
		}
	}
	for addr, k := range c.held {
		if service.FamilyOf(addr) == f && !there[addr] {
			changed = true
			errs = append(errs, c.add(addr, k))
		}
	}
	return changed, errors.Join(errs...)
}

// readUplinksLocked returns the interfaces of the default routes, and those that
// resolve no addresses, as tunnels: their routes need no gateway.
func (c *clients) readUplinksLocked(f service.Family) (links []int, err error) {
	routes, err := c.routes(f, syscall.RT_TABLE_MAIN)
	if err != nil {
		return nil, err
	}
	for _, k := range routes {
		if prefixOf(k.Dst, f).Bits() > 0 {
			continue
		}
		links = append(links, k.LinkIndex)
		for _, hop := range k.MultiPath {
			links = append(links, hop.LinkIndex)
		}
	}
	list, err := c.nl.LinkList()
	if err != nil {
		return links, fmt.Errorf("interfaces: %w", err)
	}
	for _, l := range list {
		if a := l.Attrs(); a.RawFlags&syscall.IFF_NOARP != 0 {
			links = append(links, a.Index)
		}
	}
	return links, nil
}

func (c *clients) table(k *client) int {
	if k.behind {
		return c.router.opts.ReplyTable
	}
	return c.router.opts.ReplyTable + 1
}

func (c *clients) route(addr netip.Addr, k *client) *netlink.Route {
	return c.router.route(c.table(k), netip.PrefixFrom(addr, addr.BitLen()), netip.Addr{})
}

// add accepts a route that is there already.
func (c *clients) add(addr netip.Addr, k *client) error {
	r := c.route(addr, k)
	if err := c.nl.RouteAdd(r); err != nil && !errors.Is(err, syscall.EEXIST) {
		return fmt.Errorf("answers to %s: %w", addr, routeError("add", r, err))
	}
	return nil
}
