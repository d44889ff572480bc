package redirect

import (
	"fmt"
	"net/netip"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Replies says how sockets may be bound to clients' addresses.
type Replies struct {
	// Diverted is false where answers would go past us to the client; then
	// endpoints see the node's address.
	Diverted bool
	// Why says for the log why not; empty where the mode never does it.
	Why string
	// FirstPort and LastPort are the range that the sockets' own ports have to
	// be from; 0 means any.
	FirstPort, LastPort uint16
	// Untracked says that sockets on this node's own addresses pass connection
	// tracking by as well, if they are transparent and have Mark. Their ports are
	// those that the kernel chooses by itself, or above: see [NodePorts].
	Untracked bool
	// WhyTracked says for the log why not, where the mode can do it.
	WhyTracked string
	// Mark is what packets of these sockets must be marked with.
	Mark uint32
	// Tracking reports whether there is any connection tracking to pass by; nil if
	// nobody knows.
	Tracking *Tracking
	// Clients has to be asked for the ports of each socket that is bound to a
	// client's address; nil where all answers always come back.
	Clients Clients
}

// Clients are the addresses that sockets of ours are bound to. It is safe for
// concurrent use.
type Clients interface {
	// Hold is called before a socket connects from a client's address, and gives
	// the first and the last port that it may have. On an error no answer would
	// come back to it.
	Hold(client netip.Addr) (ports [2]uint16, err error)
	// Release is called once after that socket was closed.
	Release(client netip.Addr)
	// Held returns the addresses to which answers come back now.
	Held() []netip.Addr
	// Expect is Hold for sockets of another process, whose Held returned the addresses.
	// It comes before the first Apply, which must not interrupt the answers.
	Expect(held []netip.Addr) error
}

// ReplyPorts are the first and the last of the ports that sockets with clients'
// addresses have where netfilter marks the answers to them (F7), unless options
// say others. Clients do not take them by themselves: Linux gives them 32768 to
// 60999, node ports are 30000 to 32767. If one of our sockets had the port of a
// connection that the client made to the same endpoint directly, the client
// would get nothing any more: the kernel forwards no packet for which it finds a
// socket, whatever the rules say.
var ReplyPorts = [2]uint16{10000, 29999}

// NodePorts are the first and the last of the ports that sockets on the node's own
// addresses may have: those that the kernel chooses by itself in a network
// namespace, and those above, which package upstream takes when these run out.
func NodePorts(netns int) [2]uint16 {
	ports := [2]uint16{32768, 65535}
	_ = sys.InNetNS(netns, func() error {
		if first, _, err := sys.LocalPortRange(); err == nil {
			ports[0] = first
		}
		return nil
	})
	return ports
}

// CheckReplyPorts returns why the first and the last of a range of ports cannot
// be that of sockets with clients' addresses, or nil.
func CheckReplyPorts(ports [2]uint16) error {
	if ports[0] == 0 || ports[0] > ports[1] || ports[1] == 65535 {
		return fmt.Errorf("ports %d to %d for sockets with clients' addresses: want a range within 1 to 65534", ports[0], ports[1])
	}
	return nil
}
