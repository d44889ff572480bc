// Package dns answers questions for the names of Services, by version 1.1.0 of the
// specification "Kubernetes DNS-Based Service Discovery".
//
//	catalog := dns.NewCatalog()                      // owned by one goroutine
//	server, err := dns.Listen(dns.Options{Addresses: addresses, Zone: "cluster.local"})
//	go server.Serve(ctx)
//	server.Set(catalog.Apply(change), nodes, "node-1") // after each change
//
// # Names
//
// A [Catalog] reads the same [service.Change]s as the proxy's Store and builds immutable
// [Names]. It also keeps what proxies ignore: headless Services, their endpoints and
// hostnames, and ExternalNames. It does no I/O.
//
// # Place
//
// A headless Service has the endpoints that policy allows at the client's place: the
// topology hints of its slices, or its annotation sluice.dev/topology-keys. The client is
// on the node that has its address, by the addresses and podCIDRs of Node objects, else on
// the server's own node.
//
// # Server
//
// A [Server] answers over UDP and TCP, with the authority of its zone and of the addresses
// that it has names for. It sends other questions to the resolvers of Options.Forward, and
// refuses them if there are none. It caches nothing.
package dns
