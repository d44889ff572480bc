package policy

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// NodePortAddresses gives this node's addresses of a family that have node
// ports, sorted and without loopback, and whether they are all that it has
// (A4.3, A4.4).
func (t *Table) NodePortAddresses(f service.Family) (addrs []netip.Addr, all bool) {
	for _, a := range t.node.portList[f] {
		if !a.IsLoopback() {
			addrs = append(addrs, a)
		}
	}
	return addrs, t.node.portAll[f]
}

// Destinations gives every destination that leads to a service port of the
// Table's Snapshot (A3.1), each once and with the kind that decides about it:
// what [service.Port.Destinations] gives, and the node port on each address of
// this node that has node ports (A4.4).
//
// Of loopback ranges (A4.5), 127.0.0.1 and ::1 stand for the whole: Resolve
// knows the node port on 127.0.0.2 too, but nobody could list all of them.
// Link-local IPv6 addresses have no node ports, as they mean something together
// with an interface only.
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
				// The very address and port of a service goes before.
				if t.index.Get(d) == nil && !yield(d, service.NodePort) {
					return
				}
			}
		}
	}
}

// NoLocalEndpoints counts the service ports of a family whose internal, and
// whose external, traffic policy is Local while there are endpoints, but none
// on this node: their connections are dropped (A3.5, A3.16).
func (t *Table) NoLocalEndpoints(f service.Family) (internal, external int) {
	for _, ch := range t.chunks {
		internal += ch.noLocal[f].internal
		external += ch.noLocal[f].external
	}
	return internal, external
}

// count sums up what is asked of all service ports after each change, so that
// not all of them have to be read then.
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
			if !c.usable[f] || len(c.families[f].local) > 0 {
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

// HealthChecked gives the service ports that have a health check port (A6.1).
func (t *Table) HealthChecked(yield func(*service.Port) bool) {
	for _, ch := range t.chunks {
		for _, p := range ch.health {
			if !yield(p) {
				return
			}
		}
	}
}

// Primary gives the node's primary addresses: the InternalIPs of its Node object,
// else those that are configured.
func (t *Table) Primary() []netip.Addr { return t.node.primary }

// KeepsClients tells whether there is a connection whose endpoint must see the
// client's own address (A3.9). With MasqueradeAll, only external policy Local
// leaves any.
func (t *Table) KeepsClients() bool {
	if !t.node.masqueradeAll {
		return true
	}
	return slices.ContainsFunc(t.chunks, func(ch *chunk) bool { return ch.keeps })
}
