package listener

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// destination is one destination of a service port, and what happens to it on this
// node as long as the policy stays as it is. Only its target is set later.
type destination struct {
	policy.Opening
	bound bool // by a bound port; otherwise it is steered to a listening socket
	own   bool // the address is one of this node's
	// whole: because of this destination, a route delivers the whole address to this node.
	// unsteered: nothing can steer it, and only a route leads to its bound port.
	whole, unsteered bool
	target           redirect.Target // the listening socket; zero if it has none
}

// lacks returns why a protocol is not served, or nil.
func (m *Manager) lacks(p service.Protocol) error {
	served := m.protocols[p]
	switch {
	case served == nil:
		return errors.New("it is not served")
	case served.Available == nil:
		return nil
	}
	return served.Available()
}

// needsListener reports whether it is steered to a listening socket.
func (d *destination) needsListener() bool { return d.Action == policy.Accept && !d.bound }

// equal reports whether d is in force and equals e, so that nothing needs to change.
func (d *destination) equal(e *destination) bool {
	return d.needsListener() == (d.target.Port != 0) && d.bound == e.bound && d.own == e.own && d.whole == e.whole && d.Opening.Equal(&e.Opening)
}

// destinations returns those of a service port.
func (m *Manager) destinations(table *policy.Table, port *service.Port, host hostnet.Addresses) (list []*destination) {
	for dst, kind := range table.Destinations(port) {
		own := host.Has(dst.Addr)
		switch {
		case kind == service.NodePort:
			if !own && host.Known() {
				continue // the Node object names an address that the node does not have (yet)
			}
			own = true
		case kind == service.ClusterIP && own:
			m.warn(port, fmt.Errorf("its cluster IP %s is an address of this node: not served", dst.Addr))
			continue
		case !own && redirect.CheckAddr(dst.Addr) != nil:
			m.warn(port, fmt.Errorf("%s %s: %w: not served", kind, dst.Addr, redirect.CheckAddr(dst.Addr)))
			continue
		}
		if m.lacks(dst.Protocol) != nil {
			if kind == service.ClusterIP { // delivered to this node, where it refuses
				list = append(list, &destination{own: own, whole: true, Opening: policy.Opening{Destination: dst, Name: port.Name, Kind: kind}})
			}
			continue
		}
		if o := table.Open(dst, port.Name, kind); o.Action != policy.None {
			unsteered := m.protocols[dst.Protocol].Listeners == nil
			list = append(list, &destination{
				Opening: o, own: own, unsteered: unsteered, bound: own || unsteered || m.traits.BindEach,
				whole: !own && (unsteered || kind == service.ClusterIP),
			})
		}
	}
	return list
}

// change is a destination that is new, gone, or served in another way.
type change struct {
	old, new *destination // nil: there was none, there is none
}

// compare returns the changes from the destinations that service ports had to those that they will
// have. Where nothing changes, it keeps the old destination.
func compare(from, to [][]*destination) (changes []change) {
	was := make(map[service.Destination]*destination)
	for _, list := range from {
		for _, d := range list {
			was[d.Destination] = d
		}
	}
	for _, list := range to {
		for i, d := range list {
			before := was[d.Destination]
			delete(was, d.Destination)
			if before != nil && before.equal(d) {
				list[i] = before
				continue
			}
			changes = append(changes, change{old: before, new: d})
		}
	}
	for _, d := range was {
		changes = append(changes, change{old: d})
	}
	return changes
}

// withdrawn separates the changes of destinations that accept no new connections any
// more from all others.
func withdrawn(changes []change) (going, others []change) {
	for _, ch := range changes {
		if ch.old != nil && ch.old.Action == policy.Accept && (ch.new == nil || ch.new.Action != policy.Accept) {
			going = append(going, ch)
		} else {
			others = append(others, ch)
		}
	}
	return going, others
}

// reachable returns the addresses of the node that other hosts may send to.
func reachable(host hostnet.Addresses) redirect.Set[netip.Addr] {
	var b redirect.Builder[netip.Addr, struct{}]
	for a := range host {
		if !a.IsLoopback() {
			b.Set(a, struct{}{})
		}
	}
	return b.Map()
}
