// Package service is the model of a cluster's Services: which addresses and ports
// lead to which endpoints.
//
// A [Store] receives API objects (Service, EndpointSlice, Node, ServiceCIDR) and
// builds immutable [Snapshot]s. One goroutine owns the Store. Everything reachable
// from a Snapshot is read-only and safe for concurrent use. Unchanged parts keep
// their pointers from one Snapshot to the next, so that callers can also keep what
// they derived from them.
//
// The package implements the rules of object intake (A1.1 to A1.19). It leaves
// decisions about connections to package policy, and does no I/O.
package service

import (
	"cmp"
	"net/netip"
)

// Protocol is the transport protocol of a service port.
type Protocol uint8

// The protocols of Services. The zero value is none of them.
const (
	TCP Protocol = iota + 1
	UDP
	SCTP
)

// String returns the name as the API spells it: "TCP", "UDP", "SCTP".
func (p Protocol) String() string {
	return nameIn(p, []string{TCP: "TCP", UDP: "UDP", SCTP: "SCTP"})
}

// nameIn returns the name of a value, or "unknown" for one that has none.
func nameIn[V ~uint8](v V, names []string) string {
	if v == 0 || int(v) >= len(names) {
		return "unknown"
	}
	return names[v]
}

// Name is the namespaced name of an API object.
type Name struct {
	Namespace string
	Name      string
}

// String returns "namespace/name".
func (n Name) String() string { return n.Namespace + "/" + n.Name }

// Compare orders names by namespace, then by name.
func (n Name) Compare(o Name) int {
	return cmp.Or(cmp.Compare(n.Namespace, o.Namespace), cmp.Compare(n.Name, o.Name))
}

// PortName identifies a service port (A1.6). The same port number with TCP and UDP
// makes two service ports.
type PortName struct {
	Name
	Port     string // may be empty if the service has only one port
	Protocol Protocol
}

// String returns "namespace/name:port", or "namespace/name" if the port has no name
// (A1.6).
func (n PortName) String() string {
	if n.Port == "" {
		return n.Name.String()
	}
	return n.Name.String() + ":" + n.Port
}

// Compare orders service ports by name, port name and protocol.
func (n PortName) Compare(o PortName) int {
	return cmp.Or(n.Name.Compare(o.Name), cmp.Compare(n.Port, o.Port), cmp.Compare(n.Protocol, o.Protocol))
}

// AddressKind is the kind of a service's address (A3.1).
type AddressKind uint8

// The kinds of addresses. The zero value is none of them.
const (
	ClusterIP AddressKind = iota + 1
	ExternalIP
	LoadBalancer
	NodePort
)

// String returns the name in the access log and in the output of "sluice explain".
func (k AddressKind) String() string {
	return nameIn(k, []string{ClusterIP: "ClusterIP", ExternalIP: "ExternalIP", LoadBalancer: "LoadBalancer", NodePort: "NodePort"})
}

// Destination is the destination of a packet.
type Destination struct {
	Addr     netip.Addr // never IPv4-mapped IPv6
	Port     uint16
	Protocol Protocol
}

// String returns "TCP 10.96.0.1:443".
func (d Destination) String() string {
	return d.Protocol.String() + " " + netip.AddrPortFrom(d.Addr, d.Port).String()
}
