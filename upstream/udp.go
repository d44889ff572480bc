package upstream

import (
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// udpTries is how many ports are tried that may be taken.
const udpTries = 64

// ConnectUDP connects a UDP socket to an endpoint as a Choice says. The socket's mark
// and transparency are up to the caller. held is what Hold returned. EADDRNOTAVAIL means
// that no local port is free.
func (r *Rules) ConnectUDP(fd int, c *Choice, endpoint netip.AddrPort, client netip.Addr, held Range) sys.Errno {
	switch c.Kind {
	case ToOwn:
		return connectUDPFrom(fd, endpoint, sys.Unspecified(endpoint.Addr()), r.kernelPorts)
	case FromOwnClient:
		return sys.ConnectUDP(fd, endpoint, netip.AddrPortFrom(client, 0))
	case FromClient:
		ports := r.repliesWithin(held)
		if len(ports) == 0 {
			return sys.ConnectUDP(fd, endpoint, netip.AddrPortFrom(client, 0))
		}
		return connectUDPFrom(fd, endpoint, client, ports)
	}
	return sys.ConnectUDP(fd, endpoint, netip.AddrPort{})
}

// connectUDPFrom connects a socket from one of some ports, but not from the endpoint's
// own.
func connectUDPFrom(fd int, endpoint netip.AddrPort, local netip.Addr, from []uint16) sys.Errno {
	for range min(udpTries, len(from)) {
		port := from[rand.IntN(len(from))]
		if port == endpoint.Port() {
			continue
		}
		if errno := sys.ConnectUDP(fd, endpoint, netip.AddrPortFrom(local, port)); errno != sys.EADDRINUSE {
			return errno
		}
	}
	return sys.EADDRNOTAVAIL
}

// repliesWithin returns the reply ports in a range; all of them for the zero Range.
func (r *Rules) repliesWithin(held Range) []uint16 {
	if held == (Range{}) {
		return r.replyPorts
	}
	from, _ := slices.BinarySearch(r.replyPorts, held.First)
	to, found := slices.BinarySearch(r.replyPorts, held.Last)
	if found {
		to++
	}
	return r.replyPorts[from:to]
}
