// Package upstream decides how sockets to endpoints are made: whose address the
// endpoint sees, which local port the socket has, and what keeps its packets from
// being steered and from connection tracking. Both data paths use it.
//
//	rules := upstream.New(redirector.Traits(), sameLink, log)
//	choice := rules.Choose(addresses, &verdict, client, endpoint)
//	if choice.Kind == upstream.FromClient {
//		ports, errno = rules.Hold(client) // and Release, once the socket is closed
//	}
//	fd, errno = dialer.Connect(&choice, endpoint.Addr, clientAndPort, ports, options) // TCP
//	errno = rules.ConnectUDP(fd, &choice, endpoint.Addr, client, ports)               // UDP
//
// # Whose address
//
// The endpoint sees the client's address where policy wants it (A3.8, A3.9) and replies
// to it come back to this node (F7, F11), else the node's. A socket with the client's
// address does not fall back to the node's if it finds no port: the endpoint admits and
// logs clients by their address.
//
// # Privileged ports
//
// Some servers admit only clients with a port below 1024. Where the endpoint sees the node's
// address, a TCP client with such a port gets one, its own if possible.
//
// # Connection tracking
//
// Sockets with the node's address are transparent and marked where that keeps the kernel
// from tracking their packets. Those with a privileged port are tracked: steering recognises
// replies past connection tracking by higher ports.
//
// # Goroutines
//
// [Rules] are safe for concurrent use. A [Dialer] belongs to one event loop.
package upstream

import (
	"net/netip"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// Rules hold what choices depend on beside the connection. They never change.
type Rules struct {
	replies  redirect.Replies
	pastMark uint32
	sameLink func(client, endpoint netip.Addr) bool

	kernel      Range        // local ports that the kernel assigns by itself
	spare       Range        // local ports for when those run out
	reserved    *sys.PortSet // local ports that are never used
	kernelPorts []uint16     // kernel without reserved
	replyPorts  []uint16     // ports that replies to clients' addresses come back to; none if any will do
}

// New returns the rules for a steering mode. sameLink reports whether replies from an
// endpoint reach a client without passing this node; nil means that none do. It is
// called on event loops, and must be quick. The local ports are those of the calling
// thread's network namespace.
func New(traits redirect.Traits, sameLink func(client, endpoint netip.Addr) bool, log zerolog.Logger) *Rules {
	r := &Rules{replies: traits.Replies, pastMark: traits.PastMark, sameLink: sameLink, kernel: kernelPorts(), reserved: sys.ReservedPorts()}
	r.spare = r.kernel.spare()
	r.kernelPorts = r.reserved.Without(r.kernel.First, r.kernel.Last)
	if replies := r.replyRange(); replies.Last != 0 {
		r.replyPorts = r.reserved.Without(replies.First, replies.Last)
		if r.spare.overlaps(replies) {
			// A packet to such a port may be taken for a reply to a client on
			// another node too.
			r.spare = r.kernel.upperEighth()
		}
	}
	if why := r.replies.WhyTracked; why != "" {
		log.Warn().Str("object", "connection tracking").Msg("connections from the node's address to endpoints do not pass connection tracking: " + why)
	}
	if !r.replies.Diverted {
		text := "mode " + traits.Name +
			" brings no replies to clients' addresses back: endpoints see the node's address, also where Kubernetes lets them see the client's (source=node in the access log)"
		if r.replies.Why != "" {
			text += "; " + r.replies.Why
		}
		log.Warn().Str("object", "clients' addresses").Msg(text)
	}
	return r
}

func (r *Rules) replyRange() Range { return Range{r.replies.FirstPort, r.replies.LastPort} }

// Kind is how a socket is made.
type Kind uint8

// The kinds.
const (
	// FromNode has an address of the node that the kernel chooses.
	FromNode Kind = iota
	// Untracked is FromNode past connection tracking: transparent, and with a mark. Where
	// connections are kept in connection tracking, the mark only exempts them from steering.
	Untracked
	// ToOwn is FromNode to an endpoint at an address of this node whose port the
	// kernel could choose. While nothing listens there, TCP would connect the
	// socket to itself (simultaneous open), and UDP would send to itself.
	ToOwn
	// FromOwnClient has the client's address, which is the node's own: replies come
	// to this node anyway.
	FromOwnClient
	// FromClient has the client's address (F7). Replies come back to certain ports
	// only, where Hold or redirect.Replies say so.
	FromClient
)

// Choice says how the socket to one endpoint is made.
type Choice struct {
	Source policy.Source // whose address the endpoint sees
	Kind   Kind
	Mark   uint32 // of the socket's packets; 0: none
	// MayReturn is the endpoint's: Mark also exempts the packets from steering.
	MayReturn bool
}

// IsBound reports whether the socket is bound to an address, so that it cannot be
// connected again.
func (c *Choice) IsBound() bool { return c.Kind >= ToOwn }

// Choose decides how the socket from a client to an endpoint is made. own are the
// addresses of this node.
func (r *Rules) Choose(own hostnet.Addresses, v *policy.Verdict, client netip.Addr, ep *service.Endpoint) Choice {
	endpoint := ep.Addr.Addr()
	ownEndpoint := own.Has(endpoint) || endpoint.IsLoopback()
	c := Choice{MayReturn: ep.MayReturn}
	if ep.MayReturn {
		c.Mark = r.pastMark
	}
	if v.SourceFor(client, endpoint) == policy.SourceClient && r.repliesPass(client, endpoint, ownEndpoint) {
		c.Source = policy.SourceClient
		switch {
		case !own.Has(client):
			c.Kind = FromClient
		case ep.MayReturn && r.passesTracking(ep):
			// It may get another address of the node, but it is not steered.
			c.Kind, c.Mark = Untracked, r.replies.Mark
		default:
			c.Kind = FromOwnClient
		}
		return c
	}
	switch {
	case ownEndpoint && r.kernel.has(ep.Addr.Port()):
		c.Kind = ToOwn
	case !ownEndpoint && r.passesTracking(ep):
		c.Kind, c.Mark = Untracked, r.replies.Mark
	}
	return c
}

// repliesPass reports whether an endpoint's replies to the client's address come to
// this node. Those of an endpoint that has an address of this node come from no
// interface, and an endpoint on the client's own link replies to it directly, such as
// pods on one bridge. A link-local address means nothing without its interface.
// A client that a PROXY header names may be of the other family.
func (r *Rules) repliesPass(client, endpoint netip.Addr, ownEndpoint bool) bool {
	return r.replies.Diverted && !ownEndpoint && !client.IsLinkLocalUnicast() && client.Is4() == endpoint.Is4() &&
		(r.sameLink == nil || !r.sameLink(client, endpoint))
}

// passesTracking reports whether a socket on this node's address passes connection
// tracking when it connects to an endpoint that is not on this node's own addresses. It
// does to one in the cluster: packets to others may have to be translated on their way.
// Such a socket costs more than another, and is useless where nothing is tracked, or
// everything must be. It is needed to an endpoint that has a Service's address: its packets are not
// steered.
func (r *Rules) passesTracking(ep *service.Endpoint) bool {
	return r.replies.Untracked &&
		(ep.MayReturn || ep.InCluster() && (r.replies.Tracking == nil || r.replies.Tracking.Bypassed()))
}

// Hold has replies to a client's address come back, for one socket, where the way of
// steering has to be told. It returns the ports that the socket may have; the zero Range
// if that is not needed. Otherwise Release must follow.
func (r *Rules) Hold(client netip.Addr) (Range, sys.Errno) {
	if r.replies.Clients == nil {
		return Range{}, 0
	}
	ports, err := r.replies.Clients.Hold(client)
	if err != nil {
		return Range{}, sys.EADDRNOTAVAIL // the next verification of the steering says why
	}
	return Range{ports[0], ports[1]}, 0
}

// Release undoes Hold, after the socket was closed.
func (r *Rules) Release(client netip.Addr) { r.replies.Clients.Release(client) }
