package dns

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// places finds the nodes of clients by their addresses. It never changes.
type places struct {
	nodes   *service.Nodes
	own     policy.Place
	byRange map[netip.Prefix]*service.Node
	lengths [2][]int // of the ranges, by service.Family, longest first
}

// newPlaces lists the addresses and pod ranges of nodes. Clients that no node has are on
// the node own.
func newPlaces(nodes *service.Nodes, own service.Node) *places {
	p := &places{nodes: nodes, own: placeOf(&own, nodes), byRange: make(map[netip.Prefix]*service.Node)}
	add := func(r netip.Prefix, n *service.Node) {
		p.byRange[r] = n
		if f := service.FamilyOf(r.Addr()); !slices.Contains(p.lengths[f], r.Bits()) {
			p.lengths[f] = append(p.lengths[f], r.Bits())
		}
	}
	for n := range nodes.All {
		for _, r := range n.PodCIDRs {
			add(r, n)
		}
		for _, a := range n.Addresses {
			add(netip.PrefixFrom(a, a.BitLen()), n)
		}
	}
	for f := range p.lengths {
		slices.Sort(p.lengths[f])
		slices.Reverse(p.lengths[f])
	}
	return p
}

func placeOf(n *service.Node, nodes *service.Nodes) policy.Place {
	return policy.Place{Node: n.Name, Zone: n.Zone(), Labels: n.Labels, Nodes: nodes}
}

// of returns where a client is.
func (p *places) of(client netip.Addr) policy.Place {
	for _, bits := range p.lengths[service.FamilyOf(client)] {
		if r, err := client.Prefix(bits); err == nil {
			if n := p.byRange[r]; n != nil {
				return placeOf(n, p.nodes)
			}
		}
	}
	return p.own
}
