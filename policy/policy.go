// Package policy decides about connections. It accepts, refuses or drops a
// connection, or ignores it because no service has its destination. For an accepted
// connection, it selects the candidate endpoints and whether they see the address
// of the client or of the node. It implements the rules A2.1 to A2.14 (traffic
// policies, readiness, topology) and A3.1 to A3.12 (verdicts).
//
// [Compile] builds a [Table] from a [service.Snapshot], once for each snapshot.
// [Table.Resolve] reads the Table for each connection, from any goroutine, without
// locks and allocations. The package does no I/O; package balancer chooses among
// the candidates.
package policy

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/service"
)

// Action is what to do with a connection.
type Action uint8

// The actions.
const (
	None   Action = iota // not a service's: leave the packet to the kernel
	Accept               // connect it to a candidate
	Refuse               // answer with a reset, or port unreachable
	Drop                 // do not answer
	Hold                 // accept it, and connect it once there is a candidate
)

var actionNames = [...]string{None: "none", Accept: "accept", Refuse: "refuse", Drop: "drop", Hold: "hold"}

// String returns the action's name in the output of "sluice explain".
func (a Action) String() string {
	if int(a) < len(actionNames) {
		return actionNames[a]
	}
	return "unknown"
}

// Source selects the source address of the connection to the endpoint.
type Source uint8

// The sources.
const (
	SourceNode   Source = iota // the node's (A3.8)
	SourceClient               // the client's own (A3.9)
)

// String returns the source's name in the output of "sluice explain" and in the
// access log.
func (s Source) String() string {
	if s == SourceClient {
		return "client"
	}
	return "node"
}

// Verdict is the decision about one connection.
type Verdict struct {
	Action Action
	// Port is the service port. It is nil for None, and for a port that no
	// service has (A3.12).
	Port *service.Port
	Kind service.AddressKind
	// Candidates are the endpoints that may serve the connection, sorted by the
	// text of their addresses. They are shared and read-only. The list is empty
	// unless Action is Accept.
	Candidates []service.Endpoint
	// Source is the source address for most endpoints. Call SourceFor for the
	// chosen one.
	Source Source
	// Rule decided on Action and Candidates.
	Rule Rule
	// SourceRule decided on Source. It is 0 unless Action is Accept.
	SourceRule Rule
}

// SourceFor returns the source for one endpoint. If client and endpoint are the same
// pod (hairpin), the source is the node: otherwise the pod would send its reply to
// itself instead of the proxy (A3.8).
func (v *Verdict) SourceFor(client, endpoint netip.Addr) Source {
	if client == endpoint {
		return SourceNode
	}
	return v.Source
}

// DetectLocal selects how to recognize local pods by their address (A4.6).
type DetectLocal uint8

// The values of DetectLocal.
const (
	DetectClusterCIDR DetectLocal = iota // by Config.ClusterCIDRs
	DetectNodeCIDR                       // by the podCIDRs of this node's object
	DetectInterface                      // by Config.PodRanges
)

// Config is the input of decisions beside the Snapshot. The zero value is a node
// without known name, addresses and pods. Callers must not change the slices
// afterwards.
type Config struct {
	// NodeName is this node's name, for topology hints (A2.8).
	NodeName string
	// DetectLocal selects how to recognize local pods (A4.6). In a family
	// without a range, no client counts as a pod. Except with DetectInterface,
	// pods of that family are then unknown (A3.7).
	DetectLocal DetectLocal
	// ClusterCIDRs are the cluster's pod ranges. Only the first of each family
	// is used.
	ClusterCIDRs []netip.Prefix
	// PodRanges are the addresses that this node routes to its pods'
	// interfaces, for DetectInterface. The list is empty while there are no
	// pods.
	PodRanges []netip.Prefix
	// ServiceCIDRs are further ranges of cluster IPs, beside those of the
	// Snapshot. Connections to their unused addresses are dropped (A3.12).
	ServiceCIDRs []netip.Prefix
	// MasqueradeAll hides the client's address on all connections to cluster
	// IPs (A3.8).
	MasqueradeAll bool
	// Drained are the endpoints that an operator drains.
	Drained Drained

	// NodeAddresses are the addresses of this node's interfaces. Loopback may
	// be missing. The addresses of the Snapshot's Node are added.
	NodeAddresses []netip.Addr
	// NodeIPs are the node's primary addresses until a Node object provides
	// them (A4.7). They are also node addresses.
	NodeIPs []netip.Addr
	// NodePortAddresses selects the node addresses that have node ports. A
	// family without a range, or with a range of length 0, selects all (A4.3)
	// except loopback, which needs a range of its own (A4.5).
	NodePortAddresses []netip.Prefix
	// NodePortPrimary adds the node's primary addresses to
	// NodePortAddresses (A4.2).
	NodePortPrimary bool
	// LocalhostNodePorts adds IPv4 loopback if all addresses are selected
	// (A4.5).
	LocalhostNodePorts bool
}
