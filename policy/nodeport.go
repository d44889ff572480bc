package policy

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// NodePortAddresses gives this node's addresses of a family that have node
// ports, sorted and without loopback, and whether they are all that it has
// (A4.3, A4.4).
func (t *Table) NodePortAddresses(f service.Family) (addrs []netip.Addr, all bool) {
	for a := range t.node.portAddrs {
		if service.FamilyOf(a) == f {
			addrs = append(addrs, a)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs, t.node.portAll[f]
}

// NoLocalEndpoints counts the service ports of a family whose internal, and
// whose external, traffic policy is Local while there are endpoints, but none
// on this node: their connections are dropped (A3.5, A3.16).
func (t *Table) NoLocalEndpoints(f service.Family) (internal, external int) {
	for _, ch := range t.chunks {
		for i := range ch {
			c := &ch[i]
			if c.port == nil || !c.usable[f] || len(c.families[f].local) > 0 {
				continue
			}
			if c.internalLocal {
				internal++
			}
			if c.externalLocal && externallyAccessible(c.port, &c.port.Families[f]) {
				external++
			}
		}
	}
	return internal, external
}
