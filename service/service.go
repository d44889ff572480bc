// Package service is the model of what a cluster's Services say: which
// addresses and ports lead to which endpoints.
//
// A [Store] takes API objects (Service, EndpointSlice, Node, ServiceCIDR) as
// they come and go and builds immutable [Snapshot]s. Everything reachable from
// a Snapshot is read-only and may be shared by any number of goroutines; parts
// that did not change keep their pointers from one Snapshot to the next, so
// that what is derived from them can be kept too.
//
// The package knows the rules of object intake (A1.1 to A1.19) and nothing of
// policy, sockets or files.
package service

import (
	"net/netip"
)

// Protocol is the transport protocol of a service port.
type Protocol uint8

// The protocols that a Service may name. The zero value is none of them.
const (
	TCP Protocol = iota + 1
	UDP
	SCTP
)

// String returns the name as the API spells it: "TCP", "UDP", "SCTP".
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	}
	return "unknown"
}

// Name is the namespaced name of an API object.
type Name struct {
	Namespace string
	Name      string
}

// String returns "namespace/name".
func (n Name) String() string { return n.Namespace + "/" + n.Name }

// PortName identifies a service port (A1.6): one number used with TCP and UDP
// is two of them.
type PortName struct {
	Name
	Port     string // may be empty when the service has one port only
	Protocol Protocol
}

// String returns "namespace/name:port", without the colon when the port has no
// name (A1.6).
func (n PortName) String() string {
	if n.Port == "" {
		return n.Name.String()
	}
	return n.Name.String() + ":" + n.Port
}

// AddressKind tells which of a service's addresses a destination is (A3.1).
type AddressKind uint8

// The kinds of addresses. The zero value is none of them.
const (
	ClusterIP AddressKind = iota + 1
	ExternalIP
	LoadBalancer
	NodePort
)

// String returns the names that the access log and explain use.
func (k AddressKind) String() string {
	switch k {
	case ClusterIP:
		return "ClusterIP"
	case ExternalIP:
		return "ExternalIP"
	case LoadBalancer:
		return "LoadBalancer"
	case NodePort:
		return "NodePort"
	}
	return "unknown"
}

// Destination is what a packet is sent to.
type Destination struct {
	Addr     netip.Addr // never an IPv4 address mapped into IPv6
	Port     uint16
	Protocol Protocol
}
