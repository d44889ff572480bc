package policy

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// node is what decisions need to know of this node, from Config and Snapshot.
type node struct {
	name string
	zone string // A2.13
	// labels are those of the node, and others all nodes, for topology keys.
	labels map[string]string
	others *service.Nodes
	// pods are the ranges of local pods by family; not valid where local pods
	// cannot be told (A3.7).
	pods [2]netip.Prefix
	// local holds the node's addresses, without loopback.
	local map[netip.Addr]struct{}
	// primary are the node's own addresses (A3.11, A4.2).
	primary []netip.Addr
	// portAddrs are the addresses that have node ports, without loopback.
	portAddrs map[netip.Addr]struct{}
	// portAll says that all of the node's addresses of a family have them.
	portAll [2]bool
	// portLoopback are the loopback ranges that have node ports.
	portLoopback []netip.Prefix
	// portList holds portAddrs by family, sorted, and then the loopback address
	// if it has node ports.
	portList [2][]netip.Addr
	// self are the ranges of the node's addresses, and bypass those of all that
	// pass policy Local by (A3.6): the same and local pods. Both are tidy.
	self, bypass [2][]netip.Prefix
	// serviceCIDRs are the ranges of cluster IPs (A3.12).
	serviceCIDRs []netip.Prefix

	masqueradeAll bool
}

var loopbackPrefix = [2]netip.Prefix{
	service.IPv4: netip.MustParsePrefix("127.0.0.0/8"),
	service.IPv6: netip.MustParsePrefix("::1/128"),
}

var loopbackAddr = [2]netip.Addr{
	service.IPv4: netip.MustParseAddr("127.0.0.1"),
	service.IPv6: netip.IPv6Loopback(),
}

func newNode(snap *service.Snapshot, cfg *Config) *node {
	n := &node{
		name:          cfg.NodeName,
		zone:          snap.Node.Zone(),
		labels:        snap.Node.Labels,
		others:        snap.Nodes,
		local:         make(map[netip.Addr]struct{}),
		primary:       cfg.NodeIPs,
		portAddrs:     make(map[netip.Addr]struct{}),
		serviceCIDRs:  slices.Concat(cfg.ServiceCIDRs, snap.ServiceCIDRs),
		masqueradeAll: cfg.MasqueradeAll,
	}
	pods := cfg.ClusterCIDRs
	if cfg.DetectLocal == DetectNodeCIDR {
		pods = snap.Node.PodCIDRs
	}
	for _, p := range pods {
		if f := service.FamilyOf(p.Addr()); !n.pods[f].IsValid() {
			n.pods[f] = p
		}
	}
	if len(snap.Node.Addresses) > 0 {
		n.primary = snap.Node.Addresses
	}
	for _, list := range [][]netip.Addr{cfg.NodeAddresses, cfg.NodeIPs, snap.Node.Addresses} {
		for _, a := range list {
			if !a.IsLoopback() {
				n.local[a] = struct{}{}
			}
		}
	}
	n.selectPortAddrs(cfg)
	n.listPortAddrs()
	n.selves()
	return n
}

// selectPortAddrs finds the addresses with node ports (A4.2 to A4.5).
func (n *node) selectPortAddrs(cfg *Config) {
	ranges := slices.Clone(cfg.NodePortAddresses)
	if cfg.NodePortPrimary {
		for _, a := range n.primary {
			if !a.IsLoopback() {
				ranges = append(ranges, netip.PrefixFrom(a, a.BitLen()))
			}
		}
	}
	for _, f := range []service.Family{service.IPv4, service.IPv6} {
		var mine []netip.Prefix
		all := true
		for _, p := range ranges {
			if service.FamilyOf(p.Addr()) == f {
				mine = append(mine, p)
				all = false
			}
		}
		all = all || slices.ContainsFunc(mine, func(p netip.Prefix) bool { return p.Bits() == 0 })
		n.portAll[f] = all
		for a := range n.local {
			if service.FamilyOf(a) == f && !needsInterface(a) && (all || contains(mine, a)) {
				n.portAddrs[a] = struct{}{}
			}
		}
		if all && f == service.IPv4 && cfg.LocalhostNodePorts {
			mine = append(mine, loopbackPrefix[f])
		}
		for _, p := range mine { // on all, loopback must be asked for (A4.5)
			if within(p, loopbackPrefix[f]) || !all && p.Overlaps(loopbackPrefix[f]) {
				n.portLoopback = append(n.portLoopback, p)
			}
		}
	}
}

// needsInterface tells whether an address means something together with an
// interface only. No destination can name it then.
func needsInterface(a netip.Addr) bool { return a.Is6() && a.IsLinkLocalUnicast() }

func (n *node) listPortAddrs() {
	for a := range n.portAddrs {
		f := service.FamilyOf(a)
		n.portList[f] = append(n.portList[f], a)
	}
	for f, loopback := range loopbackAddr {
		slices.SortFunc(n.portList[f], netip.Addr.Compare)
		if contains(n.portLoopback, loopback) {
			n.portList[f] = append(n.portList[f], loopback)
		}
	}
}

// within tells whether all of p is in q.
func within(p, q netip.Prefix) bool { return q.Contains(p.Addr()) && p.Bits() >= q.Bits() }

// equal tells whether all that decisions depend on is the same, but for what
// only topology keys look at.
func (n *node) equal(o *node) bool {
	return n.name == o.name && n.zone == o.zone && n.pods == o.pods &&
		maps.Equal(n.local, o.local) && slices.Equal(n.primary, o.primary) &&
		maps.Equal(n.portAddrs, o.portAddrs) && slices.Equal(n.portLoopback, o.portLoopback) &&
		slices.Equal(n.serviceCIDRs, o.serviceCIDRs) && n.masqueradeAll == o.masqueradeAll
}

// isLocal tells whether an address is one of the node's.
func (n *node) isLocal(a netip.Addr) bool {
	if a.IsLoopback() {
		return true
	}
	_, ok := n.local[a]
	return ok
}

// isPod tells whether a client is a local pod, as far as that can be told
// (A3.7, A4.6).
func (n *node) isPod(a netip.Addr) bool { return n.pods[service.FamilyOf(a)].Contains(a) }

// hasNodePorts tells whether an address has node ports (A4.4).
func (n *node) hasNodePorts(a netip.Addr) bool {
	if a.IsLoopback() {
		return contains(n.portLoopback, a)
	}
	_, ok := n.portAddrs[a]
	return ok
}

func contains(list []netip.Prefix, a netip.Addr) bool {
	for _, p := range list {
		if p.Contains(a) {
			return true
		}
	}
	return false
}
