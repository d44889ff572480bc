package upstream

import (
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// sourceLife is how long the address that the kernel sends to an endpoint from is
// remembered, and mostSources for how many endpoints.
const (
	sourceLife  = int64(time.Second)
	mostSources = 4096
)

// sources remembers from which of the node's addresses the kernel sends to endpoints.
type sources struct {
	known map[netip.Addr]netip.Addr
	until int64
}

// of returns the address for an endpoint.
func (s *sources) of(endpoint netip.AddrPort, now int64) (netip.Addr, sys.Errno) {
	if now >= s.until || len(s.known) >= mostSources {
		clear(s.known)
		s.until = now + sourceLife
	}
	if a, is := s.known[endpoint.Addr()]; is {
		return a, 0
	}
	a, e := sys.SourceOf(endpoint)
	if e == 0 {
		if s.known == nil {
			s.known = make(map[netip.Addr]netip.Addr)
		}
		s.known[endpoint.Addr()] = a
	}
	return a, e
}

// ConnectSCTP begins to connect to an endpoint from the node's address that the route
// there has. A socket without an address would tell the endpoint all of the node's, and
// the endpoint might answer to one from which the node cannot be reached.
func (d *Dialer) ConnectSCTP(endpoint netip.AddrPort, o sys.SCTPOptions) (int, sys.Errno) {
	local, e := d.sources.of(endpoint, d.now())
	if e != 0 {
		return -1, e
	}
	return sys.ConnectSCTP(endpoint, local, o)
}
