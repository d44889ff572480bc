package flow

import (
	"net/netip"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/poll"
)

const (
	// sourceAge is how long an address of this node is used for an endpoint before
	// routing is asked again.
	sourceAge = int64(5 * time.Second)
	// maxSources bounds the endpoints whose source address is kept.
	maxSources = 4096
)

// sources finds the address that the kernel would use for packets of this node to an
// endpoint, as its masquerading does. It belongs to the worker.
type sources struct {
	nl    *netlink.Handle
	known map[netip.Addr]source
}

type source struct {
	addr netip.Addr
	at   int64
}

func newSources(namespace int) (*sources, error) {
	nl, err := kernel.Open(namespace, syscall.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	return &sources{nl: nl, known: make(map[netip.Addr]source)}, nil
}

func (s *sources) close() { s.nl.Close() }

// to returns the source for an endpoint, or false if it has no route.
func (s *sources) to(endpoint netip.Addr) (netip.Addr, bool) {
	now := poll.Nanotime()
	if k, ok := s.known[endpoint]; ok && now-k.at < sourceAge {
		return k.addr, k.addr.IsValid()
	}
	k := source{at: now}
	if routes, err := s.nl.RouteGet(endpoint.AsSlice()); err == nil && len(routes) > 0 {
		if a, ok := netip.AddrFromSlice(routes[0].Src); ok && a.Unmap().BitLen() == endpoint.BitLen() {
			k.addr = a.Unmap()
		}
	}
	if len(s.known) >= maxSources {
		clear(s.known)
	}
	s.known[endpoint] = k
	return k.addr, k.addr.IsValid()
}
