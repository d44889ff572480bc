package bypass

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rs/zerolog"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/once"
)

const (
	// routesBuffer is how many bytes of changes the kernel keeps while routes are listed.
	routesBuffer = 8 << 20
	// Routes are listed again after a pause, which grows while that is in vain.
	routesPause, routesPauseMost = time.Second, time.Minute
)

// routes knows the interfaces that routes with an MTU of their own lead to. The IP stack heeds
// such an MTU when it forwards, bpf_fib_lookup only one that is locked. There may be very many
// routes: it lists them once, keeps those that have an MTU, and follows the changes.
type routes struct {
	namespace int
	buffer    int // bytes
	nl        *netlink.Handle
	log       zerolog.Logger
	trouble   once.Trouble
	done      chan struct{}
	running   sync.WaitGroup
	changed   chan struct{} // has an element while take would return something
	stale     chan struct{} // the kernel has removed routes and not said so

	mu    sync.Mutex
	known bool // all routes are; before, any interface may be one of those
	all   bool // known has changed, or what concerns any interface
	hops  map[routeKey][]nextHop
	mtus  map[int]map[int]int // by interface and MTU, so many next hops
	moved map[int]bool        // interfaces whose least MTU has changed
	seen  map[int]bool        // interfaces that were there
	down  map[int]bool        // interfaces that were down when hops led there
}

// routeKey identifies a route: a route with the same key replaces it.
type routeKey struct {
	to                   netip.Prefix
	table, tos, priority int
}

// nextHop is where a route with an MTU leads to.
type nextHop struct {
	link    int // 0 if the kernel names only a nexthop object: any interface
	gateway netip.Addr
	mtu     int
}

// openRoutes begins to follow the routes of a network namespace.
func openRoutes(namespace, buffer int, log zerolog.Logger) (*routes, error) {
	r := &routes{namespace: namespace, buffer: buffer, log: log, done: make(chan struct{}), changed: make(chan struct{}, 1), stale: make(chan struct{}, 1)}
	r.reset()
	var err error
	if r.nl, err = kernel.Open(namespace, syscall.NETLINK_ROUTE); err != nil {
		return nil, err
	}
	r.running.Go(r.run)
	return r, nil
}

func (r *routes) close() {
	close(r.done)
	r.running.Wait()
	r.nl.Close()
}

func (r *routes) ended() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

var errStale = errors.New("an interface was down")

// run lists the routes again whenever changes may have been missed. Until they are known, no
// packet takes a shortcut.
func (r *routes) run() {
	for pause := routesPause; ; pause = min(2*pause, routesPauseMost) {
		began := time.Now()
		err := r.follow()
		if r.ended() {
			return
		}
		r.reset()
		if !errors.Is(err, errStale) && r.trouble.New(err.Error()) {
			r.log.Warn().Err(err).Msg("kernel flows: packets pass the node's IP stack until its routes are known again")
		}
		if time.Since(began) > routesPauseMost {
			pause = routesPause
		}
		select {
		case <-r.done:
			return
		case <-time.After(pause):
		}
	}
}

// follow lists all routes and applies changes until the kernel drops some, or until close.
func (r *routes) follow() error {
	updates, end, failed := make(chan netlink.RouteUpdate), make(chan struct{}), make(chan error, 1)
	o := netlink.RouteSubscribeOptions{
		ReceiveBufferSize: r.buffer, ReceiveBufferForceSize: true,
		ErrorCallback: func(err error) {
			select {
			case failed <- err:
			default:
			}
		},
	}
	if r.namespace != 0 {
		h := netns.NsHandle(r.namespace)
		o.Namespace = &h
	}
	if err := netlink.RouteSubscribeWithOptions(updates, end, o); err != nil {
		return fmt.Errorf("changes of routes: %w", err)
	}
	defer func() {
		close(end)
		for range updates { // the library's goroutine has to see the end
		}
	}()
	// Not by the subscription (ListExisting): that does not say when the list ends, and what it
	// lists may be older than a change that came before. The changes wait meanwhile.
	if err := r.list(); err != nil {
		return fmt.Errorf("routes: %w", err)
	}
	r.trouble.Over()
	r.setKnown()
	for {
		select {
		case <-r.done:
			return nil
		case <-r.stale:
			return errStale
		case err := <-failed:
			return fmt.Errorf("changes of routes: %w", err)
		case u, open := <-updates:
			if !open {
				return errors.Join(errors.New("changes of routes ended"), <-failed)
			}
			r.apply(u.Type == syscall.RTM_DELROUTE, u.NlFlags&syscall.NLM_F_REPLACE != 0, &u.Route)
		}
	}
}

// list reads all routes of all tables.
func (r *routes) list() error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		err := r.nl.RouteListFilteredIter(family, &netlink.Route{Table: syscall.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE, func(route netlink.Route) bool {
			r.apply(false, false, &route)
			return !r.ended()
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// reset forgets all routes.
func (r *routes) reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known, r.all = false, true
	r.hops, r.mtus, r.moved = make(map[routeKey][]nextHop), make(map[int]map[int]int), make(map[int]bool)
	r.seen, r.down = make(map[int]bool), make(map[int]bool)
	r.signal()
}

func (r *routes) setKnown() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known, r.all = true, true
	r.signal()
}

func (r *routes) signal() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// apply follows one change. A route that is added takes nothing from those that are there
// (append, prepend); one that replaces another does.
func (r *routes) apply(gone, replaces bool, route *netlink.Route) {
	if route.Type != syscall.RTN_UNICAST || route.Dst == nil {
		return
	}
	own := route.MTU > 0 && !route.MTULock // bpf_fib_lookup heeds it then
	r.mu.Lock()
	defer r.mu.Unlock()
	if !own && len(r.hops) == 0 {
		return
	}
	to, _ := netip.AddrFromSlice(route.Dst.IP)
	bits, _ := route.Dst.Mask.Size()
	key := routeKey{to: netip.PrefixFrom(to, bits), table: route.Table, tos: route.Tos, priority: route.Priority}
	hops := hopsOf(route)
	switch {
	case gone:
		r.remove(key, func(was nextHop) bool { return slices.ContainsFunc(hops, was.leadsAs) })
		return
	case replaces:
		r.remove(key, func(nextHop) bool { return true })
	}
	if !own {
		return
	}
	for _, h := range hops {
		if i := slices.IndexFunc(r.hops[key], h.leadsAs); i >= 0 { // as with another metric
			h.mtu = min(h.mtu, r.hops[key][i].mtu)
			r.remove(key, h.leadsAs)
		}
		r.hops[key] = append(r.hops[key], h)
		r.count(h, 1)
	}
	r.signalMoved()
}

// hopsOf returns where a route leads to.
func hopsOf(route *netlink.Route) []nextHop {
	hop := func(link int, gateway net.IP, via netlink.Destination) nextHop {
		if v, is := via.(*netlink.Via); is {
			gateway = v.Addr
		}
		a, _ := netip.AddrFromSlice(gateway)
		return nextHop{link: link, gateway: a, mtu: route.MTU}
	}
	if len(route.MultiPath) == 0 {
		return []nextHop{hop(route.LinkIndex, route.Gw, route.Via)}
	}
	hops := make([]nextHop, 0, len(route.MultiPath))
	for _, each := range route.MultiPath {
		hops = append(hops, hop(each.LinkIndex, each.Gw, each.Via))
	}
	return hops
}

// leadsAs reports whether two next hops are the same way.
func (h nextHop) leadsAs(other nextHop) bool {
	return h.link == other.link && h.gateway == other.gateway
}

// remove forgets next hops of a route.
func (r *routes) remove(key routeKey, which func(nextHop) bool) {
	kept := slices.DeleteFunc(r.hops[key], func(h nextHop) bool {
		if !which(h) {
			return false
		}
		r.count(h, -1)
		return true
	})
	if len(kept) == 0 {
		delete(r.hops, key)
	} else {
		r.hops[key] = kept
	}
	r.signalMoved()
}

// count counts a next hop, and notes whether that changes the least MTU of its interface.
func (r *routes) count(h nextHop, n int) {
	was := r.least(h.link)
	of := r.mtus[h.link]
	if of == nil {
		of = make(map[int]int)
		r.mtus[h.link] = of
	}
	if of[h.mtu] += n; of[h.mtu] == 0 {
		delete(of, h.mtu)
	}
	if len(of) == 0 {
		delete(r.mtus, h.link)
	}
	if r.least(h.link) != was {
		r.moved[h.link] = true
		r.all = r.all || h.link == 0
	}
}

// least returns the smallest MTU of routes to an interface, or 0 if none has one.
func (r *routes) least(link int) (least int) {
	for mtu := range r.mtus[link] {
		if least == 0 || mtu < least {
			least = mtu
		}
	}
	return least
}

func (r *routes) signalMoved() {
	if len(r.moved) > 0 {
		r.signal()
	}
}

// take returns the interfaces whose routes have changed since its last call.
func (r *routes) take() func(index int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	all, moved := r.all, r.moved
	r.all, r.moved = false, make(map[int]bool)
	return func(index int) bool { return all || moved[index] }
}

// limit removes the way into an interface if a route there allows a smaller MTU than the
// interface.
func (r *routes) limit(a *netlink.LinkAttrs, ways Way) Way {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, link := range []int{0, a.Index} {
		if least := r.least(link); !r.known || least != 0 && least < a.MTU {
			return ways &^ Into
		}
	}
	return ways
}

// look takes all interfaces. The kernel does not say that IPv4 routes are gone with their
// interface, or while it was down.
func (r *routes) look(list []netlink.Link) {
	r.mu.Lock()
	defer r.mu.Unlock()
	there := make(map[int]bool, len(list))
	for _, l := range list {
		a := l.Attrs()
		there[a.Index] = true
		switch up := a.Flags&net.FlagUp != 0; {
		case !up && r.least(a.Index) != 0:
			r.down[a.Index] = true
		case up && r.down[a.Index]:
			delete(r.down, a.Index)
			select {
			case r.stale <- struct{}{}:
			default:
			}
		}
	}
	for index := range r.seen { // others may be newer than the list
		if there[index] {
			continue
		}
		delete(r.down, index)
		if r.least(index) == 0 {
			continue
		}
		for key := range r.hops {
			r.remove(key, func(h nextHop) bool { return h.link == index })
		}
	}
	r.seen = there
}
