// Package policy decides what becomes of a connection: which endpoints may
// serve it and whose address they see, or that it is refused, dropped, or none
// of our business. It implements the rules A2.1 to A2.14 (traffic policies,
// readiness, topology) and A3.1 to A3.12 (verdicts).
//
// The package is pure: it does no I/O and knows no sockets. [Compile] makes a
// [Table] of a [service.Snapshot], once for each snapshot; [Table.Resolve] reads
// it for each connection, from any goroutine, without locks and allocations.
package policy

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/service"
)

// Action is what to do with a connection.
type Action uint8

// The actions.
const (
	None   Action = iota // not for us: the packet is left alone
	Accept               // connect it to a candidate
	Refuse               // answer with a reset, or port unreachable
	Drop                 // do not answer
)

// String gives the words that explain uses.
func (a Action) String() string {
	switch a {
	case None:
		return "none"
	case Accept:
		return "accept"
	case Refuse:
		return "refuse"
	case Drop:
		return "drop"
	}
	return "unknown"
}

// Source says whose address the endpoint must see.
type Source uint8

// The sources.
const (
	SourceNode   Source = iota // the node's (A3.8)
	SourceClient               // the client's own (A3.9)
)

// String gives the words that explain and the access log use.
func (s Source) String() string {
	if s == SourceClient {
		return "client"
	}
	return "node"
}

// Verdict is the decision about one connection.
type Verdict struct {
	Action Action
	// Port is the service port; nil for None and where no service has the
	// port (A3.12).
	Port *service.Port
	Kind service.AddressKind
	// Candidates are the endpoints that may serve it, sorted by address as
	// text. They are shared and read-only. There is at least one if and only
	// if the Action is Accept.
	Candidates []service.Endpoint
	// Source is what the endpoint must see, as far as it does not depend on
	// the endpoint that is chosen; see SourceFor.
	Source Source
	// Rule is the rule that decided on Action and Candidates.
	Rule Rule
	// SourceRule is the rule that decided on Source; 0 unless Accept.
	SourceRule Rule
}

// SourceFor gives the source for one endpoint: a client that is served by
// itself must see the node's address, or its own reply would not come back to
// the proxy (A3.8, hairpin).
func (v *Verdict) SourceFor(client, endpoint netip.Addr) Source {
	if client == endpoint {
		return SourceNode
	}
	return v.Source
}

// DetectLocal is a way to tell local pods by their address (A4.6).
type DetectLocal uint8

// The ways.
const (
	DetectClusterCIDR DetectLocal = iota // by Config.ClusterCIDRs
	DetectNodeCIDR                       // by the pod CIDRs of this node's object
	DetectInterface                      // by Config.PodRanges
)

// Config is what decisions depend on beside the Snapshot. The zero value is a
// node that knows neither its name, its addresses nor its pods. The slices are
// read-only once given.
type Config struct {
	// NodeName is this node, for topology hints (A2.8).
	NodeName string
	// DetectLocal says how clients that are local pods are told from others
	// (A4.6). Where there is no range of a family, no client of that family
	// is taken for one, and, other than with DetectInterface, pods cannot be
	// told from others at all (A3.7).
	DetectLocal DetectLocal
	// ClusterCIDRs are the ranges that pods have their addresses from; the
	// first of each family counts.
	ClusterCIDRs []netip.Prefix
	// PodRanges are the addresses that this node routes to its pods'
	// interfaces, for DetectInterface. There may be none while there are no
	// pods.
	PodRanges []netip.Prefix
	// ServiceCIDRs are ranges of cluster IPs beside those of the Snapshot.
	// Their addresses that no service has are dropped (A3.12).
	ServiceCIDRs []netip.Prefix
	// MasqueradeAll hides the client's address on all connections to cluster
	// IPs (A3.8).
	MasqueradeAll bool

	// NodeAddresses are the addresses of this node's interfaces. The
	// Snapshot's node adds its own; loopback need not be there.
	NodeAddresses []netip.Addr
	// NodeIPs are the node's primary addresses while no Node object says
	// them (A4.7). They are node addresses too.
	NodeIPs []netip.Addr
	// NodePortAddresses are the ranges whose node addresses have node ports.
	// A family without a range, and one with a zero range, has them on all
	// (A4.3), but on loopback addresses only if there is a range for those
	// (A4.5).
	NodePortAddresses []netip.Prefix
	// NodePortPrimary adds the node's primary addresses to
	// NodePortAddresses (A4.2).
	NodePortPrimary bool
	// LocalhostNodePorts has IPv4 node ports on loopback addresses even where
	// they are on all addresses (A4.5).
	LocalhostNodePorts bool
}
