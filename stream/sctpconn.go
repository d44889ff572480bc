package stream

import (
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/message"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// sctpConn is an SCTP association.
type sctpConn struct {
	conn
	link message.Link
	asks sys.SCTPStatus // the client's association
	gets sys.SCTPStatus // the endpoint's
}

var _ carrier = (*sctpConn)(nil)

// newSCTPConn returns the conn of an empty SCTP association.
func newSCTPConn() *conn {
	a := new(sctpConn)
	a.carrier = a
	return &a.conn
}

func (a *sctpConn) accepted() {
	a.asks, _ = sys.SCTPStatusOf(int(a.client)) // on an error the client is gone; the relay finds out
	a.record.StreamsFromClient, a.record.StreamsToClient = a.asks.In, a.asks.Out
}

// firstInit is the time until the kernel sends an INIT again. The dial plan's first
// patience is as long.
const firstInit = 250 * time.Millisecond

// connect asks the endpoint for the client's numbers of streams. The endpoint sees the
// node's address: no kernel connects SCTP from another one. An endpoint whose address may
// be a Service's is not tried, as SCTP's packets say nothing by which the association
// could be known when it comes back.
func (a *sctpConn) connect(_ *state, _ *policy.Verdict, ep *service.Endpoint) (int, sys.Errno) {
	a.record.Source = policy.SourceNode
	if ep.MayReturn {
		return -1, sys.EHOSTUNREACH
	}
	o := a.worker.server.config.sctpOptions()
	o.OutStreams, o.InStreams = a.asks.In, a.asks.Out
	o.InitTimeout = firstInit
	return a.worker.dialer.ConnectSCTP(ep.Addr, o)
}

func (a *sctpConn) watch() poll.Events { return poll.Writable }

func (a *sctpConn) probe(fd int) (e sys.Errno) {
	a.gets, e = sys.SCTPConnected(fd)
	return e
}

func (a *sctpConn) start(endpoint int, reg poll.Registration, _ poll.Events) {
	sys.SetInitTimeout(endpoint, sys.DefaultInitTimeout)
	a.worker.messages.Start(&a.link, message.Socket{FD: int(a.client), Streams: a.asks.Out}, message.Socket{FD: endpoint, Reg: reg, Streams: a.gets.Out}, a)
}

func (a *sctpConn) detach(m *movedConn) (fds []int, ok bool) {
	link, ok := a.worker.messages.Detach(&a.link)
	m.Messages = &link
	return link.FDs(nil), ok
}

func (a *sctpConn) given(m *movedConn) { a.worker.messages.Given(&a.link, m.Messages) }

func (a *sctpConn) back(m *movedConn) { a.worker.messages.Return(&a.link, m.Messages) }

func (a *sctpConn) attach(m *movedConn) { a.worker.messages.Attach(&a.link, m.Messages, a) }

// LinkEnded takes the association back from the relay, which has closed both sockets.
func (a *sctpConn) LinkEnded(end message.End) { a.ended(messageEnds[end]) }

// messageEnds maps the relay's ends to the record's.
var messageEnds = [...]conntrack.End{
	message.ClientShutdown:   conntrack.ClientShutdown,
	message.ClientAbort:      conntrack.ClientAbort,
	message.ClientLost:       conntrack.ClientLost,
	message.EndpointShutdown: conntrack.EndpointShutdown,
	message.EndpointAbort:    conntrack.EndpointAbort,
	message.EndpointLost:     conntrack.EndpointLost,
	message.TooLarge:         conntrack.MessageTooLarge,
	message.NoStream:         conntrack.NoStream,
	message.Idle:             conntrack.Idle,
	message.Shutdown:         conntrack.Shutdown,
	message.Limit:            conntrack.LimitReached,
}

func (a *sctpConn) holds() bool { return false }

func (a *sctpConn) hasAsked() bool { return false } // an association has no halves

func (a *sctpConn) drop() {}

func (a *sctpConn) abort() { a.worker.messages.Abort(&a.link, message.Shutdown) }

func (a *sctpConn) idle(time.Duration) bool { return false } // only TCP is rebalanced

func (a *sctpConn) release() { a.abort() }

func (a *sctpConn) count(r *conntrack.Record) (first int64) {
	r.DatagramsFromClient, r.BytesFromClient = a.link.FromClient()
	r.DatagramsFromEndpoint, r.BytesFromEndpoint = a.link.FromEndpoint()
	return a.link.FirstMessage()
}

func (a *sctpConn) inspect(t *conntrack.Transport) {
	t.Idle = max(poll.Nanotime()-max(a.link.Moved(), a.record.Start), 0)
}

func (a *sctpConn) closed() {}

func (a *sctpConn) clear() {
	a.link, a.asks, a.gets = message.Link{}, sys.SCTPStatus{}, sys.SCTPStatus{}
}
