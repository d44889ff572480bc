// Package datagram serves UDP: it receives the datagrams that clients send to Services,
// keeps a session for each pair of client socket and destination, and forwards datagrams
// both ways. It is the data path for UDP, as package stream is for TCP.
//
//	s := datagram.New(datagram.Options{Config: config, Loops: loops, Table: table, Traits: redirector.Traits(), Upstream: rules})
//	target, err := s.Listen(opening) // steer the destination there
//	err = s.Bind(opening)            // or bind sockets to the destination itself
//	s.Apply(policy, addresses, false)
//	s.Prune()
//	err = s.Stop(ctx)
//
// # What happens to a datagram
//
// Steering delivers a client's datagrams to the service port's listening sockets: one for
// each event loop, all on one port of a loopback address (SO_REUSEPORT), so that a client's
// datagrams always reach the same loop. Each datagram carries its original destination. The
// loop's [worker] looks up the session. For a new session, policy and balancer choose an
// endpoint, and a socket is connected to it for this session only: the kernel reports when
// nothing listens there, the endpoint may see the client's own address, and a reply needs
// no lookup. Replies leave by a reply socket, from the destination that the client sent to.
//
// Datagrams are received and sent in batches; consecutive ones of one size travel through
// the kernel as one GSO batch (UDP_GRO, UDP_SEGMENT). Order within a session is kept, and
// no datagram is truncated.
//
// # The life of a session
//
// A session ends after Config.Timeout without a datagram. Once it has been used both ways
// for two seconds, it is a stream and ends after Config.StreamTimeout, as in the kernel's
// connection tracking (A8.8). Until then the client socket keeps its endpoint (A8.9). A
// session is cut as soon as its endpoint does not serve any more, and the client's next
// datagram goes to another endpoint (A8.2 to A8.6).
//
// Until an endpoint has answered, the session keeps copies of the datagrams that were sent
// to it, for a second and within bounds. If the endpoint turns out to be closed, another
// one gets them: a dead endpoint costs a client no datagram.
//
// Only the endpoint's own address may say that it is closed (ICMP port unreachable). Once
// the endpoint has answered, its first refusal is not trusted either, because anyone who
// guesses the socket's port can forge one. From then on copies are kept, and a refusal that
// quotes one of them ends the session. The copies begin the next one.
//
// # Limits
//
// The number of sessions is bounded, in all and for each Service. At the bound of all, a
// new session replaces the oldest answered session, else the oldest, of a namespace that
// has more than its part, and there of a Service that has more than its part of the
// namespace's: a flood evicts its own sessions. The time that beginning sessions for a
// service may take from others is bounded too ([allowance]).
//
// # Goroutines
//
// [Server]'s methods belong to one goroutine, except Stats. Everything else runs on the
// event loops.
package datagram

import (
	"net/netip"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/upstream"
)

// Config holds limits and timeouts. Zero values are not defaults; the caller sets
// all fields.
type Config struct {
	// MaxSessions bounds all sessions. Each has a descriptor. An eighth as many
	// sockets are kept for reuse.
	MaxSessions int
	// MaxServiceSessions bounds the sessions of one Service with all of its ports.
	MaxServiceSessions int
	// CountForwarded has sessions that the kernel forwards count, too (Server.Places).
	CountForwarded bool
	// MaxListeners bounds the service ports of each family that have listening
	// sockets of their own. The others share one listening socket on each loop.
	MaxListeners int

	// Timeout ends a session without a datagram; StreamTimeout ends one that was
	// used in both directions for a while. The annotation sluice.dev/udp-timeout
	// overrides both.
	Timeout       time.Duration
	StreamTimeout time.Duration

	// Balancer holds the default options of service ports' balancers.
	Balancer balancer.Options

	// Log selects the sessions that leave a record in the access log.
	Log Logging
}

// Logging selects the sessions that leave a record in the access log; all of them if
// empty.
type Logging string

// The values of Logging.
const (
	LogAll Logging = "all"
	// LogSampled selects one session in sampleEvery, and each session that met a
	// failed endpoint or did not end by its timeout.
	LogSampled Logging = "sampled"
	LogOff     Logging = "off"
)

// sampleEvery: LogSampled selects one in so many ordinary sessions.
const sampleEvery = 100

// Wants reports whether a session's record goes to the access log.
func (l Logging) Wants(r *conntrack.Record) bool {
	switch {
	case l != LogSampled:
		return l != LogOff
	case r.End == conntrack.Idle, r.End == conntrack.Responses, r.End == conntrack.Evicted:
		return len(r.Failed) > 0 || r.Sampled(sampleEvery)
	}
	return true
}

// Options are what a Server uses beside its Config.
type Options struct {
	Config
	// Loops are the event loops. They may be running already.
	Loops []*poll.Loop
	// Table has one shard for each loop. The caller has the shards flushed
	// (conntrack.Shard.OnPending) and refreshed.
	Table *conntrack.Table
	// Traits are those of the Redirector.
	Traits redirect.Traits
	// Upstream decides how sockets to endpoints are created.
	Upstream *upstream.Rules
	// Refuses reports whether a client that policy accepts must not be served here; nil: none.
	Refuses func(client, vip netip.AddrPort, port *service.Port) bool
	// Follow hears of each session that begins, or has ended; nil: nobody does.
	Follow func(client, vip netip.AddrPort, open bool)
	// Crowded says that sessions that the kernel forwards leave no place for one of a service port:
	// by the limit of its Service (conntrack.LimitReached) or of all (EndNone). It must not wait.
	Crowded func(name service.PortName, end conntrack.End)
	Logger  zerolog.Logger
}
