package policy

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// NodePortAddresses returns this node's addresses of a family that have node ports,
// sorted and without loopback, and whether those are all of the node's addresses
// (A4.3, A4.4).
func (t *Table) NodePortAddresses(f service.Family) (addrs []netip.Addr, all bool) {
	for _, a := range t.node.portList[f] {
		if !a.IsLoopback() {
			addrs = append(addrs, a)
		}
	}
	return addrs, t.node.portAll[f]
}

// Destinations yields each destination of a service port of the Table's Snapshot
// (A3.1) once, with its kind: those of [service.Port.Destinations], and the node
// port on each of this node's addresses that has node ports (A4.4).
//
// 127.0.0.1 and ::1 stand for the loopback ranges (A4.5): Resolve also accepts the
// node port on 127.0.0.2, but the range is too large to list. Link-local IPv6
// addresses have no node ports, because they are ambiguous without an interface.
func (t *Table) Destinations(p *service.Port) iter.Seq2[service.Destination, service.AddressKind] {
	return func(yield func(service.Destination, service.AddressKind) bool) {
		for d, kind := range p.Destinations {
			if !yield(d, kind) {
				return
			}
		}
		if p.NodePort == 0 {
			return
		}
		for f := range p.Families {
			if !p.Families[f].Exists {
				continue
			}
			for _, a := range t.node.portList[f] {
				d := service.Destination{Addr: a, Port: p.NodePort, Protocol: p.Name.Protocol}
				// A service's own address and port takes precedence.
				if t.index.Get(d) == nil && !yield(d, service.NodePort) {
					return
				}
			}
		}
	}
}

// Balanced returns the endpoints between which this node balances the connections to a service
// port in one family: those of traffic policy Cluster, if any traffic to the port has it, else
// those of policy Local.
func (t *Table) Balanced(id service.PortID, f service.Family) []service.Endpoint {
	if c := &t.port(id).families[f]; c.cluster != nil {
		return c.cluster
	}
	return t.port(id).families[f].local
}

// NoLocalEndpoints counts the service ports of a family whose internal or external
// traffic policy is Local and whose endpoints are all on other nodes. Their
// connections are dropped (A3.5, A3.16).
func (t *Table) NoLocalEndpoints(f service.Family) (internal, external int) {
	for _, ch := range t.chunks {
		internal += ch.noLocal[f].internal
		external += ch.noLocal[f].external
	}
	return internal, external
}

// count aggregates the chunk's ports for NoLocalEndpoints, HealthChecked and
// KeepsClients, which run after each change and must not read all ports.
func (ch *chunk) count() {
	for i := range ch.ports {
		c := &ch.ports[i]
		if c.port == nil {
			continue
		}
		if c.port.HealthCheckNodePort != 0 {
			ch.health = append(ch.health, c.port)
		}
		for f := range c.families {
			accessible := c.externalLocal && externallyAccessible(c.port, &c.port.Families[f])
			ch.keeps = ch.keeps || accessible
			if !c.families[f].usable || len(c.families[f].local) > 0 {
				continue
			}
			if c.internalLocal {
				ch.noLocal[f].internal++
			}
			if accessible {
				ch.noLocal[f].external++
			}
		}
	}
}

// HealthChecked yields the service ports that have a health check port (A6.1).
func (t *Table) HealthChecked(yield func(*service.Port) bool) {
	for _, ch := range t.chunks {
		for _, p := range ch.health {
			if !yield(p) {
				return
			}
		}
	}
}

// Primary returns the node's primary addresses: the InternalIPs of its Node object,
// or else Config.NodeIPs.
func (t *Table) Primary() []netip.Addr { return t.node.primary }

// KeepsClients reports whether the endpoint of any connection must see the client's
// address (A3.9). With MasqueradeAll, only external policy Local requires that.
func (t *Table) KeepsClients() bool {
	if !t.node.masqueradeAll {
		return true
	}
	return slices.ContainsFunc(t.chunks, func(ch *chunk) bool { return ch.keeps })
}
