package conntrack

import (
	"errors"
	"syscall"
)

// End is the reason why a connection ended, and the side that ended it.
type End uint8

// The ends. The zero value means that the connection is still open.
const (
	EndNone            End = iota
	ClientFin              // the client closed first, with a FIN
	ClientReset            // the client sent a reset
	ClientTimeout          // the client no longer answered
	EndpointFin            // the endpoint closed first, with a FIN
	EndpointReset          // the endpoint sent a reset after the connection was established
	EndpointTimeout        // the endpoint no longer answered
	Idle                   // no bytes for longer than the idle or the half-closed timeout
	Shutdown               // the proxy stopped
	ConnectFailed          // no candidate answered within the retry plan
	NoEndpoints            // there was no candidate when the connection was accepted
	LimitReached           // a limit of the Service or of the process
	NotAdmitted            // the client is not allowed, but the socket's filter did not drop it
	Responses              // UDP: the configured number of responses arrived
	EndpointGone           // UDP: the endpoint is no longer usable (A8.2)
	Evicted                // UDP: a new session replaced this one
	NamespaceLimit         // the namespace reached its limit
	Admin                  // an operator ended it
	ClientShutdown         // SCTP: the client shut down first
	ClientAbort            // SCTP: the client aborted
	ClientLost             // SCTP: the client no longer answered
	EndpointShutdown       // SCTP: the endpoint shut down first
	EndpointAbort          // SCTP: the endpoint aborted
	EndpointLost           // SCTP: the endpoint no longer answered
	MessageTooLarge        // SCTP: a message exceeds the bound
	NoStream               // SCTP: a message's stream was not granted by its receiver
	NotForwarded           // kernel flows did not forward it, and the relay must not serve it
	ProxyHeader            // a PROXY header is broken or too long
	ProxyHeaderTimeout     // no PROXY header came in time
	ProxyNotTrusted        // the client is none of those that may send a PROXY header
	Drained                // the endpoint went, and the time to drain is over
	Rebalanced             // it was idle, and its client is to use new endpoints; both sides got a FIN
	NoLocalEndpoints       // the traffic policy is Local, and no endpoint of this node can serve
	UnknownPort            // no Service has this port of the cluster IP
	UnknownAddress         // no Service has this address in a range of cluster IPs
	endCount           = iota
)

var endNames = [endCount]string{
	EndNone:         "open",
	ClientFin:       "client_fin",
	ClientReset:     "client_reset",
	ClientTimeout:   "client_timeout",
	EndpointFin:     "endpoint_fin",
	EndpointReset:   "endpoint_reset",
	EndpointTimeout: "endpoint_timeout",
	Idle:            "idle",
	Shutdown:        "shutdown",
	ConnectFailed:   "connect_failed",
	NoEndpoints:     "no_endpoints",
	LimitReached:    "limit",
	NotAdmitted:     "not_admitted",
	Responses:       "responses",
	EndpointGone:    "endpoint_gone",
	Evicted:         "evicted",
	NamespaceLimit:  "namespace_limit",
	Admin:           "admin",

	ClientShutdown:   "client_shutdown",
	ClientAbort:      "client_abort",
	ClientLost:       "client_comm_lost",
	EndpointShutdown: "endpoint_shutdown",
	EndpointAbort:    "endpoint_abort",
	EndpointLost:     "endpoint_comm_lost",
	MessageTooLarge:  "message_too_large",
	NoStream:         "no_stream",
	NotForwarded:     "not_forwarded",

	ProxyHeader:        "proxy_header",
	ProxyHeaderTimeout: "proxy_header_timeout",
	ProxyNotTrusted:    "proxy_not_trusted",

	Drained:    "drained",
	Rebalanced: "rebalanced",

	NoLocalEndpoints: "no_local_endpoints",
	UnknownPort:      "unknown_port",
	UnknownAddress:   "unknown_address",
}

// ByEndpoint reports whether the endpoint broke the connection, which it had accepted.
func (e End) ByEndpoint() bool {
	switch e {
	case EndpointReset, EndpointTimeout, EndpointAbort, EndpointLost:
		return true
	}
	return false
}

// String returns the name that the access log and the metrics use.
func (e End) String() string { return nameOf(endNames[:], uint8(e)) }

// Path is the data path of a connection.
type Path uint8

// The data paths.
const (
	Relayed Path = iota // a process moves the bytes
	Kernel              // the kernel forwards the packets
)

// String returns the name that the access log uses.
func (p Path) String() string {
	if p == Kernel {
		return "kernel"
	}
	return "relay"
}

// Ends returns every way in which a connection can end.
func Ends() []End { return allBelow(End(endCount)) }

// Paths returns every data path.
func Paths() []Path { return []Path{Relayed, Kernel} }

// Event is the moment that a copy of a record describes.
type Event uint8

// The events.
const (
	Ended      Event = iota // the connection has ended
	Opened                  // an endpoint was reached
	Lasts                   // the connection is open, and has been for an interval
	Listed                  // the connection is open
	Refused                 // there was none: its packets were refused or dropped
	eventCount = iota
)

var eventNames = [eventCount]string{Ended: "end", Opened: "open", Lasts: "interval", Listed: "listed", Refused: "refused"}

// String returns the name that the access log uses.
func (e Event) String() string { return nameOf(eventNames[:], uint8(e)) }

// State is the state of a connection.
type State uint8

// The states.
const (
	Connecting State = iota // no endpoint has answered yet
	Open                    // connected to an endpoint; UDP: an endpoint was chosen
	Closed                  // ended
	stateCount = iota
)

var stateNames = [stateCount]string{Connecting: "connecting", Open: "open", Closed: "ended"}

// String returns the name that listings and filters use.
func (s State) String() string { return nameOf(stateNames[:], uint8(s)) }

// States returns every state.
func States() []State { return append([]State{Connecting}, allBelow(State(stateCount))...) }

// DialError is the reason why an attempt to connect to an endpoint failed.
type DialError uint8

// The reasons. The zero value means success.
const (
	DialOK          DialError = iota
	DialTimeout               // no answer in time
	DialRefused               // the endpoint's port is closed
	DialReset                 // reset before the connection was established
	DialUnreachable           // no route, or an ICMP error
	DialNoAddress             // local: no free local address and port
	DialNoResources           // local: out of descriptors or memory
	DialDenied                // local: a firewall rule or a missing capability
	DialDropped               // no answer in time: a rule of this node drops packets of the handshake
	DialOther
	dialErrorCount = iota
)

var dialErrorNames = [dialErrorCount]string{
	DialOK:          "none",
	DialTimeout:     "timeout",
	DialRefused:     "refused",
	DialReset:       "reset",
	DialUnreachable: "unreachable",
	DialNoAddress:   "no_address",
	DialNoResources: "no_resources",
	DialDenied:      "denied",
	DialDropped:     "dropped",
	DialOther:       "other",
}

// String returns the name that the access log and the metrics use.
func (e DialError) String() string { return nameOf(dialErrorNames[:], uint8(e)) }

// Own reports whether the cause is on this node, so that the endpoint is not to
// blame.
func (e DialError) Own() bool {
	return e == DialNoAddress || e == DialNoResources || e == DialDenied
}

// DialErrors returns all reasons except DialOK.
func DialErrors() []DialError { return allBelow(DialError(dialErrorCount)) }

// DialErrorOf converts the error of a system call to a reason.
func DialErrorOf(err error) DialError {
	var errno syscall.Errno
	if err == nil {
		return DialOK
	}
	if !errors.As(err, &errno) {
		return DialOther
	}
	switch errno {
	case 0:
		return DialOK
	case syscall.ETIMEDOUT:
		return DialTimeout
	case syscall.ECONNREFUSED:
		return DialRefused
	case syscall.ECONNRESET, syscall.ECONNABORTED, syscall.EPIPE:
		return DialReset
	case syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.ENETDOWN:
		return DialUnreachable
	case syscall.EADDRNOTAVAIL, syscall.EADDRINUSE:
		return DialNoAddress
	case syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EAGAIN:
		return DialNoResources
	case syscall.EACCES, syscall.EPERM:
		return DialDenied
	}
	return DialOther
}

func nameOf(names []string, i uint8) string {
	if int(i) < len(names) {
		return names[i]
	}
	return "unknown"
}

// allBelow returns the values from 1 on.
func allBelow[T ~uint8](end T) []T {
	all := make([]T, 0, end-1)
	for v := T(1); v < end; v++ {
		all = append(all, v)
	}
	return all
}
