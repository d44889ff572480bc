// Package pools has clients that keep connections open, as they are in use: HTTP keep-alive to
// Debian's nginx, gRPC, and a pool of connections to Debian's PostgreSQL. No request of theirs
// fails while sluice.dev/rebalance closes idle connections.
package pools
