// Package listener accepts the connections that clients make to Services,
// finds an endpoint that answers, and hands both sockets to the relay.
//
// # How a connection travels
//
// Steering delivers a packet for a service's address to the service's lane: a
// listening socket on a loopback address. Node ports, and services' addresses
// that are this node's own, have listening sockets that are bound to them, called
// claims (A3.15); where steering only makes addresses local, every destination has.
// Who may not come in is dropped by a filter on the socket, called a guard. Each
// event loop has a [worker] that accepts from all sockets. It asks policy for the verdict on the original
// destination (the accepted socket's own address), asks the service's balancer
// for an endpoint, and connects without blocking, from the client's own address
// where policy wants it and the answers come back; a refusal or a timeout goes
// back to the balancer for another one. So a dead endpoint occupies a timer
// and a descriptor, and delays nobody. Once an endpoint has answered, the
// relay owns both sockets until the connection ends, and the worker writes the
// record. All of that happens on one loop: a connection takes no lock and
// changes no thread.
//
// # Configuration
//
// [Manager.Apply] puts a compiled policy in force. It looks at the service ports
// that changed, and finds the destinations ([outlet]) that are new, gone or
// different. It opens the lanes that are missing, takes steering away from what
// nobody new is to come to, publishes the policy and the services' pools through
// one atomic pointer, has claims and guards follow, steers what is new in one
// transaction, and lets go of lanes that nothing is steered to any more. What lets
// fewer clients in comes before the policy is published, what lets more in after
// it, so that nobody gets an answer of neither policy. Whoever has begun a
// handshake with a destination that went is served by the last policy that had
// it; see past. Established connections are never touched (A8.7).
//
// A port that another program holds is not taken from it: the log says so,
// everything else is in force, and [Manager.Maintain] tries again.
//
// # Limits
//
// Each Service has limits of its own, for all its ports together. At its limit of
// connections that are being dialled, the worker stops accepting from the socket
// that the next one came from, and clients wait in that socket's queue; where
// Services share the socket, those that are too many are reset. At the Service's limit of
// open connections, or that of its namespace, new ones are reset and recorded with
// end=limit or end=namespace_limit. At the limit of all
// connections, or when the kernel has no descriptor or memory to give, a
// worker stops accepting from all lanes and tries again after a pause that
// grows from 5 ms to 1 s. Established connections do not suffer.
package listener

import (
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// Config holds the limits and times of listening and dialling. Zero values
// are not defaults: cmd gives all of them.
type Config struct {
	// Backlog is the length of each lane's queue of connections that the
	// kernel has completed and nobody has accepted.
	Backlog int
	// MaxLanes bounds the listening sockets of each family. With more service
	// ports than that, some share a lane; their other limits stay their own.
	MaxLanes int

	// MaxClaims bounds the sockets that are bound to node ports and to Services'
	// own addresses. What is held stays held; the rest waits until there is room.
	MaxClaims int
	// Descriptors is what claims and connections share; 0 if that is enough
	// for both.
	Descriptors int

	// MaxConnections bounds the connections open at once, in all.
	MaxConnections int
	// MaxServiceConnections and MaxNamespaceConnections bound those of one
	// Service, all its ports together, and of one namespace.
	MaxServiceConnections   int
	MaxNamespaceConnections int
	// MaxServiceDialing bounds the connections of one Service that wait for an
	// endpoint to answer.
	MaxServiceDialing int

	// KeepAlive is how long a connection is quiet before either side is asked
	// whether it still lives; 0 switches that off.
	KeepAlive time.Duration

	// Congestion is the TCP congestion control of both sides' sockets; empty
	// means the system's.
	Congestion string

	// Algorithm is the balancer of services that do not name one in the
	// annotation sluice.dev/balancer.
	Algorithm balancer.Algorithm
	// Plan is the retry plan.
	Plan balancer.Plan
	// MaxPins bounds the clients that one service port's affinity remembers.
	MaxPins int
}

// state is one configuration in force. It never changes; workers read it
// through one atomic pointer.
type state struct {
	table *policy.Table
	pools []*pool       // by service.PortID; nil where there is no port
	host  hostAddresses // of this node
	past  []past        // the latest ones, oldest first, for who comes late
}

// pool is what one service port needs while it serves: its balancer, its
// counters and its limits. It lives as long as the port has its name,
// whatever else of it changes. Safe for concurrent use.
type pool struct {
	port     *service.Port // as of the last Apply; the manager's
	lane     *lane         // the manager's
	balancer *balancer.Balancer
	counters *conntrack.Counters

	service, namespace *quota
	dialing            atomic.Int64 // connections that have no endpoint yet
}
