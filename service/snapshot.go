package service

import (
	"net/netip"
	"time"
)

// PortID is a small integer that stands for a service port. It stays the same
// as long as the port exists and may be given to another port afterwards, so
// it indexes tables that are built for one Snapshot and is never kept beyond.
type PortID uint32

// Family says which of the two address families something belongs to. It
// indexes Port.Families.
type Family uint8

// The two address families.
const (
	IPv4 Family = iota
	IPv6
)

// FamilyOf returns the family of an address. An IPv4 address mapped into IPv6
// counts as IPv6; callers unmap first.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// Type is the type of a Service that has a cluster IP.
type Type uint8

// The service types that a proxy handles (A1.4 leaves ExternalName out).
const (
	TypeClusterIP Type = iota
	TypeNodePort
	TypeLoadBalancer
)

// Snapshot is everything that was known at one moment. It never changes.
type Snapshot struct {
	// Node is this node as its Node object describes it.
	Node Node
	// Nodes are all nodes that have an object. It keeps its pointer as long as
	// none of them changes.
	Nodes *Nodes
	// Ports holds each service port at its PortID; unused places are nil.
	Ports []*Port
	// ServiceCIDRs are the ranges that cluster IPs are taken from, from
	// ServiceCIDR objects, sorted. Empty when there are none.
	ServiceCIDRs []netip.Prefix
	// Others are the cluster IPs of Services that other proxies serve. It is the
	// same map for as long as it does not change.
	Others map[netip.Addr]Other
	// Problems are the objects, or parts of them, that could not be used,
	// sorted by object: conflicting addresses, invalid addresses (A1.7).
	Problems []Problem

	index *Index[PortID] // of node ports and cluster IPs; the latter have no ID
}

// Problem is one thing in the input that could not be used.
type Problem struct {
	Object string // "Service default/web"
	Text   string // what is wrong and what follows from it
}

// Node is a node of the cluster.
type Node struct {
	Name   string
	Labels map[string]string
	// Addresses are the InternalIPs, in the order of the Node's status.
	Addresses []netip.Addr
	// PodCIDRs are the ranges of the node's pods.
	PodCIDRs []netip.Prefix
	// Found is false while no Node object of that name is known.
	Found bool
	// Leaving is set while the node is being deleted, or is about to be (A7.3).
	Leaving bool
}

// Zone returns the node's topology zone, or "" (A2.13).
func (n *Node) Zone() string { return n.Labels["topology.kubernetes.io/zone"] }

// Nodes are the nodes of a cluster by name.
type Nodes struct {
	byName map[string]*Node
}

// Get returns the node of a name, or nil. It may be called on nil.
func (n *Nodes) Get(name string) *Node {
	if n == nil {
		return nil
	}
	return n.byName[name]
}

// Port is one port of a Service (A1.6), with the addresses and endpoints of
// both families.
type Port struct {
	ID       PortID
	Name     PortName
	Type     Type
	Port     uint16 // on cluster IPs, external IPs and load balancer IPs
	NodePort uint16 // 0 if none

	// InternalLocal and ExternalLocal say that the traffic policy of that
	// kind of traffic is Local (A2.2).
	InternalLocal bool
	ExternalLocal bool

	// AffinityTimeout is the sliding window of session affinity ClientIP
	// (A5.2), 0 when the service has none.
	AffinityTimeout time.Duration

	// HealthCheckNodePort is 0 if none (A6.1).
	HealthCheckNodePort uint16

	// TopologyKeys are the node label keys of the annotation
	// sluice.dev/topology-keys, in order; "*" stands for any endpoint. Empty
	// means that there is no choice by label, also where the external policy
	// is Local, which excludes it.
	TopologyKeys []string

	// Annotations are those of the Service that begin with "sluice.dev/",
	// without that prefix; nil if there are none.
	Annotations map[string]string

	// Families holds the addresses and endpoints by family, at IPv4 and
	// IPv6.
	Families [2]FamilyView
}

// FamilyView is a service port as one address family sees it (A1.5, A1.19).
// An address that another service claims with better right is not in it.
type FamilyView struct {
	// Exists is set if the service has a cluster IP of the family. Without
	// it there are no addresses either, and no node port in that family.
	Exists          bool
	ClusterIP       netip.Addr     // not valid if it is another service's
	ExternalIPs     []netip.Addr   // A1.7
	LoadBalancerIPs []netip.Addr   // of ipMode VIP only (A1.9)
	SourceRanges    []netip.Prefix // of load balancer IPs (A3.10); empty means that all may
	Endpoints       []Endpoint     // sorted by address as text, no address twice (A1.13, A1.14)
}

// Endpoint is one address and port that serves a service port.
type Endpoint struct {
	Addr netip.AddrPort
	// The conditions, with the defaults of A1.12 applied.
	Ready       bool
	Serving     bool
	Terminating bool
	// Local is set if the endpoint runs on this node (A1.12).
	Local bool

	Node string // name of its node, may be empty
	Zone string // may be empty
	Pod  Name   // of targetRef if that is a Pod, else empty
	// PodUID is the UID of targetRef, or "".
	PodUID string

	// MayReturn says that a connection could come to a Service's address, here
	// or on another node, instead of the endpoint: it must not be served there.
	MayReturn bool

	// ZoneHints and NodeHints are the topology hints (A2.8, A2.9).
	ZoneHints []string
	NodeHints []string
}

// InCluster reports whether the endpoint is on a node of the cluster, as pods are.
// Others may be anywhere, and what is sent to them may have to be translated on
// its way.
func (e *Endpoint) InCluster() bool { return e.Node != "" }
