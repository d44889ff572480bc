package service

import (
	"net/netip"
	"time"
)

// PortID is a small integer that identifies a service port while the port exists.
// Another port may reuse it later. It indexes tables of one Snapshot; do not keep
// it longer.
type PortID uint32

// Family is an address family. It indexes Port.Families.
type Family uint8

// The two address families.
const (
	IPv4 Family = iota
	IPv6
)

// FamilyOf returns the family of an address. An IPv4-mapped IPv6 address counts as
// IPv6; callers must unmap it.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// Type is the type of a Service with a cluster IP.
type Type uint8

// The service types. ExternalName has none (A1.4).
const (
	TypeClusterIP Type = iota
	TypeNodePort
	TypeLoadBalancer
)

// Snapshot is the state of the cluster after one change. It never changes.
type Snapshot struct {
	// Node is this node according to its Node object.
	Node Node
	// Nodes are all nodes that have an object. The pointer stays the same until a
	// node changes.
	Nodes *Nodes
	// Ports holds each service port at its PortID. Unused elements are nil.
	Ports []*Port
	// ServiceCIDRs are the ranges of cluster IPs from ServiceCIDR objects, sorted.
	ServiceCIDRs []netip.Prefix
	// Others are the cluster IPs of other proxies' Services. The map stays the same
	// until it changes.
	Others map[netip.Addr]Other
	// Problems describe unusable objects or parts of them, sorted by object:
	// conflicting or invalid addresses (A1.7) and others.
	Problems []Problem

	index *Index[PortID] // of node ports and cluster IPs; the values of the latter are unused
}

// Port returns a service port by its ID, or nil.
func (s *Snapshot) Port(id int) *Port {
	if id >= len(s.Ports) {
		return nil
	}
	return s.Ports[id]
}

// Problem describes one unusable part of the input.
type Problem struct {
	Object string // "Service default/web"
	Text   string // the fault and its consequence
}

// Node is a node of the cluster.
type Node struct {
	Name   string
	Labels map[string]string
	// Addresses are the InternalIPs, in the order of the Node's status.
	Addresses []netip.Addr
	// PodCIDRs are the ranges of the node's pods.
	PodCIDRs []netip.Prefix
	// Found is false until a Node object of this name is known.
	Found bool
	// BeingDeleted is set if the node is being deleted or has the autoscaler's
	// deletion taint (A7.3).
	BeingDeleted bool
}

// Zone returns the node's topology zone, or "" (A2.13).
func (n *Node) Zone() string { return n.Labels["topology.kubernetes.io/zone"] }

// Nodes are the nodes of a cluster by name.
type Nodes struct {
	byName map[string]*Node
}

// Get returns the node of a name, or nil. n may be nil.
func (n *Nodes) Get(name string) *Node {
	if n == nil {
		return nil
	}
	return n.byName[name]
}

// All yields the nodes in no order. n may be nil.
func (n *Nodes) All(yield func(*Node) bool) {
	if n == nil {
		return
	}
	for _, node := range n.byName {
		if !yield(node) {
			return
		}
	}
}

// Any reports whether there is any node. n may be nil.
func (n *Nodes) Any() bool { return n != nil && len(n.byName) > 0 }

// Port is one port of a Service (A1.6) with the addresses and endpoints of both
// families.
type Port struct {
	ID       PortID
	Name     PortName
	Type     Type
	Port     uint16 // on cluster IPs, external IPs and load balancer IPs
	NodePort uint16 // 0 if none

	// InternalLocal and ExternalLocal are set if the traffic policy of that traffic
	// is Local (A2.2).
	InternalLocal bool
	ExternalLocal bool

	// AffinityTimeout is the sliding window of session affinity ClientIP (A5.2), or
	// 0 without affinity.
	AffinityTimeout time.Duration

	// IdleTimeout and HalfClosedTimeout are those of the annotations
	// sluice.dev/idle-timeout and half-closed-timeout: 0 if there is none, and Never.
	IdleTimeout, HalfClosedTimeout time.Duration

	// Hold is how long new TCP and SCTP connections wait while there are no endpoints; 0 =
	// they are refused (sluice.dev/hold).
	Hold time.Duration

	// Drain is how long TCP and SCTP connections may stay with an endpoint that went or
	// does not serve any more; 0 = for ever (sluice.dev/drain).
	Drain time.Duration
	// Rebalance is how long a TCP connection has to be quiet before it is closed for the sake
	// of new endpoints; 0 = none is (sluice.dev/rebalance).
	Rebalance time.Duration
	// Limits are those of TCP and SCTP connections (sluice.dev/max-connections,
	// max-connections-per-endpoint, queue-timeout).
	Limits Limits

	// SlowStart is the time in which a new endpoint's share grows to the full one; 0 = it has
	// it at once (sluice.dev/slow-start).
	SlowStart time.Duration

	// SendProxy is the version of the PROXY protocol, 1 or 2, by which endpoints of a TCP
	// port learn of the client; 0 = none (sluice.dev/proxy-protocol).
	SendProxy uint8
	// AcceptProxy are the load balancers whose connections to a TCP port begin with a PROXY
	// header. All other clients are reset. Empty = there are none
	// (sluice.dev/accept-proxy-protocol).
	AcceptProxy []netip.Prefix

	// HealthCheckNodePort is 0 if none (A6.1).
	HealthCheckNodePort uint16

	// TopologyKeys are the node label keys of the annotation
	// sluice.dev/topology-keys, in order; "*" matches any endpoint. The list is
	// empty without the annotation, and if the external policy is Local, which
	// excludes it.
	TopologyKeys []string

	// Annotations are the Service's annotations with the prefix "sluice.dev/",
	// without that prefix, and those of Foreign; nil if there are none.
	Annotations map[string]string

	// Families holds the addresses and endpoints, indexed by Family.
	Families [2]FamilyView
}

// FamilyView is a service port in one address family (A1.5, A1.19). It leaves out
// addresses that another service owns.
type FamilyView struct {
	// Exists is set if the service has a cluster IP of the family. Otherwise it has
	// neither addresses nor a node port in that family.
	Exists          bool
	ClusterIP       netip.Addr     // invalid if another service owns it
	ExternalIPs     []netip.Addr   // A1.7
	LoadBalancerIPs []netip.Addr   // of ipMode VIP only (A1.9)
	SourceRanges    []netip.Prefix // of load balancer IPs (A3.10); empty allows all clients
	Endpoints       []Endpoint     // sorted by address text, without duplicates (A1.13, A1.14)
}

// Endpoint is one address and port that serves a service port.
type Endpoint struct {
	Addr netip.AddrPort
	// Conditions with the defaults of A1.12.
	Ready       bool
	Serving     bool
	Terminating bool
	// Local is set if the endpoint runs on this node (A1.12).
	Local bool
	// MayReturn means that the address may also be a Service's, on this node or
	// another one. The proxy must not serve a connection that it made to this
	// endpoint and that came back to a Service's address.
	MayReturn bool
	// Weight is what weighted algorithms go by; 0 = none was given, which counts as 1.
	Weight uint16

	Place
	Pod    Name // targetRef if that is a Pod, else empty
	PodUID UID  // of targetRef

	// Hints are nil for none.
	Hints *Hints
}

// Hints are an endpoint's topology hints (A2.8, A2.9).
type Hints struct{ Zones, Nodes []string }

// ZoneHints are the names of the zones whose clients an endpoint is for, if any.
func (e *Endpoint) ZoneHints() []string {
	if e.Hints == nil {
		return nil
	}
	return e.Hints.Zones
}

// NodeHints are the names of the nodes whose clients an endpoint is for, if any.
func (e *Endpoint) NodeHints() []string {
	if e.Hints == nil {
		return nil
	}
	return e.Hints.Nodes
}

// PodName returns namespace/name of the endpoint's pod, or "".
func (e *Endpoint) PodName() string {
	if e.Pod.Name == "" {
		return ""
	}
	return e.Pod.String()
}

// InCluster reports whether the endpoint is on a node of the cluster, like a pod.
// Other endpoints may be outside the cluster, and packets to them may need
// translation on the way.
func (e *Endpoint) InCluster() bool { return e.Node() != "" }
