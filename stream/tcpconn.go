package stream

import (
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/upstream"
)

// tcpConn is a TCP connection.
type tcpConn struct {
	conn
	link relay.Link
}

var (
	_ carrier       = (*tcpConn)(nil)
	_ relay.Patient = (*tcpConn)(nil)
	_ relay.Witness = (*tcpConn)(nil)
)

// newTCPConn returns the conn of an empty TCP connection.
func newTCPConn() *conn {
	t := new(tcpConn)
	t.carrier = t
	return &t.conn
}

func (t *tcpConn) accepted() {
	t.class = sys.ClientClass(int(t.client), t.record.VIP.Addr().Is6())
	if t.record.Port.SendProxy != 0 {
		t.worker.relay.Prepend(&t.link, proxyHeader(&t.record))
	}
}

// connect begins to connect to an endpoint as package upstream decides. The record says
// whose address the endpoint sees.
func (t *tcpConn) connect(st *state, v *policy.Verdict, ep *service.Endpoint) (int, sys.Errno) {
	c := &t.conn
	w, client := c.worker, c.record.Client.Addr()
	if c.record.Via().IsValid() { // whoever writes PROXY headers must not choose the address that endpoints see
		named := *v
		named.Source = policy.SourceNode
		v = &named
	}
	choice := w.server.options.Upstream.Choose(st.host, v, client, ep)
	c.record.Source = choice.Source
	o := sys.ConnectOptions{Congestion: w.server.config.Congestion, Class: t.class}
	if ep.MayReturn {
		o.TTL = redirect.TTLAfter(sys.ClientTTL(int(c.client), c.record.VIP.Addr().Is6()))
	}
	if choice.Kind == upstream.FromClient && t.held == (upstream.Range{}) {
		var errno sys.Errno
		if t.held, errno = w.server.options.Upstream.Hold(client); errno != 0 {
			return -1, errno
		}
	}
	return w.dialer.Connect(&choice, ep.Addr, c.record.Client, t.held, o)
}

func (t *tcpConn) watch() poll.Events { return relay.Watch }

func (t *tcpConn) probe(fd int) sys.Errno { return t.worker.relay.Probe(&t.link, int(t.client), fd) }

func (t *tcpConn) start(endpoint int, reg poll.Registration, ready poll.Events) {
	t.worker.relay.Start(&t.link, relay.Socket{FD: int(t.client)}, relay.Socket{FD: endpoint, Reg: reg, Ready: ready}, t)
}

func (t *tcpConn) detach(m *movedConn) (fds []int, ok bool) {
	link, ok := t.worker.relay.Detach(&t.link)
	m.Link = &link
	return link.FDs(nil), ok
}

func (t *tcpConn) given(*movedConn) { t.worker.relay.Given(&t.link) }

func (t *tcpConn) back(*movedConn) { t.worker.relay.Return(&t.link) }

func (t *tcpConn) attach(m *movedConn) { t.worker.relay.Attach(&t.link, m.Link, t) }

// LinkEnding implements relay.Witness.
func (t *tcpConn) LinkEnding(*relay.Link) { t.worker.shard.Note(&t.record) }

// LinkEnded takes the connection back from the relay, which has closed both sockets.
func (t *tcpConn) LinkEnded(_ *relay.Link, end relay.End) {
	if end == relay.ClientFin {
		t.worker.dialer.Rest()
	}
	t.ended(ends[end])
}

// ends maps the relay's ends to the record's.
var ends = [...]conntrack.End{
	relay.ClientFin:       conntrack.ClientFin,
	relay.ClientReset:     conntrack.ClientReset,
	relay.EndpointFin:     conntrack.EndpointFin,
	relay.EndpointReset:   conntrack.EndpointReset,
	relay.ClientTimeout:   conntrack.ClientTimeout,
	relay.EndpointTimeout: conntrack.EndpointTimeout,
	relay.Idle:            conntrack.Idle,
	relay.Shutdown:        conntrack.Shutdown,
	relay.Limit:           conntrack.LimitReached,
	relay.Released:        conntrack.Rebalanced,
}

func (t *tcpConn) hasAsked() bool {
	n, _ := sys.Unread(int(t.client))
	return n > 0 || t.holds()
}

func (t *tcpConn) holds() bool { return t.worker.relay.Holds(&t.link) }

func (t *tcpConn) drop() { t.worker.relay.Drop(&t.link) }

func (t *tcpConn) release() { t.worker.relay.Release(&t.link) }

func (t *tcpConn) abort() { t.worker.relay.Abort(&t.link, relay.Shutdown) }

func (t *tcpConn) idle(atLeast time.Duration) bool { return t.link.Idle(atLeast) > 0 }

func (t *tcpConn) count(r *conntrack.Record) (first int64) {
	r.BytesFromClient, r.BytesFromEndpoint = t.link.BytesUp(), t.link.BytesDown()
	return t.link.FirstByte
}

// inspect asks the kernel about both sides, or about the client while there is no endpoint.
func (t *tcpConn) inspect(out *conntrack.Transport) {
	if !t.record.Connected {
		out.Client = sideOf(int(t.client))
		out.Idle = out.Client.Idle
		return
	}
	client, endpoint := int(t.client), int(t.upstream)
	if endpoint < 0 { // the relay has both
		client, endpoint = t.link.Descriptors()
	}
	out.Client, out.Endpoint = sideOf(client), sideOf(endpoint)
	out.Idle = min(out.Client.Idle, out.Endpoint.Idle)
}

// sideOf asks the kernel about the peer of a socket.
func sideOf(fd int) conntrack.Side {
	p, e := sys.PeerOf(fd)
	if e != 0 {
		return conntrack.Side{}
	}
	return conntrack.Side{
		Known: conntrack.BySocket, RTT: int64(p.RTT), Idle: int64(p.Silence), Unacked: uint64(p.Unacked), Unsent: uint64(p.Unsent),
		Window: p.Window, Retransmits: p.Retransmits, Unanswered: p.Unanswered,
	}
}

func (t *tcpConn) closed() {
	if t.held != (upstream.Range{}) {
		t.worker.server.options.Upstream.Release(t.record.Client.Addr())
		t.held = upstream.Range{}
	}
}

func (t *tcpConn) clear() { t.link = relay.Link{} }
