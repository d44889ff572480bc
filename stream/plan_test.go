package stream

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
)

// model is a plan that is made slowly and anew of all that there is.
type model struct {
	steer, refuse, silent, own map[service.Destination]struct{}
	clusterIPs, foreign        map[netip.Addr]struct{}
	local                      []netip.Prefix
}

func modelOf(table *policy.Table, host []netip.Addr, ranges []netip.Prefix) model {
	m := model{
		steer: map[service.Destination]struct{}{}, refuse: map[service.Destination]struct{}{},
		silent: map[service.Destination]struct{}{}, own: map[service.Destination]struct{}{},
		clusterIPs: map[netip.Addr]struct{}{}, foreign: map[netip.Addr]struct{}{},
	}
	for _, r := range ranges {
		if !slices.ContainsFunc(host, r.Contains) {
			m.local = append(m.local, r)
		}
	}
	covered := func(a netip.Addr) bool {
		return slices.ContainsFunc(m.local, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for _, port := range table.Snapshot().Ports {
		if port == nil {
			continue
		}
		for dst, kind := range table.Destinations(port) {
			own := slices.Contains(host, dst.Addr) || dst.Addr.IsLoopback()
			if kind == service.ClusterIP {
				if own {
					continue
				}
				m.clusterIPs[dst.Addr] = struct{}{}
			}
			switch action := table.Steering(dst); {
			case own:
				m.own[dst] = struct{}{}
			case action == policy.Accept:
				m.steer[dst] = struct{}{}
			case action == policy.Refuse:
				m.refuse[dst] = struct{}{}
			case action == policy.Drop:
				m.silent[dst] = struct{}{}
			}
			if !own {
				m.foreign[dst.Addr] = struct{}{}
			}
		}
	}
	for a := range m.clusterIPs {
		if !covered(a) {
			m.local = append(m.local, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	maps.DeleteFunc(m.foreign, func(a netip.Addr, _ struct{}) bool {
		_, cluster := m.clusterIPs[a]
		return cluster || covered(a)
	})
	return m
}

// randomWeb changes one of a few services that fight for a few addresses.
func randomWeb(r *rand.Rand, n *node) service.Change {
	pick := func(list ...string) string { return list[r.IntN(len(list))] }
	i := r.IntN(8)
	name := fmt.Sprintf("s%d", i)
	if r.IntN(6) == 0 {
		return objects.Gone(name, 1)
	}
	ip := fmt.Sprintf("10.%d.0.%d", 96+r.IntN(2), i+1)
	ep := netip.AddrPortFrom(n.lab.Backends[0].IPv4, 8080)
	if i%4 == 3 {
		ip = fmt.Sprintf("fd00:96::%d", i)
		ep = netip.AddrPortFrom(n.lab.Backends[0].IPv6, 8080)
	}
	c := web(name, ip, ep)
	if r.IntN(3) == 0 {
		c = web(name, ip)
		c.Deleted = objects.Gone(name, 1).Deleted[1:]
	}
	s := c.Services[0]
	if r.IntN(4) == 0 {
		s.Spec.Ports[0].Protocol = corev1.ProtocolUDP
	}
	if r.IntN(2) == 0 {
		s.Spec.ExternalIPs = []string{pick("192.0.2.1", "192.0.2.2", "10.1.0.1", "2001:db8::1", "10.96.0.7")}
	}
	if r.IntN(2) == 0 {
		c = nodePort(c, int32([]int{80, 30080, 30081, 30082}[r.IntN(4)]))
	}
	if r.IntN(3) == 0 {
		c = balanced(c, pick("192.0.2.1", "192.0.2.3", "10.1.0.1", "2001:db8::3"), pick("10.1.0.0/24", "10.2.0.0/16"))
	}
	if r.IntN(3) == 0 {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if r.IntN(4) == 0 {
		local := corev1.ServiceInternalTrafficPolicyLocal
		s.Spec.InternalTrafficPolicy = &local
	}
	return c
}

// TestPlanAgainstModel: whatever happens to services and to the node's
// addresses, the plan that grew is the one that is made anew, and each bound port's
// socket does what it should.
func TestPlanAgainstModel(t *testing.T) {
	netns.Require(t)
	for _, bindEach := range []bool{false, true} {
		t.Run(fmt.Sprintf("bindEach=%t", bindEach), func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			ranges := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
			host := []netip.Addr{lab.Node.IPv4, lab.Node.IPv6}
			n := newNode(t, lab, func(o *setup) {
				o.ServiceCIDRs = ranges
				o.HostAddresses = func() []netip.Addr { return host }
				o.Redirector.(*spy).Redirector = nowhere{bindEach: bindEach}
			})
			n.policy.LocalhostNodePorts = true
			r := rand.New(rand.NewPCG(7, 7))
			for step := range 400 {
				if r.IntN(20) == 0 {
					host = host[:2:2]
					if r.IntN(2) == 0 {
						host = append(host, netip.MustParseAddr("192.0.2.1"))
					}
					n.policy.NodeAddresses = host
				}
				n.apply(randomWeb(r, n))
				n.pass() // nothing has connections: nothing lingers
				must.OKf(t, n.agrees(modelOf(n.server.state.Load().table, host, ranges), bindEach), "step %d", step)
			}
		})
	}
}

// agrees compares the plan and the sockets with the model.
func (n *node) agrees(want model, bindEach bool) error {
	p := &n.steer.plan
	steered := make(map[service.Destination]struct{})
	for dst, target := range p.Steer.All() {
		steered[dst] = struct{}{}
		if bindEach && target.Port != dst.Port || !bindEach && !boundTo(target.FD, netip.AddrPortFrom(redirect.ListenAddress(service.FamilyOf(dst.Addr)), target.Port)) {
			return fmt.Errorf("%s has target %+v", dst, target)
		}
	}
	for name, c := range map[string]struct {
		got  redirect.Set[service.Destination]
		want map[service.Destination]struct{}
	}{
		"steer": {setOf(steered), want.steer}, "refuse": {p.Refuse, want.refuse}, "silent": {p.Silent, want.silent},
		"own": {p.Own, want.own}, "lingering": {p.Lingering, nil},
	} {
		if !c.got.Equal(setOf(c.want)) {
			return fmt.Errorf("%s: %v, want %v", name, c.got, c.want)
		}
	}
	if !p.ClusterIPs.Equal(setOf(want.clusterIPs)) || !p.NonLocal.Equal(setOf(want.foreign)) {
		return fmt.Errorf("cluster IPs %v, foreign %v, want %v and %v", p.ClusterIPs, p.NonLocal, want.clusterIPs, want.foreign)
	}
	if got, want := redirect.Ranges(p.Local), redirect.Cover(want.local); !slices.Equal(got, want) {
		return fmt.Errorf("local %v, want %v", got, want)
	}
	sockets, bound := 0, 0
	count := func(set map[service.Destination]struct{}) {
		for dst := range set {
			if dst.Protocol == service.TCP {
				bound++
				sockets++
			} else {
				sockets += loops
			}
		}
	}
	if count(want.own); bindEach {
		count(want.steer)
		count(want.refuse)
		count(want.silent)
	}
	if got := n.manager.Stats(); got.Claims != int64(sockets) || got.Conflicts+got.Unclaimed != 0 || len(n.server.bound) != bound {
		return fmt.Errorf("%d sockets of bound ports, %d of TCP, %d missing, want %d and %d", got.Claims, len(n.server.bound), got.Conflicts+got.Unclaimed, sockets, bound)
	}
	table := n.server.state.Load().table
	for dst, b := range n.server.bound {
		if b.does != table.Steering(dst) {
			return fmt.Errorf("the socket of %s does %s, want %s", dst, b.does, table.Steering(dst))
		}
		if !boundTo(b.socket.fd, netip.AddrPortFrom(dst.Addr, dst.Port)) {
			return fmt.Errorf("the socket of %s is bound elsewhere", dst)
		}
	}
	return nil
}

func boundTo(fd int, addr netip.AddrPort) bool {
	got, errno := sys.LocalAddr(fd)
	return errno == 0 && got == addr
}

func setOf[K redirect.Key](keys map[K]struct{}) redirect.Set[K] {
	return redirect.SetOf(slices.Collect(maps.Keys(keys))...)
}
