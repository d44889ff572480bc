package policy

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// node holds the facts about this node that decisions depend on, from Config and
// Snapshot. Arrays of two are indexed by service.Family.
type node struct {
	name string
	zone string // A2.13
	// labels are this node's labels, others are all nodes; both for topology
	// keys.
	labels map[string]string
	others *service.Nodes
	// primary are the node's own addresses (A3.11, A4.2).
	primary []netip.Addr

	// pods are the addresses of local pods. podsKnown is false if Config does
	// not allow us to recognize them (A3.7).
	pods      [2]ranges
	podsKnown [2]bool
	// self are the node's addresses, including loopback.
	self [2]ranges
	// bypass are the clients that bypass policy Local (A3.6), pods and self. The
	// lists are tidy.
	bypass [2][]netip.Prefix
	// ports are the addresses that have node ports. portAll is set if all of the
	// node's addresses do.
	ports   [2]ranges
	portAll [2]bool
	// portList lists the same addresses, sorted, then one loopback address for
	// the loopback range.
	portList [2][]netip.Addr
	// serviceCIDRs are the ranges of cluster IPs (A3.12).
	serviceCIDRs []netip.Prefix

	masqueradeAll bool
	drained       Drained
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
		primary:       cfg.NodeIPs,
		serviceCIDRs:  slices.Concat(cfg.ServiceCIDRs, snap.ServiceCIDRs),
		masqueradeAll: cfg.MasqueradeAll,
		drained:       cfg.Drained,
	}
	if len(snap.Node.Addresses) > 0 {
		n.primary = snap.Node.Addresses
	}
	pods := podRanges(snap, cfg)
	local := slices.Concat(cfg.NodeAddresses, cfg.NodeIPs, snap.Node.Addresses)
	for _, f := range []service.Family{service.IPv4, service.IPv6} {
		n.pods[f] = newRanges(ofFamily(pods, f))
		n.podsKnown[f] = len(n.pods[f].list) > 0 || cfg.DetectLocal == DetectInterface
		self := []netip.Prefix{loopbackPrefix[f]}
		for _, a := range local {
			if service.FamilyOf(a) == f {
				self = append(self, whole(a))
			}
		}
		n.self[f] = newRanges(self)
		n.bypass[f] = tidy(slices.Concat(n.self[f].list, n.pods[f].list))
		n.selectPorts(f, cfg)
	}
	return n
}

// podRanges returns the ranges of local pods (A4.6). Of several CIDRs of one family,
// it uses the first.
func podRanges(snap *service.Snapshot, cfg *Config) []netip.Prefix {
	list := cfg.ClusterCIDRs
	switch cfg.DetectLocal {
	case DetectInterface:
		return cfg.PodRanges
	case DetectNodeCIDR:
		list = snap.Node.PodCIDRs
	}
	var first []netip.Prefix
	for _, p := range list {
		if len(ofFamily(first, service.FamilyOf(p.Addr()))) == 0 {
			first = append(first, p)
		}
	}
	return first
}

// ofFamily returns a new list with the ranges of one family.
func ofFamily(list []netip.Prefix, f service.Family) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range list {
		if service.FamilyOf(p.Addr()) == f {
			out = append(out, p.Masked())
		}
	}
	return out
}

// selectPorts finds the addresses of a family that have node ports (A4.2 to
// A4.5).
func (n *node) selectPorts(f service.Family, cfg *Config) {
	selected := ofFamily(cfg.NodePortAddresses, f)
	if cfg.NodePortPrimary {
		for _, a := range n.primary {
			if service.FamilyOf(a) == f && !a.IsLoopback() {
				selected = append(selected, whole(a))
			}
		}
	}
	all := len(selected) == 0 || slices.ContainsFunc(selected, func(p netip.Prefix) bool { return p.Bits() == 0 })
	n.portAll[f] = all
	var have []netip.Prefix
	for _, p := range n.self[f].list {
		a := p.Addr()
		if a.IsLoopback() || needsInterface(a) || !all && !contains(selected, a) {
			continue
		}
		n.portList[f] = append(n.portList[f], a)
		have = append(have, p)
	}
	if all && f == service.IPv4 && cfg.LocalhostNodePorts {
		selected = append(selected, loopbackPrefix[f])
	}
	for _, p := range selected { // even with "all", loopback must be selected (A4.5)
		switch loopback := loopbackPrefix[f]; {
		case within(p, loopback):
			have = append(have, p)
		case !all && p.Overlaps(loopback):
			have = append(have, loopback)
		}
	}
	n.ports[f] = newRanges(have)
	if n.ports[f].holds(loopbackAddr[f]) {
		n.portList[f] = append(n.portList[f], loopbackAddr[f])
	}
}

// needsInterface reports whether an address is ambiguous without an interface. No
// Destination can express such an address.
func needsInterface(a netip.Addr) bool { return a.Is6() && a.IsLinkLocalUnicast() }

// compilesAs reports whether compilePort returns the same for both nodes, apart
// from ports with topology keys. Those also depend on labels and others.
func (n *node) compilesAs(o *node) bool {
	return n.name == o.name && n.zone == o.zone && slices.Equal(n.primary, o.primary) && maps.Equal(n.drained, o.drained)
}

// isLocal reports whether an address is one of the node's.
func (n *node) isLocal(a netip.Addr) bool { return n.self[service.FamilyOf(a)].holds(a) }

// isPod reports whether a client is known to be a local pod (A3.7, A4.6).
func (n *node) isPod(a netip.Addr) bool { return n.pods[service.FamilyOf(a)].holds(a) }

// hasNodePorts reports whether an address has node ports (A4.4).
func (n *node) hasNodePorts(a netip.Addr) bool { return n.ports[service.FamilyOf(a)].holds(a) }
