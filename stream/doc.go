// Package stream serves TCP: it accepts the connections that clients make to
// Services, connects each to an endpoint that answers, and hands both sockets to
// the relay. It is the data path for TCP, as package datagram is for UDP.
//
//	s := stream.New(stream.Options{Config: config, Loops: loops, Table: table, Traits: redirector.Traits()})
//	target, err := s.Listen(opening) // steer the destination there
//	err = s.Bind(opening)            // or bind a socket to the destination itself
//	s.Apply(policy, addresses, false)
//	s.Prune()                        // at the end of each change, and every second while s.InGrace()
//	err = s.Stop(ctx)
//
// # What happens to a connection
//
// Steering hands the first packet to the service port's listening socket, which is
// bound to a loopback address. Node ports, and Services' addresses that are the
// node's own, have a listening socket bound to the destination instead (A3.15). A
// filter on the listening socket drops the packets of clients that may not connect
// (F5).
//
// All event loops wait for each listening socket, and the kernel wakes one of them.
// Its worker accepts the connection and asks policy for the verdict on the original
// destination, which is the accepted socket's own address. The service port's
// balancer proposes an endpoint. The worker connects to it without blocking, from
// the address that package upstream chooses. After a refusal or a timeout the
// balancer proposes another endpoint: a dead endpoint occupies a timer and a
// descriptor, and delays nobody. Once an endpoint has answered, the relay owns both
// sockets until the connection ends; then the worker writes the record. All of it
// happens on one event loop, without locks.
//
// # The grace period
//
// A client has a connection once its first packet was answered, whatever happens to
// the Service before the worker accepts it. So steering is withdrawn from a
// destination before the policy without it is published. For redirect.Grace after that, the
// listening sockets stay open, and connections to the destination are decided by
// the last policy that served it. Established connections are never touched (A8.7).
//
// # Limits
//
// Each Service has its own limits, for all its ports together. At its limit of
// connections that are being dialled, the worker stops accepting from the listening
// socket that the next connection came from, and clients wait in that socket's
// queue; where service ports share the socket, the connections in excess are
// reset. At the limit of open connections of a Service or namespace, new ones are
// reset and recorded with end=limit or end=namespace_limit. At the limit of all
// connections, or when the kernel has no descriptor or memory left, a worker stops
// accepting from all listening sockets and tries again after a pause that grows
// from 5 ms to 1 s.
//
// # Goroutines
//
// [Server]'s methods belong to one goroutine, except Stats, HoldBack and CanHoldBack,
// which any goroutine may call. Everything else runs on the event loops.
package stream
