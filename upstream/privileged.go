package upstream

import (
	"math/rand/v2"
	"net/netip"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// firstUnprivileged is the first port that takes no privilege to bind. Servers such as
// rsh, and NFS without "insecure", admit only clients with a port below it.
const firstUnprivileged = 1024

// firstOfClients is the first port that clients with privileges use: rsh admits none below
// it. Lower ones are for the node's servers, which cannot bind a port that a socket of ours
// has, unless they set SO_REUSEADDR.
const firstOfClients = 512

// privileged are the ports tried after the client's own, as by the kernel's NAT.
var privileged = Range{600, firstUnprivileged - 1}

// isPrivileged reports whether a client has a privileged port. It chose it on purpose:
// the kernel assigns none by itself.
func isPrivileged(client netip.AddrPort) bool {
	return client.Port() != 0 && client.Port() < firstUnprivileged
}

// connectPrivileged connects as a Choice says, but from a privileged port, the client's
// own first. done is false if no such port can be used.
func (d *Dialer) connectPrivileged(c *Choice, endpoint, client netip.AddrPort, o sys.ConnectOptions) (fd int, e sys.Errno, done bool) {
	from := sys.Unspecified(endpoint.Addr())
	o.Mark = c.Mark
	switch {
	case c.Kind == FromClient:
		return -1, 0, false // replies to its address come back to other ports only
	case c.Kind == Untracked && c.MayReturn:
		return -1, 0, false // needs its mark, which bypasses connection tracking
	case c.Kind == Untracked:
		// As FromNode: replies past connection tracking are recognised by higher ports.
		o.Mark = 0
	case c.Kind == FromOwnClient:
		from = client.Addr()
	}
	port := client.Port()
	for range 1 + portTries {
		if d.rules.allowsPrivileged(port, endpoint) {
			fd, e := d.try(endpoint, netip.AddrPortFrom(from, port), o)
			switch e {
			case sys.EADDRNOTAVAIL, sys.EADDRINUSE:
			case sys.EACCES: // CAP_NET_BIND_SERVICE is missing
				return -1, 0, false
			default:
				return fd, e, true
			}
		}
		port = privileged.First + uint16(rand.IntN(int(privileged.Last-privileged.First)+1))
	}
	return -1, 0, false
}

// allowsPrivileged reports whether a connection to an endpoint may have a privileged port.
// For the endpoint's own port see ToOwn. A packet to a reply port may be taken for a reply
// to a client on another node.
func (r *Rules) allowsPrivileged(port uint16, endpoint netip.AddrPort) bool {
	return port >= firstOfClients && port != endpoint.Port() && !r.reserved.Has(port) && !r.replyRange().has(port)
}
