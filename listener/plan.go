package listener

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// planner keeps the plan of what is steered. It changes what changed, and a
// map that did not change stays the same one from plan to plan, so that a change
// of one service costs the same however many there are.
type planner struct {
	steer      shared[service.Destination, redirect.Target]
	refuse     shared[service.Destination, struct{}]
	silent     shared[service.Destination, struct{}]
	own        shared[service.Destination, struct{}]
	clusterIPs shared[netip.Addr, struct{}]
	// lingering are destinations on foreign addresses that are not served any
	// more but may carry connections; lingeringIPs are cluster IPs of that kind
	// that no service range covers.
	lingering    shared[service.Destination, struct{}]
	lingeringIPs map[netip.Addr]struct{}
	// late are those of both that connections may still come to which nobody
	// knows of yet, and until when, as poll.Nanotime.
	late map[service.Destination]int64

	clusterUses map[netip.Addr]int // outlets on a cluster IP
	foreignUses map[netip.Addr]int // outlets on other addresses that are not this node's
	touched     []netip.Addr       // cluster IPs that came or went since the last plan
	left        []*outlet          // outlets that lost their place since then

	ranges  []netip.Prefix // of cluster IPs, that no address of this node lies in
	local   []netip.Prefix
	foreign map[netip.Addr]struct{}
	moved   bool // local and foreign have to be made anew
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
		foreign:      make(map[netip.Addr]struct{}),
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
	in := func(set *shared[service.Destination, struct{}], is bool) {
		if is {
			set.set(dst, struct{}{})
		} else {
			set.remove(dst)
		}
	}
	if action == policy.Accept && !own {
		p.steer.set(dst, target)
	} else {
		p.steer.remove(dst)
	}
	in(&p.refuse, action == policy.Refuse && !own)
	in(&p.silent, action == policy.Drop && !own)
	in(&p.own, action != policy.None && own)
}

// use counts the outlets on an address, which is steered as long as there are
// any.
func (p *planner) use(o *outlet, by int) {
	if o.own {
		return
	}
	uses := p.foreignUses
	if o.kind == service.ClusterIP {
		uses = p.clusterUses
	}
	before := uses[o.dst.Addr]
	after := before + by
	if uses[o.dst.Addr] = after; after == 0 {
		delete(uses, o.dst.Addr)
	}
	if before != 0 && after != 0 {
		return
	}
	p.moved = true
	if o.kind == service.ClusterIP {
		p.touched = append(p.touched, o.dst.Addr)
	}
}

// finish gives the plan; now is the time, as poll.Nanotime.
func (p *planner) finish(s *state, now int64) redirect.Plan {
	p.settle(s.host, now)
	p.replies = p.replies || s.table.KeepsClients()
	if p.moved {
		p.moved = false
		p.local = p.makeLocal()
		if foreign := p.makeForeign(); !maps.Equal(foreign, p.foreign) {
			p.foreign = foreign
		}
	}
	return redirect.Plan{
		Steer:      p.steer.share(),
		Refuse:     p.refuse.share(),
		Silent:     p.silent.share(),
		Local:      p.local,
		ClusterIPs: p.clusterIPs.share(),
		Foreign:    p.foreign,
		Lingering:  p.lingering.share(),
		Own:        p.own.share(),

		NodeSourceOnly: !p.replies,
	}
}

// setRanges says which ranges of cluster IPs this node delivers to itself.
func (p *planner) setRanges(ranges []netip.Prefix) {
	if !slices.Equal(ranges, p.ranges) {
		p.ranges, p.moved = ranges, true
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
		case o.kind == service.ClusterIP:
			p.lingeringIPs[a] = struct{}{}
			p.late[service.Destination{Addr: a}] = late
			p.moved = true
		case !p.planned(o.dst):
			p.lingering.set(o.dst, struct{}{})
			p.late[o.dst] = late
			p.moved = true
		}
	}
	p.left = nil
	for a := range p.lingeringIPs {
		if _, back := p.clusterUses[a]; back || p.covers(a) || host.has(a) {
			delete(p.lingeringIPs, a)
			p.moved = true
		}
	}
	for dst := range p.lingering.m {
		_, cluster := p.clusterUses[dst.Addr]
		if cluster || p.planned(dst) || p.covers(dst.Addr) || host.has(dst.Addr) {
			p.lingering.remove(dst)
			p.moved = true
		}
	}
	for _, a := range p.touched {
		if _, is := p.clusterUses[a]; is {
			p.clusterIPs.set(a, struct{}{})
		} else {
			p.clusterIPs.remove(a)
		}
	}
	p.touched = nil
}

// planned tells whether a destination is in the plan.
func (p *planner) planned(dst service.Destination) bool {
	return p.steer.has(dst) || p.refuse.has(dst) || p.silent.has(dst)
}

// covers tells whether an address lies in a range of cluster IPs.
func (p *planner) covers(a netip.Addr) bool {
	return slices.ContainsFunc(p.ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}

// makeLocal says what this node delivers to itself: the ranges of cluster IPs,
// the cluster IPs outside of them, and those that linger.
func (p *planner) makeLocal() []netip.Prefix {
	local := slices.Clone(p.ranges)
	add := func(a netip.Addr) {
		if !p.covers(a) {
			local = append(local, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	for a := range p.clusterUses {
		add(a)
	}
	for a := range p.lingeringIPs {
		add(a)
	}
	return local
}

// makeForeign gives the addresses that are not ours to own (A3.13).
func (p *planner) makeForeign() map[netip.Addr]struct{} {
	foreign := make(map[netip.Addr]struct{})
	add := func(a netip.Addr) {
		_, cluster := p.clusterUses[a]
		if _, lingers := p.lingeringIPs[a]; !cluster && !lingers && !p.covers(a) {
			foreign[a] = struct{}{}
		}
	}
	for a := range p.foreignUses {
		add(a)
	}
	for dst := range p.lingering.m {
		add(dst.Addr)
	}
	return foreign
}

// shared is a map that others read once it was shared: the next change is made
// to a copy.
type shared[K comparable, V comparable] struct {
	m    map[K]V
	mine bool // nobody else has m
}

func (s *shared[K, V]) has(k K) bool {
	_, is := s.m[k]
	return is
}

func (s *shared[K, V]) set(k K, v V) {
	if old, is := s.m[k]; is && old == v {
		return
	}
	s.own()
	s.m[k] = v
}

func (s *shared[K, V]) remove(k K) {
	if s.has(k) {
		s.own()
		delete(s.m, k)
	}
}

func (s *shared[K, V]) own() {
	switch {
	case s.mine:
		return
	case s.m == nil:
		s.m = make(map[K]V)
	default:
		s.m = maps.Clone(s.m)
	}
	s.mine = true
}

// share gives the map to others.
func (s *shared[K, V]) share() map[K]V {
	if s.m == nil {
		s.m = make(map[K]V)
	}
	s.mine = false
	return s.m
}
