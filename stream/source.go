package stream

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// connect begins to connect to an endpoint, from the client's own address where
// the verdict wants it (A3.8, A3.9) and the answers come back (F7, F11). The
// record says which it is.
//
// An attempt that finds no port free at the client's address fails as our own
// trouble and is repeated; it does not fall back to the node's address: who
// may come in at the endpoint, and what it writes down, hangs on the address.
func (c *conn) connect(st *state, v *policy.Verdict, ep *service.Endpoint) (int, sys.Errno) {
	w, endpoint := c.worker, ep.Addr
	o := sys.ConnectOptions{Congestion: w.server.config.Congestion, Class: c.class}
	client := c.record.Client.Addr()
	traits := &w.server.traits
	if ep.MayReturn {
		o.TTL, o.Mark = redirect.TTLAfter(sys.ClientTTL(c.client, c.record.VIP.Addr().Is6())), traits.PastMark
	}
	if v.SourceFor(client, endpoint.Addr()) != policy.SourceClient || !w.server.keeps(st, client, endpoint.Addr()) {
		c.record.Source = conntrack.SourceNode
		if st.host.Has(endpoint.Addr()) {
			return w.relay.ConnectOwn(endpoint, o)
		}
		if traits.Replies.PassTracking(ep, false) {
			return w.relay.ConnectUntracked(endpoint, traits.Replies.Mark, o)
		}
		return w.relay.Connect(endpoint, netip.AddrPort{}, o)
	}
	c.record.Source = conntrack.SourceClient
	if st.host.Has(client) {
		if ep.MayReturn && traits.Replies.PassTracking(ep, false) {
			// From another address of the node, perhaps; this one is steered.
			return w.relay.ConnectUntracked(endpoint, traits.Replies.Mark, o)
		}
		// Its answers come to this node by themselves.
		return w.relay.Connect(endpoint, netip.AddrPortFrom(client, 0), o)
	}
	if clients := w.server.traits.Replies.Clients; clients != nil && c.held == [2]uint16{} {
		var err error
		if c.held, err = clients.Hold(client); err != nil {
			return -1, sys.EADDRNOTAVAIL // the next look at the steering says why
		}
	}
	return w.relay.ConnectAs(endpoint, client, c.held, o)
}

// releaseClient is for a connection whose sockets are closed.
func (c *conn) releaseClient() {
	if c.held != [2]uint16{} {
		c.held = [2]uint16{}
		c.worker.server.traits.Replies.Clients.Release(c.record.Client.Addr())
	}
}

// keeps tells whether an endpoint can be shown a client's address. The answers
// of one that has an address of this node would go past us, as they come from no
// interface, and so would those of one on the client's own link: pods on one
// bridge answer each other directly. A link-local address says nothing without
// its interface.
func (s *Server) keeps(st *state, client, endpoint netip.Addr) bool {
	return s.traits.Replies.Diverted && !st.host.Has(endpoint) && !client.IsLinkLocalUnicast() &&
		(s.sameLink == nil || !s.sameLink(client, endpoint))
}
