package policy

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/service"
)

// model decides as Resolve does, slowly and plainly, from what the services
// were described with.
type model struct {
	svcs      []svc
	eps       map[string][]service.Endpoint // by service name
	cfg       Config
	zone      string
	nodeAddrs []netip.Addr // the Node object's, then the configured
	labels    map[string]string
	others    map[string]string // the labels of n1
}

func (m *model) resolve(p service.Protocol, client netip.Addr, dst netip.AddrPort) string {
	s, kind := m.find(p, dst)
	if s == nil {
		for _, o := range m.svcs {
			if slices.Contains(addresses(strings.Fields(o.clusterIPs)...), dst.Addr()) {
				return "refuse A3.12"
			}
		}
		for _, c := range m.cfg.ServiceCIDRs {
			if c.Contains(dst.Addr()) {
				return "drop A3.12"
			}
		}
		return "none A3.13"
	}
	var eps []service.Endpoint
	for _, e := range m.eps[s.name] {
		if e.Addr.Addr().Is4() == dst.Addr().Is4() {
			eps = append(eps, e)
		}
	}
	slices.SortFunc(eps, func(a, b service.Endpoint) int {
		return strings.Compare(a.Addr.Addr().String()+":8080", b.Addr.Addr().String()+":8080")
	})
	clusterList := m.clusterList(eps)
	if keys := s.annotations["sluice.dev/topology-keys"]; keys != "" && s.external != "Local" {
		clusterList = m.keyedList(eps, strings.Split(keys, ","))
	}
	usesLocal := kind == "ClusterIP" && s.internal == "Local" || kind != "ClusterIP" && s.external == "Local"
	if !m.anyUsable(eps) || len(clusterList) == 0 && !usesLocal {
		return "refuse A3.4"
	}
	if kind == "LoadBalancer" && !m.admitted(s, client) {
		return "drop A3.10"
	}
	isPod, podsKnown := m.isPod(client)
	isNode := client.IsLoopback() || slices.Contains(m.nodeAddrs, client)
	rule, list, source := "A3.3", clusterList, "node A3.8"
	switch {
	case kind == "ClusterIP":
		rule = "A3.2"
		if s.internal == "Local" {
			list = m.localList(eps)
		}
		if !m.cfg.MasqueradeAll && (!podsKnown || isPod) && !client.IsLoopback() && client != dst.Addr() {
			source = "client A3.9"
		}
	case s.external == "Local" && isPod:
		rule, source = "A3.6", "client A3.9"
	case s.external == "Local" && isNode:
		rule = "A3.6"
	case s.external == "Local":
		list, source = m.localList(eps), "client A3.9"
	}
	if len(list) == 0 {
		return "drop A3.5"
	}
	if len(list) == 1 && list[0].Addr.Addr() == client {
		source = "node A3.8"
	}
	return fmt.Sprintf("accept %s %s: %s", rule, source, names(list))
}

func (m *model) find(p service.Protocol, dst netip.AddrPort) (*svc, string) {
	for i := range m.svcs { // the world has no conflicts
		s := &m.svcs[i]
		if (s.protocol == corev1.ProtocolUDP) != (p == service.UDP) {
			continue
		}
		hasFamily := slices.ContainsFunc(addresses(strings.Fields(s.clusterIPs)...), func(a netip.Addr) bool {
			return a.Is4() == dst.Addr().Is4()
		})
		switch is := func(list string) bool {
			return hasFamily && dst.Port() == 80 && slices.Contains(addresses(strings.Fields(list)...), dst.Addr())
		}; {
		case is(s.clusterIPs):
			return s, "ClusterIP"
		case is(s.balancerIPs):
			return s, "LoadBalancer"
		case is(s.externalIPs):
			return s, "ExternalIP"
		case hasFamily && s.nodePort != 0 && int32(dst.Port()) == s.nodePort && m.hasNodePorts(dst.Addr()):
			return s, "NodePort"
		}
	}
	return nil, ""
}

func (m *model) hasNodePorts(a netip.Addr) bool {
	if a.IsLoopback() || !slices.Contains(m.nodeAddrs, a) {
		return false
	}
	ofFamily := 0
	for _, p := range m.cfg.NodePortAddresses {
		if p.Addr().Is4() == a.Is4() {
			ofFamily++
			if p.Contains(a) {
				return true
			}
		}
	}
	return ofFamily == 0
}

func (m *model) isPod(a netip.Addr) (isPod, known bool) {
	for _, p := range m.cfg.ClusterCIDRs {
		if p.Addr().Is4() == a.Is4() {
			return p.Contains(a), true // the first of the family
		}
	}
	return false, false
}

func (m *model) admitted(s *svc, client netip.Addr) bool {
	var ranges []netip.Prefix
	for _, p := range prefixes(strings.Fields(s.ranges)...) {
		if p.Addr().Is4() == client.Is4() {
			ranges = append(ranges, p)
		}
	}
	if len(ranges) == 0 {
		return true
	}
	nodeIn := false
	for _, p := range ranges {
		if p.Bits() == 0 || p.Contains(client) {
			return true
		}
		for _, a := range m.nodeAddrs[:2] { // the Node object's
			nodeIn = nodeIn || p.Contains(a)
		}
	}
	return nodeIn && (client.IsLoopback() || slices.Contains(m.nodeAddrs, client) ||
		slices.Contains(addresses(strings.Fields(s.balancerIPs)...), client))
}

func (m *model) anyUsable(eps []service.Endpoint) bool {
	for _, e := range eps {
		if e.Ready || e.Serving && e.Terminating {
			return true
		}
	}
	return false
}

func keep(eps []service.Endpoint, f func(service.Endpoint) bool) []service.Endpoint {
	var out []service.Endpoint
	for _, e := range eps {
		if f(e) {
			out = append(out, e)
		}
	}
	return out
}

func (m *model) clusterList(eps []service.Endpoint) []service.Endpoint {
	ready := keep(eps, func(e service.Endpoint) bool { return e.Ready })
	if len(ready) == 0 {
		return keep(eps, func(e service.Endpoint) bool { return e.Serving && e.Terminating })
	}
	here := func(e service.Endpoint) bool { return slices.Contains(e.NodeHints, ownNode) }
	near := func(e service.Endpoint) bool { return m.zone != "" && slices.Contains(e.ZoneHints, m.zone) }
	if len(keep(ready, func(e service.Endpoint) bool { return len(e.NodeHints) == 0 })) == 0 && len(keep(ready, here)) > 0 {
		return keep(ready, here)
	}
	if len(keep(ready, func(e service.Endpoint) bool { return len(e.ZoneHints) == 0 })) == 0 && len(keep(ready, near)) > 0 {
		return keep(ready, near)
	}
	return ready
}

// keyedList knows that the node n0 has the labels of m.labels and n1 those of
// m.others.
func (m *model) keyedList(eps []service.Endpoint, keys []string) []service.Endpoint {
	usable := keep(eps, func(e service.Endpoint) bool { return e.Ready })
	if len(usable) == 0 {
		usable = keep(eps, func(e service.Endpoint) bool { return e.Serving && e.Terminating })
	}
	for _, k := range keys {
		near := keep(usable, func(e service.Endpoint) bool {
			its := map[string]map[string]string{ownNode: m.labels, "n1": m.others}[e.Node]
			return k == "*" || m.labels[k] != "" && m.labels[k] == its[k]
		})
		if len(near) > 0 {
			return near
		}
	}
	return nil
}

func (m *model) localList(eps []service.Endpoint) []service.Endpoint {
	if ready := keep(eps, func(e service.Endpoint) bool { return e.Local && e.Ready }); len(ready) > 0 {
		return ready
	}
	return keep(eps, func(e service.Endpoint) bool { return e.Local && e.Serving && e.Terminating })
}

func randomSvc(r *rand.Rand, i int) svc {
	pick := func(list ...string) string { return list[r.IntN(len(list))] }
	s := svc{
		name:       fmt.Sprintf("s%d", i),
		clusterIPs: pick(fmt.Sprintf("10.96.0.%d", i), fmt.Sprintf("fd00::%d", i), fmt.Sprintf("10.96.0.%d fd00::%d", i, i)),
		protocol:   corev1.Protocol(pick("TCP", "TCP", "UDP")),
		internal:   corev1.ServiceInternalTrafficPolicy(pick("Cluster", "Local", "")),
		external:   corev1.ServiceExternalTrafficPolicy(pick("Cluster", "Local", "")),
	}
	if r.IntN(2) == 0 {
		s.externalIPs = pick(fmt.Sprintf("192.0.2.%d", i), fmt.Sprintf("192.0.2.%d 2001:db8:1::%d", i, i))
	}
	if r.IntN(2) == 0 {
		s.balancerIPs = pick(fmt.Sprintf("192.0.2.%d", i), fmt.Sprintf("192.0.2.%d 2001:db8:1::%d", 10+i, i))
		s.ranges = pick("", "203.0.113.0/24", "203.0.113.0/24 172.16.0.0/24", "2001:db8::/48", "0.0.0.0/0 203.0.113.0/24")
	}
	if r.IntN(2) == 0 {
		s.nodePort = int32(30000 + i)
	}
	if r.IntN(4) == 0 && s.external != "Local" {
		s.annotations = map[string]string{"sluice.dev/topology-keys": pick("rack", "rack,*", "row", "row,rack", "*", "topology.kubernetes.io/zone,row")}
	}
	hinted := r.IntN(3)
	for j := range r.IntN(6) {
		for _, f := range []string{"10.244.0.%d", "fd44::%d"} {
			e := fmt.Sprintf(f, 4+j) + " " + pick("ready", "ready", "draining", "unready", "serving") + " " + pick("local", "node=n1", "")
			if hinted > 0 && r.IntN(8) > 0 {
				e += " zonehint=" + pick("a", "b")
			}
			if hinted > 1 && r.IntN(8) > 0 {
				e += " nodehint=" + pick(ownNode, "n1")
			}
			s.endpoints = append(s.endpoints, e)
		}
	}
	return s
}

var worlds = flag.Uint64("worlds", 250, "how many clusters TestResolveAgainstModel goes through")

// TestResolveAgainstModel asks both about random clusters, clients and
// destinations.
func TestResolveAgainstModel(t *testing.T) {
	const questions = 400
	seen := map[string]int{}
	for seed := range *worlds {
		r := rand.New(rand.NewPCG(2, seed))
		m := &model{eps: map[string][]service.Endpoint{}, zone: []string{"", "a", "b"}[r.IntN(3)]}
		m.nodeAddrs = addresses("172.16.0.1", "fd01::1")
		for i := range 4 {
			s := randomSvc(r, i)
			m.svcs = append(m.svcs, s)
			for _, text := range s.endpoints {
				m.eps[s.name] = append(m.eps[s.name], parseEndpoint(t, text))
			}
		}
		m.cfg = Config{NodeName: ownNode, MasqueradeAll: r.IntN(4) == 0}
		if r.IntN(3) > 0 {
			m.cfg.ClusterCIDRs = prefixes("10.244.0.0/16", "10.245.0.0/16")
		}
		if r.IntN(2) == 0 {
			m.cfg.ClusterCIDRs = append(m.cfg.ClusterCIDRs, prefixes("fd44::/16")...)
		}
		if r.IntN(2) == 0 {
			m.cfg.ServiceCIDRs = prefixes("10.96.0.0/24")
		}
		if r.IntN(2) == 0 {
			m.cfg.NodeAddresses = addresses("10.244.0.1", "192.168.7.1")
			m.nodeAddrs = append(m.nodeAddrs, m.cfg.NodeAddresses...)
		}
		if r.IntN(2) == 0 {
			m.cfg.NodePortAddresses = prefixes("172.16.0.0/12")
		}
		random := func() map[string]string {
			return map[string]string{"rack": fmt.Sprint(r.IntN(2)), "row": fmt.Sprint(r.IntN(2))}
		}
		m.labels, m.others = random(), random()
		m.others["topology.kubernetes.io/zone"] = "a"
		if m.zone != "" {
			m.labels["topology.kubernetes.io/zone"] = m.zone
		}
		c := change(t, m.svcs...)
		c.Nodes = append(c.Nodes, nodeObject(ownNode, m.labels, "172.16.0.1", "fd01::1"), nodeObject("n1", m.others))
		snap := newStore().Apply(c)
		if len(snap.Problems) > 0 {
			t.Fatalf("seed %d: %v", seed, snap.Problems)
		}
		table := Compile(nil, snap, m.cfg)
		sources := addresses("10.244.0.1", "10.244.0.4", "10.244.0.5", "10.245.0.1", "172.16.0.1", "192.168.7.1", "127.0.0.1", "203.0.113.9", "198.51.100.7",
			"192.0.2.1", "192.0.2.11", "10.96.0.1", "fd44::5", "fd01::1", "::1", "2001:db8::1", "2001:db8:9::1")
		for range questions {
			proto := []service.Protocol{service.TCP, service.UDP}[r.IntN(2)]
			i := r.IntN(4)
			dst := []string{fmt.Sprintf("10.96.0.%d", i), fmt.Sprintf("fd00::%d", i), fmt.Sprintf("192.0.2.%d", i), fmt.Sprintf("192.0.2.%d", 10+i),
				fmt.Sprintf("2001:db8:1::%d", i), "172.16.0.1", "192.168.7.1", "fd01::1", "127.0.0.1"}[r.IntN(9)]
			port := uint16(80)
			if onNode := slices.Contains([]string{"172.16.0.1", "192.168.7.1", "fd01::1", "127.0.0.1"}, dst); onNode != (r.IntN(10) == 0) {
				port = uint16(30000 + i)
			}
			at := netip.AddrPortFrom(netip.MustParseAddr(dst), port)
			client := sources[r.IntN(len(sources))]
			if client.Is4() != at.Addr().Is4() {
				continue
			}
			v := table.Resolve(proto, client, at)
			got, want := say(v), m.resolve(proto, client, at)
			if got != want {
				t.Fatalf("seed %d: %s from %s to %s with %+v and %+v\ngot  %q\nwant %q", seed, proto, client, at, m.svcs, m.cfg, got, want)
			}
			seen[strings.Join(strings.Fields(got)[:2], " ")]++
			steer := table.Steering(service.Destination{Addr: at.Addr(), Port: port, Protocol: proto})
			if v.Action != steer && steer != Accept {
				t.Fatalf("seed %d: %s from %s to %s is %q, but steering says %s", seed, proto, client, at, got, steer)
			}
		}
	}
	for _, outcome := range []string{"accept A3.2", "accept A3.3", "accept A3.6", "refuse A3.4", "drop A3.5", "drop A3.10", "refuse A3.12", "drop A3.12", "none A3.13"} {
		if seen[outcome] == 0 {
			t.Errorf("no case ended in %q", outcome)
		}
	}
	t.Logf("%v", seen)
}
