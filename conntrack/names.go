package conntrack

import (
	"errors"
	"syscall"
)

// End tells who ended a connection, and how.
type End uint8

// The ends. The zero value means that the connection is still open.
const (
	EndNone         End = iota
	ClientFin           // the client closed first, in order
	ClientReset         // the client sent a reset
	ClientTimeout       // the client no longer answered
	EndpointFin         // the endpoint closed first, in order
	EndpointReset       // the endpoint sent a reset after the connection had been made
	EndpointTimeout     // the endpoint no longer answered
	Idle                // no bytes for longer than the idle or the half-closed timeout
	Shutdown            // the proxy stopped
	ConnectFailed       // no candidate answered within the retry plan
	NoEndpoints         // there was no candidate left when the connection was accepted
	LimitReached        // a limit of the Service or of the process
	NotAdmitted         // the client may not come in, and the kernel let it
	Responses           // UDP: as many answers came as the service said
	EndpointGone        // UDP: the endpoint serves no more (A8.2)
	Evicted             // UDP: the session made room for a new one
	NamespaceLimit      // the limit of a namespace
	endCount        = iota
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
}

// String returns the name that the access log and the metrics use.
func (e End) String() string { return nameOf(endNames[:], uint8(e)) }

// Ends returns every way in which a connection can end.
func Ends() []End {
	all := make([]End, 0, endCount-1)
	for e := EndNone + 1; e < End(endCount); e++ {
		all = append(all, e)
	}
	return all
}

// DialError tells why an attempt to connect to an endpoint failed.
type DialError uint8

// The reasons. The zero value means that it did not fail.
const (
	DialOK          DialError = iota
	DialTimeout               // no answer in time
	DialRefused               // the endpoint's port is closed
	DialReset                 // reset before the connection was made
	DialUnreachable           // no route, or a router or neighbour said so
	DialNoAddress             // our own: no local address and port free
	DialNoResources           // our own: descriptors or memory ran out
	DialDenied                // our own: a firewall rule or a missing right
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
	DialOther:       "other",
}

// String returns the name that the access log and the metrics use.
func (e DialError) String() string { return nameOf(dialErrorNames[:], uint8(e)) }

// Own tells that the reason lies with this node, so that the endpoint is not
// to blame.
func (e DialError) Own() bool {
	return e == DialNoAddress || e == DialNoResources || e == DialDenied
}

// DialErrors returns every reason for which an attempt can fail.
func DialErrors() []DialError {
	all := make([]DialError, 0, dialErrorCount-1)
	for e := DialOK + 1; e < DialError(dialErrorCount); e++ {
		all = append(all, e)
	}
	return all
}

// DialErrorOf returns the reason that an error of a system call stands for.
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
