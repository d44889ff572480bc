// Package listener is the control plane of the data paths: it puts a compiled policy
// in force. It decides which destinations this node serves, has the data path of
// each protocol open sockets for them, and gives the Redirector the plan of what to
// steer there.
//
//	m := listener.New(listener.Options{
//		Protocols: map[service.Protocol]listener.Protocol{service.TCP: {Ports: stream, Listeners: stream, SocketsPerPort: 1}},
//		DataPaths: []listener.DataPath{stream}, Redirector: redirector, Loops: loops, Table: table,
//	})
//	err := m.Apply(policy)         // for each new configuration
//	repaired, err := m.Maintain()  // after m.NextMaintenance()
//	err = m.Stop(ctx)
//
// # A change of the configuration
//
// [Manager.Apply] looks at the service ports that changed and finds the destinations
// that are new, gone or different. A destination has either a listening socket that
// it is steered to, or a bound port: a socket that is bound to the destination
// itself. Bound ports are for node ports and for Services' addresses that are the
// node's own (A3.15); where steering only makes addresses local, for all
// destinations. Apply then
//
//  1. has the protocols open the missing listening sockets,
//  2. withdraws steering from destinations that accept no new connections,
//  3. has bound ports stop accepting what the new policy does not accept,
//  4. has the data paths publish the new policy,
//  5. has the other bound ports follow, and binds new ones,
//  6. steers the other changes in one transaction,
//  7. has the data paths close the sockets that are no longer used.
//
// What admits fewer clients comes before the policy is published, what admits more
// after it, so that each client gets the answer of one of the two policies.
//
// A port that another program holds is not taken from it: the log says so, everything
// else is in force, and [Manager.Maintain] tries again.
//
// # What outlives a destination
//
// Established connections are never touched (A8.7). Where packets of theirs would not
// reach this node without steering, their destination or address lingers in the plan
// until no connection uses it, and for redirect.Grace at least. How handshakes that have begun are
// served in the grace period is up to the data path.
//
// # Goroutines
//
// [Manager]'s methods belong to one goroutine, except Stats, Snapshot, Policy,
// TakeSockets and ReturnSockets, which any goroutine may call.
package listener

import (
	"context"

	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// Protocol is how one protocol is served: who opens its sockets, and its traits.
type Protocol struct {
	Ports
	// Listeners is nil if the kernel cannot steer the protocol to a listening socket, so
	// that each destination needs a bound port.
	Listeners Listeners
	// Available returns why the kernel lacks the protocol for now, or nil. Until then, its
	// ports on cluster IPs refuse. A nil Available says that every kernel has it.
	Available func() error
	// SocketsPerPort is how many sockets Bind opens for one destination.
	SocketsPerPort int
	// KeepsConnections says that connections go on when their destination is no
	// longer served (A8.7), so that their packets must still be delivered here.
	KeepsConnections bool
}

// Ports opens the sockets that are bound to destinations. Its methods, and those of
// Listeners, DataPath and Flows, are called from the Manager's goroutine only.
type Ports interface {
	// Bind applies the Opening to the socket that is bound to the destination itself, and opens the
	// socket if necessary. After an error none is bound; the error wraps a system call's.
	Bind(policy.Opening) error
	// Unbind closes that socket. New connections are refused at once.
	Unbind(service.Destination)
}

// Listeners opens the sockets that destinations are steered to.
type Listeners interface {
	// Listen returns the socket to which a destination must be steered, and opens
	// it if necessary. Clients are admitted as the Opening says once Apply returns.
	Listen(policy.Opening) (redirect.Target, error)
	// Unlisten says that a destination is not steered there any more, or that
	// Listen follows with another Opening.
	Unlisten(policy.Opening)
}

// DataPath moves the bytes of one or more protocols through the process.
type DataPath interface {
	// Apply publishes a policy: when it returns, new connections are decided by it.
	// withdrawn says that destinations that the policy before served are not
	// steered to any more.
	Apply(table *policy.Table, host hostnet.Addresses, withdrawn bool)
	// Prune closes the sockets of service ports that are gone, and those whose grace period has
	// passed. Nothing is steered to them any more.
	Prune()
	// InGrace reports whether Prune must be called again soon.
	InGrace() bool
	// Stop ends everything. Steering has been undone.
	Stop(context.Context) error
}

// Flows is what the kernel forwards of one protocol, in front of its DataPath.
type Flows interface {
	// Apply publishes a policy, after the DataPaths have it.
	Apply(table *policy.Table, host hostnet.Addresses)
}

// Descriptors controls the descriptors that bound ports leave to connections. It is safe for
// concurrent use.
type Descriptors interface {
	// HoldBack sets how many descriptors are in use by bound ports, or about to be.
	HoldBack(n int64)
	// CanHoldBack returns why there may not be so many, or nil.
	CanHoldBack(n int64) error
}
