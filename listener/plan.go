package listener

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// planner makes the plan of what is steered. Each plan shares with the one before
// what did not change, so that the change of one service costs the same however many
// there are.
type planner struct {
	steer  redirect.Builder[service.Destination, redirect.Target]
	refuse redirect.Builder[service.Destination, struct{}]
	silent redirect.Builder[service.Destination, struct{}]
	own    redirect.Builder[service.Destination, struct{}]
	node   redirect.Set[netip.Addr] // of host
	host   hostnet.Addresses
	// keeps reports whether connections over a protocol outlive their destination.
	keeps func(service.Protocol) bool
	// lingering are destinations on foreign addresses that are not served any
	// more but may carry connections; lingeringIPs are such cluster IPs outside
	// the service ranges.
	lingering    redirect.Builder[service.Destination, struct{}]
	lingeringIPs map[netip.Addr]struct{}
	// grace holds the end of the grace period of lingering entries, as
	// poll.Nanotime: until then, connections may arrive that conntrack does not
	// know yet.
	grace map[service.Destination]int64

	// How many destinations there are on a cluster IP, or another address that is
	// delivered whole to this node, and how many served and lingering ones on other
	// addresses that are not this node's.
	clusterUses map[netip.Addr]int
	foreignUses map[netip.Addr]int

	clusterIPs redirect.Builder[netip.Addr, struct{}]
	foreign    redirect.Builder[netip.Addr, struct{}]
	local      redirect.Builder[netip.Prefix, struct{}]
	ranges     []netip.Prefix               // of cluster IPs; none contains an address of this node
	others     map[netip.Addr]service.Other // cluster IPs that other proxies serve
	moved      bool                         // ranges or others changed since the last plan
	touched    map[netip.Addr]struct{}      // addresses that may belong to other sets since then
	gone       []*destination               // those that left the plan since then
	// replies says that sockets may be bound to clients' addresses. Once a policy
	// asked for it, there may be some for as long as the process lives.
	replies bool
}

func newPlanner() planner {
	return planner{
		lingeringIPs: make(map[netip.Addr]struct{}),
		grace:        make(map[service.Destination]int64),
		clusterUses:  make(map[netip.Addr]int),
		foreignUses:  make(map[netip.Addr]int),
		touched:      make(map[netip.Addr]struct{}),
	}
}

// replace replaces the destination was by is, which has the same address and port; either may be
// nil. open says that a bound port has its socket.
func (p *planner) replace(was, is *destination, open bool) {
	if is != nil {
		p.use(is, 1)
	}
	if was != nil {
		p.use(was, -1)
		if is == nil || is.own != was.own {
			p.gone = append(p.gone, was)
		}
	}
	if is == nil {
		p.put(was.Destination, policy.None, false, redirect.Target{})
		return
	}
	p.place(is, open)
}

// place puts a destination into its set.
func (p *planner) place(d *destination, open bool) {
	action, target := d.Action, redirect.Target{Port: d.Port}
	switch {
	case d.bound && !open:
		action = policy.None
	case d.bound || action != policy.Accept:
	case d.target.Port == 0:
		action = policy.None
	default:
		target = d.target
	}
	if d.unsteered && !d.own {
		action = policy.None // the route to its address is all that it needs
	}
	p.put(d.Destination, action, d.own, target)
}

// put puts a destination into the set of its action, and removes it from the others.
func (p *planner) put(dst service.Destination, action policy.Action, own bool, target redirect.Target) {
	if action == policy.Accept && !own {
		p.steer.Set(dst, target)
	} else {
		p.steer.Remove(dst)
	}
	p.refuse.Put(dst, action == policy.Refuse && !own)
	p.silent.Put(dst, action == policy.Drop && !own)
	p.own.Put(dst, action != policy.None && own)
}

// use counts the destinations on an address, which is steered as long as it has any.
func (p *planner) use(d *destination, by int) {
	switch {
	case d.own:
	case d.whole:
		p.count(p.clusterUses, d.Addr, by)
	default:
		p.count(p.foreignUses, d.Addr, by)
	}
}

func (p *planner) count(uses map[netip.Addr]int, a netip.Addr, by int) {
	before := uses[a]
	after := before + by
	if uses[a] = after; after == 0 {
		delete(uses, a)
	}
	if before == 0 || after == 0 {
		p.touched[a] = struct{}{}
	}
}

// linger adds a destination to those that linger, or removes it.
func (p *planner) linger(dst service.Destination, in bool) {
	switch was := p.lingering.Has(dst); {
	case in && !was:
		p.count(p.foreignUses, dst.Addr, 1)
	case was && !in:
		p.count(p.foreignUses, dst.Addr, -1)
	}
	p.lingering.Put(dst, in)
}

// lingerIP does the same for a cluster IP.
func (p *planner) lingerIP(a netip.Addr, in bool) {
	if in {
		p.lingeringIPs[a] = struct{}{}
	} else {
		delete(p.lingeringIPs, a)
	}
	p.touched[a] = struct{}{}
}

// finish returns the plan; now is the time, as poll.Nanotime.
func (p *planner) finish(table *policy.Table, host hostnet.Addresses, now int64) redirect.Plan {
	if !maps.Equal(host, p.host) {
		p.host, p.node = host, reachable(host)
	}
	p.settle(host, now)
	p.replies = p.replies || table.KeepsClients()
	if p.moved {
		p.restart()
	}
	for a := range p.touched {
		p.assign(a)
	}
	clear(p.touched)
	return redirect.Plan{
		Steer:      p.steer.Map(),
		Refuse:     p.refuse.Map(),
		Silent:     p.silent.Map(),
		Local:      p.local.Map(),
		ClusterIPs: p.clusterIPs.Map(),
		NonLocal:   p.foreign.Map(),
		Lingering:  p.lingering.Map(),
		Own:        p.own.Map(),
		Node:       p.node,

		Sources:        sources(table, host),
		NodeSourceOnly: !p.replies,
	}
}

// sources returns this node's primary addresses that interfaces have, the first of
// each family (A4.7).
func sources(table *policy.Table, host hostnet.Addresses) (list redirect.Sources) {
	for _, a := range table.Primary() {
		if f := service.FamilyOf(a); !list[f].IsValid() && host.Has(a) {
			list[f] = a
		}
	}
	return list
}

// restart builds all sets of addresses anew.
func (p *planner) restart() {
	p.moved = false
	p.local, p.foreign = redirect.Builder[netip.Prefix, struct{}]{}, redirect.Builder[netip.Addr, struct{}]{}
	others := slices.Collect(maps.Keys(p.others))
	for _, r := range redirect.Cover(p.ranges) {
		for _, part := range redirect.Except(r, others) {
			p.local.Set(part, struct{}{})
		}
	}
	for a := range p.clusterUses {
		p.touched[a] = struct{}{}
	}
	for a := range p.foreignUses {
		p.touched[a] = struct{}{}
	}
	for a := range p.lingeringIPs {
		p.touched[a] = struct{}{}
	}
}

// assign puts an address into the sets where it belongs: this node delivers to itself
// the cluster IPs outside of the ranges, and those that linger. Other addresses are
// foreign (A3.13).
func (p *planner) assign(a netip.Addr) {
	_, cluster := p.clusterUses[a]
	_, others := p.foreignUses[a]
	_, lingers := p.lingeringIPs[a]
	covered := p.covers(a)
	p.clusterIPs.Put(a, cluster)
	p.foreign.Put(a, others && !cluster && !lingers && !covered)
	if !covered {
		p.local.Put(netip.PrefixFrom(a, a.BitLen()), cluster || lingers)
	}
}

// setRanges sets the ranges of cluster IPs that this node delivers to itself, and the
// addresses in them that other proxies serve (A1.1).
func (p *planner) setRanges(ranges []netip.Prefix, others map[netip.Addr]service.Other) {
	if !slices.Equal(ranges, p.ranges) || !maps.Equal(others, p.others) {
		p.ranges, p.others, p.moved = ranges, others, true
	}
}

// settle decides what lingers: what left the plan may carry connections (A8.7).
func (p *planner) settle(host hostnet.Addresses, now int64) {
	until := now + int64(redirect.Grace)
	for _, d := range p.gone {
		a := d.Addr
		_, cluster := p.clusterUses[a]
		switch {
		case d.own || host.Has(a) || cluster || p.covers(a) || !p.keeps(d.Protocol):
		case d.whole && !p.isOthers(a):
			p.lingerIP(a, true)
			p.grace[service.Destination{Addr: a}] = until
		case !p.planned(d.Destination):
			p.linger(d.Destination, true)
			p.grace[d.Destination] = until
		}
	}
	p.gone = nil
	for a := range p.lingeringIPs {
		if _, back := p.clusterUses[a]; back || p.covers(a) || p.isOthers(a) || host.Has(a) {
			p.lingerIP(a, false)
		}
	}
	for dst := range p.lingering.All() {
		_, cluster := p.clusterUses[dst.Addr]
		_, lingers := p.lingeringIPs[dst.Addr] // the whole address is local then
		if cluster || lingers || p.planned(dst) || p.covers(dst.Addr) || host.Has(dst.Addr) {
			p.linger(dst, false)
		}
	}
}

// planned reports whether a destination is in the plan.
func (p *planner) planned(dst service.Destination) bool {
	return p.steer.Has(dst) || p.refuse.Has(dst) || p.silent.Has(dst)
}

// isOthers reports whether another proxy serves a cluster IP.
func (p *planner) isOthers(a netip.Addr) bool {
	_, is := p.others[a]
	return is
}

// covers reports whether an address lies in a range of cluster IPs that this node
// delivers to itself.
func (p *planner) covers(a netip.Addr) bool {
	return !p.isOthers(a) && slices.ContainsFunc(p.ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}
