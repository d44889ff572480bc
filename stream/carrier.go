package stream

import (
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// carrier is what TCP and SCTP do differently with one connection. It contains the conn,
// so that a connection is one piece of memory.
type carrier interface {
	// accepted notes what the client's socket says, once the connection is admitted.
	accepted()
	// connect begins to connect to an endpoint. The record says whose address it sees.
	connect(st *state, v *policy.Verdict, ep *service.Endpoint) (int, sys.Errno)
	// watch are the events to wait for while a socket is connecting.
	watch() poll.Events
	// probe returns 0 if the socket is connected, EAGAIN while it is connecting, or
	// else why it failed.
	probe(fd int) sys.Errno
	// start hands both sockets to the relay. conn.ended follows at the end.
	start(endpoint int, reg poll.Registration, ready poll.Events)
	// detach takes a started connection out of its loop, so that another process can have it,
	// and returns its descriptors; false if it stays. It says in m what the other one needs.
	detach(m *movedConn) (fds []int, ok bool)
	// given closes the descriptors of a detached connection that another process has.
	given(m *movedConn)
	// back undoes detach.
	back(m *movedConn)
	// attach starts a connection that another process has detached.
	attach(m *movedConn)
	// holds reports whether what the client has sent was read, and no endpoint has it.
	holds() bool
	// hasAsked reports whether the client has sent bytes that no endpoint has.
	hasAsked() bool
	// drop forgets what probe has read, for a connection without an endpoint.
	drop()
	// abort ends a started connection at once.
	abort()
	// idle reports whether nothing has moved in a started connection for a time, and nothing
	// is under way.
	idle(atLeast time.Duration) bool
	// release ends an idle connection in order, on both sides.
	release()
	// count sets what the record says of what was forwarded, and returns the time of
	// the endpoint's first byte or message, or 0.
	count(r *conntrack.Record) (first int64)
	// inspect says what the transport knows.
	inspect(t *conntrack.Transport)
	// closed gives back what connect took, once the sockets are closed.
	closed()
	// clear empties the carrier for another connection. Its conn is cleared next.
	clear()
}
