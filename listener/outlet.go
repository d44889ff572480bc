package listener

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// outlet is one destination of a service port, and what becomes of it on this
// node as long as the policy stays as it is. It does not change but for its lane.
type outlet struct {
	dst    service.Destination
	name   service.PortName
	kind   service.AddressKind
	action policy.Action // Accept, Refuse or Drop; None: nobody serves it yet
	// claimed says that a socket of ours is bound to the destination.
	// Otherwise a lane's socket accepts for it.
	claimed bool
	own     bool            // the address is one of this node's
	guard   *guard          // nil: it answers everybody
	lane    *lane           // nil if it has none
	target  redirect.Target // the same for UDP
}

// guards gives the outlet's guard as a list.
func (o *outlet) guards() []*guard {
	if o.guard == nil {
		return nil
	}
	return []*guard{o.guard}
}

// needsLane tells whether a lane's socket accepts for it.
func (o *outlet) needsLane() bool { return o.action == policy.Accept && !o.claimed }

// equal tells whether nothing is to be done to get from one outlet, that is in
// force, to another.
func (o *outlet) equal(p *outlet) bool {
	return o.needsLane() == (o.lane != nil || o.target.Port != 0) && o.dst == p.dst && o.name == p.name && o.kind == p.kind && o.action == p.action &&
		o.claimed == p.claimed && o.own == p.own && (o.guard == nil) == (p.guard == nil) &&
		(o.guard == nil || slices.Equal(o.guard.allowed, p.guard.allowed))
}

// outlets gives those of a service port.
func (m *Manager) outlets(table *policy.Table, port *service.Port, host hostAddresses) (list []*outlet) {
	for dst, kind := range table.Destinations(port) {
		o := &outlet{dst: dst, name: port.Name, kind: kind, own: host.has(dst.Addr)}
		switch {
		case kind == service.NodePort:
			if !o.own && host.known() {
				continue // the Node object knows of an address that is not here (yet)
			}
			o.own = true
		case kind == service.ClusterIP && o.own:
			m.warn(port, fmt.Errorf("its cluster IP %s is an address of this node: not served", dst.Addr))
			continue
		case !o.own && redirect.CheckAddr(dst.Addr) != nil:
			m.warn(port, fmt.Errorf("%s %s: %w: not served", kind, dst.Addr, redirect.CheckAddr(dst.Addr)))
			continue
		}
		o.claimed = o.own || m.traits.BindEach
		if !serves(dst.Protocol) {
			if kind == service.ClusterIP {
				list = append(list, o) // the address is ours all the same
			}
			continue
		}
		o.action = table.Steering(dst)
		if o.action == policy.Accept && dst.Protocol == service.TCP {
			if allowed, limited := table.Admission(dst); limited {
				o.guard = &guard{dst: dst, name: port.Name, allowed: allowed}
			}
		}
		if o.action != policy.None {
			list = append(list, o)
		}
	}
	return list
}

// serves tells whether a protocol is served.
func serves(p service.Protocol) bool { return p == service.TCP || p == service.UDP }

// change is a destination that is new, gone, or served in another way.
type change struct {
	old, new *outlet // nil: there was none, there is none
}

// compare gives what has to be done for service ports to get from what they had
// to what they are to have. Where nothing changes, the old outlet is put in the
// new one's place.
func compare(from, to [][]*outlet) (changes []change) {
	was := make(map[service.Destination]*outlet)
	for _, list := range from {
		for _, o := range list {
			was[o.dst] = o
		}
	}
	for _, list := range to {
		for i, o := range list {
			before := was[o.dst]
			delete(was, o.dst)
			if before != nil && before.equal(o) {
				list[i] = before
				continue
			}
			changes = append(changes, change{old: before, new: o})
		}
	}
	for _, o := range was {
		changes = append(changes, change{old: o})
	}
	return changes
}

// hostAddresses are the addresses of this node's interfaces; nil if they are
// not known.
type hostAddresses map[netip.Addr]struct{}

func (h hostAddresses) known() bool { return h != nil }

func (h hostAddresses) has(a netip.Addr) bool {
	_, is := h[a]
	return is || a.IsLoopback()
}

// reachable gives those that other hosts may send to.
func (h hostAddresses) reachable() redirect.Set[netip.Addr] {
	var b redirect.Builder[netip.Addr, struct{}]
	for a := range h {
		if !a.IsLoopback() {
			b.Set(a, struct{}{})
		}
	}
	return b.Map()
}

// within gives an address of the node that lies in a range.
func (h hostAddresses) within(r netip.Prefix) (a netip.Addr, is bool) {
	for a := range h {
		if r.Contains(a) {
			return a, true
		}
	}
	return netip.Addr{}, false
}
