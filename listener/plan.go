package listener

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// planner keeps the plan of what is steered. It changes what changed, and shares
// the rest with the plans before, so that a change of one service costs the
// same however many there are.
type planner struct {
	steer  redirect.Builder[service.Destination, redirect.Target]
	refuse redirect.Builder[service.Destination, struct{}]
	silent redirect.Builder[service.Destination, struct{}]
	own    redirect.Builder[service.Destination, struct{}]
	node   redirect.Set[netip.Addr] // of host
	host   hostAddresses
	// lingering are destinations on foreign addresses that are not served any
	// more but may carry connections; lingeringIPs are cluster IPs of that kind
	// that no service range covers.
	lingering    redirect.Builder[service.Destination, struct{}]
	lingeringIPs map[netip.Addr]struct{}
	// late are those of both that connections may still come to which nobody
	// knows of yet, and until when, as poll.Nanotime.
	late map[service.Destination]int64

	// How many outlets there are on a cluster IP, and how many outlets and
	// lingering destinations on other addresses that are not this node's.
	clusterUses map[netip.Addr]int
	foreignUses map[netip.Addr]int

	clusterIPs redirect.Builder[netip.Addr, struct{}]
	foreign    redirect.Builder[netip.Addr, struct{}]
	local      redirect.Builder[netip.Prefix, struct{}]
	ranges     []netip.Prefix               // of cluster IPs, that no address of this node lies in
	others     map[netip.Addr]service.Other // cluster IPs that other proxies serve: left alone
	moved      bool                         // they changed since the last plan
	touched    map[netip.Addr]struct{}      // addresses whose place may have changed since then
	left       []*outlet                    // outlets that lost theirs
	// replies says that sockets may be bound to clients' addresses: once a policy
	// had it so, there may be some for as long as the process lives.
	replies bool
}

func newPlanner() planner {
	return planner{
		lingeringIPs: make(map[netip.Addr]struct{}),
		late:         make(map[service.Destination]int64),
		clusterUses:  make(map[netip.Addr]int),
		foreignUses:  make(map[netip.Addr]int),
		touched:      make(map[netip.Addr]struct{}),
	}
}

// replace puts an outlet in the place of another one for the same destination;
// either may be nil. held says that a claimed one has its socket.
func (p *planner) replace(was, is *outlet, held bool) {
	if is != nil {
		p.use(is, 1)
	}
	if was != nil {
		p.use(was, -1)
		if is == nil || is.own != was.own {
			p.left = append(p.left, was)
		}
	}
	if is == nil {
		p.put(was.dst, policy.None, false, redirect.Target{})
		return
	}
	p.place(is, held)
}

// place puts an outlet where it belongs.
func (p *planner) place(o *outlet, held bool) {
	action, target := o.action, redirect.Target{Port: o.dst.Port}
	switch {
	case o.claimed && !held:
		action = policy.None
	case o.claimed || action != policy.Accept:
	case o.target.Port != 0:
		target = o.target
	case o.lane == nil:
		action = policy.None
	default:
		side := &o.lane.sides[service.FamilyOf(o.dst.Addr)]
		target = redirect.Target{Port: side.port, FD: side.socket.fd}
	}
	p.put(o.dst, action, o.own, target)
}

// put has a destination in one set at most.
func (p *planner) put(dst service.Destination, action policy.Action, own bool, target redirect.Target) {
	if action == policy.Accept && !own {
		p.steer.Set(dst, target)
	} else {
		p.steer.Remove(dst)
	}
	keep(&p.refuse, dst, action == policy.Refuse && !own)
	keep(&p.silent, dst, action == policy.Drop && !own)
	keep(&p.own, dst, action != policy.None && own)
}

// keep has a key in a set, or not.
func keep[K redirect.Key](set *redirect.Builder[K, struct{}], k K, in bool) {
	if in {
		set.Set(k, struct{}{})
	} else {
		set.Remove(k)
	}
}

// use counts the outlets on an address, which is steered as long as there are
// any.
func (p *planner) use(o *outlet, by int) {
	switch {
	case o.own:
	case o.kind == service.ClusterIP:
		p.count(p.clusterUses, o.dst.Addr, by)
	default:
		p.count(p.foreignUses, o.dst.Addr, by)
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

// linger has a destination among those that linger, or not.
func (p *planner) linger(dst service.Destination, in bool) {
	switch was := p.lingering.Has(dst); {
	case in && !was:
		p.count(p.foreignUses, dst.Addr, 1)
	case was && !in:
		p.count(p.foreignUses, dst.Addr, -1)
	}
	keep(&p.lingering, dst, in)
}

// lingerIP is the same for a cluster IP.
func (p *planner) lingerIP(a netip.Addr, in bool) {
	if in {
		p.lingeringIPs[a] = struct{}{}
	} else {
		delete(p.lingeringIPs, a)
	}
	p.touched[a] = struct{}{}
}

// finish gives the plan; now is the time, as poll.Nanotime.
func (p *planner) finish(s *state, now int64) redirect.Plan {
	if !maps.Equal(s.host, p.host) {
		p.host, p.node = s.host, s.host.reachable()
	}
	p.settle(s.host, now)
	p.replies = p.replies || s.table.KeepsClients()
	if p.moved {
		p.restart()
	}
	for a := range p.touched {
		p.home(a)
	}
	clear(p.touched)
	return redirect.Plan{
		Steer:      p.steer.Map(),
		Refuse:     p.refuse.Map(),
		Silent:     p.silent.Map(),
		Local:      p.local.Map(),
		ClusterIPs: p.clusterIPs.Map(),
		Foreign:    p.foreign.Map(),
		Lingering:  p.lingering.Map(),
		Own:        p.own.Map(),
		Node:       p.node,

		Sources:        sources(s),
		NodeSourceOnly: !p.replies,
	}
}

// sources gives this node's primary addresses that interfaces have, the first of
// each family (A4.7).
func sources(s *state) (list redirect.Sources) {
	for _, a := range s.table.Primary() {
		if f := service.FamilyOf(a); !list[f].IsValid() && s.host.has(a) {
			list[f] = a
		}
	}
	return list
}

// restart has all addresses placed anew.
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

// home says whose an address is: this node delivers to itself the cluster IPs
// outside of the ranges, and those that linger; others are not ours to own
// (A3.13).
func (p *planner) home(a netip.Addr) {
	_, cluster := p.clusterUses[a]
	_, others := p.foreignUses[a]
	_, lingers := p.lingeringIPs[a]
	covered := p.covers(a)
	keep(&p.clusterIPs, a, cluster)
	keep(&p.foreign, a, others && !cluster && !lingers && !covered)
	if !covered {
		keep(&p.local, netip.PrefixFrom(a, a.BitLen()), cluster || lingers)
	}
}

// setRanges says which ranges of cluster IPs this node delivers to itself, and
// which addresses in them other proxies serve (A1.1).
func (p *planner) setRanges(ranges []netip.Prefix, others map[netip.Addr]service.Other) {
	if !slices.Equal(ranges, p.ranges) || !maps.Equal(others, p.others) {
		p.ranges, p.others, p.moved = ranges, others, true
	}
}

// settle says what lingers: what left the plan may carry connections (A8.7).
func (p *planner) settle(host hostAddresses, now int64) {
	late := now + int64(lateTime)
	for _, o := range p.left {
		a := o.dst.Addr
		_, cluster := p.clusterUses[a]
		switch {
		case o.own || host.has(a) || cluster || p.covers(a) || o.dst.Protocol != service.TCP:
		case o.kind == service.ClusterIP && !p.isOthers(a):
			p.lingerIP(a, true)
			p.late[service.Destination{Addr: a}] = late
		case !p.planned(o.dst):
			p.linger(o.dst, true)
			p.late[o.dst] = late
		}
	}
	p.left = nil
	for a := range p.lingeringIPs {
		if _, back := p.clusterUses[a]; back || p.covers(a) || p.isOthers(a) || host.has(a) {
			p.lingerIP(a, false)
		}
	}
	for dst := range p.lingering.All() {
		_, cluster := p.clusterUses[dst.Addr]
		_, lingers := p.lingeringIPs[dst.Addr] // the whole address is local then
		if cluster || lingers || p.planned(dst) || p.covers(dst.Addr) || host.has(dst.Addr) {
			p.linger(dst, false)
		}
	}
}

// planned tells whether a destination is in the plan.
func (p *planner) planned(dst service.Destination) bool {
	return p.steer.Has(dst) || p.refuse.Has(dst) || p.silent.Has(dst)
}

// isOthers tells whether another proxy serves a cluster IP.
func (p *planner) isOthers(a netip.Addr) bool {
	_, is := p.others[a]
	return is
}

// covers tells whether an address lies in a range of cluster IPs that this node
// delivers to itself.
func (p *planner) covers(a netip.Addr) bool {
	return !p.isOthers(a) && slices.ContainsFunc(p.ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}
