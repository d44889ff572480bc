package conntrack

import "github.com/sluice-proxy/sluice/service"

// Places are those that limits leave to the connections of a service port, whichever data path
// serves them. They are safe for concurrent use.
type Places interface {
	// Bounded reports whether flags limit the connections of both data paths together.
	Bounded() bool
	// Take takes a place for a connection that the kernel is to forward. If there is none, it
	// returns how the connection ends, or EndNone if such connections wait in the relay.
	Take(*service.Limits) (end End, ok bool)
	// Add counts a connection that has begun already.
	Add()
	// Give gives back what Take or Add has taken.
	Give()
	// Full tells the log that a connection has no endpoint below the limit of each.
	Full(*service.Limits)
}
