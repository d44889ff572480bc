// Package slowpolicy is a second implementation of the decisions, for tests: the
// rules as plainly as possible, straight from API objects, without preparation,
// and without code of the packages that serve.
package slowpolicy

import (
	"net/netip"
	"slices"
	"sort"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// Cluster is everything on which decisions depend. No two services may have the
// same address and port.
type Cluster struct {
	Services []*corev1.Service
	Slices   []*discoveryv1.EndpointSlice
	Nodes    []*corev1.Node

	NodeName          string // of one of Nodes
	ProxyName         string // A1.2
	NodeIPs           []netip.Addr
	NodeAddresses     []netip.Addr // of its interfaces
	ClusterCIDRs      []netip.Prefix
	DetectLocal       string         // A4.6: "ClusterCIDR", "NodeCIDR" or "Interface"
	PodRanges         []netip.Prefix // for "Interface"
	ServiceCIDRs      []netip.Prefix
	NodePortAddresses []string // as the flag has them: CIDRs and words
	// LocalhostNodePorts is A4.5.
	LocalhostNodePorts bool
	MasqueradeAll      bool
}

// Answer is a decision, in the words of sluice explain.
type Answer struct {
	Verdict, Service, Address, Policy string
	Candidates                        []string
	Source, Affinity                  string
	Rule                              string // that decided the verdict
	SourceRule                        string
}

type endpoint struct {
	addr                        string
	ready, serving, terminating bool
	node                        string
	zoneHints, nodeHints        []string
}

func (e endpoint) draining() bool { return e.serving && e.terminating }

// Resolve decides about a connection. protocol is "TCP", "UDP" or "SCTP".
func (c *Cluster) Resolve(protocol string, client netip.Addr, to netip.AddrPort) Answer {
	svc, port, kind := c.find(protocol, to)
	if svc == nil {
		return c.unclaimed(to.Addr())
	}
	a := Answer{Service: svc.Namespace + "/" + svc.Name, Address: kind, Affinity: "None", Candidates: []string{}}
	if port.Name != "" {
		a.Service += ":" + port.Name
	}
	if svc.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		a.Affinity = "ClientIP"
	}
	a.Policy = "Cluster"
	if kind == "ClusterIP" && internalLocal(svc) || kind != "ClusterIP" && externalLocal(svc) {
		a.Policy = "Local"
	}
	all := c.endpoints(svc, port, to.Addr())
	fromPod, podsKnown := c.isPod(client)
	fromNode := c.IsLocal(client)

	// A3.2, A3.3, A3.6
	useLocal := a.Policy == "Local"
	a.Rule = "A3.3"
	if kind == "ClusterIP" {
		a.Rule = "A3.2"
	} else if useLocal && (fromPod || fromNode) {
		a.Rule, useLocal = "A3.6", false
	}
	list := c.clusterList(svc, all)
	if useLocal {
		list = c.localList(all)
	}
	deny := func(verdict, rule string) Answer {
		a.Verdict, a.Rule = verdict, rule
		return a
	}
	if !slices.ContainsFunc(all, func(e endpoint) bool { return e.ready || e.draining() }) || !useLocal && len(list) == 0 {
		return deny("refuse", "A3.4")
	}
	if kind == "LoadBalancer" && !c.admitted(svc, client) {
		return deny("drop", "A3.10")
	}
	if len(list) == 0 {
		return deny("drop", "A3.5")
	}
	a.Verdict = "accept"
	for _, e := range list {
		a.Candidates = append(a.Candidates, e.addr)
	}

	// A3.8, A3.9
	keep := false
	switch {
	case kind == "ClusterIP":
		keep = !c.MasqueradeAll && (fromPod || !podsKnown) && !client.IsLoopback() && client != to.Addr()
	case a.Policy == "Local":
		keep = fromPod || !fromNode
	}
	if len(list) == 1 && netip.MustParseAddrPort(list[0].addr).Addr() == client {
		keep = false
	}
	a.Source, a.SourceRule = "node", "A3.8"
	if keep {
		a.Source, a.SourceRule = "client", "A3.9"
	}
	return a
}

func (c *Cluster) unclaimed(dst netip.Addr) Answer {
	for _, svc := range c.Services {
		if c.handled(svc) && slices.Contains(svc.Spec.ClusterIPs, dst.String()) {
			return Answer{Verdict: "refuse", Address: "ClusterIP", Rule: "A3.12"}
		}
	}
	for _, svc := range c.Services {
		if !c.ours(svc) && hasClusterIP(svc) && slices.Contains(svc.Spec.ClusterIPs, dst.String()) {
			return Answer{Verdict: "none", Rule: "A1.1"}
		}
	}
	for _, p := range c.ServiceCIDRs {
		if p.Contains(dst) {
			return Answer{Verdict: "drop", Address: "ClusterIP", Rule: "A3.12"}
		}
	}
	return Answer{Verdict: "none", Rule: "A3.13"}
}

// handled is A1.1, A1.2 and A1.4.
func (c *Cluster) handled(svc *corev1.Service) bool { return c.ours(svc) && hasClusterIP(svc) }

func (c *Cluster) ours(svc *corev1.Service) bool {
	name, labelled := svc.Labels["service.kubernetes.io/service-proxy-name"]
	ours := !labelled
	if c.ProxyName != "" {
		ours = name == c.ProxyName
	}
	return ours
}

func hasClusterIP(svc *corev1.Service) bool {
	return svc.Spec.ClusterIP != "" && svc.Spec.ClusterIP != "None" && svc.Spec.Type != corev1.ServiceTypeExternalName
}

// find implements A3.1; an exact address and port of a service wins over a node
// port.
func (c *Cluster) find(protocol string, to netip.AddrPort) (*corev1.Service, *corev1.ServicePort, string) {
	addr := to.Addr().String()
	var nodePortOf *corev1.Service
	var nodePort *corev1.ServicePort
	for _, svc := range c.Services {
		if !c.handled(svc) || !hasFamily(svc, to.Addr()) {
			continue
		}
		for i := range svc.Spec.Ports {
			p := &svc.Spec.Ports[i]
			if string(p.Protocol) != protocol {
				continue
			}
			if p.Port == int32(to.Port()) {
				switch {
				case slices.Contains(svc.Spec.ClusterIPs, addr):
					return svc, p, "ClusterIP"
				case slices.Contains(balancerIPs(svc), addr):
					return svc, p, "LoadBalancer"
				case slices.Contains(svc.Spec.ExternalIPs, addr):
					return svc, p, "ExternalIP"
				}
			}
			if p.NodePort == int32(to.Port()) && c.hasNodePorts(to.Addr()) {
				nodePortOf, nodePort = svc, p
			}
		}
	}
	return nodePortOf, nodePort, "NodePort"
}

// hasFamily is A1.5.
func hasFamily(svc *corev1.Service, a netip.Addr) bool {
	return slices.ContainsFunc(svc.Spec.ClusterIPs, func(ip string) bool { return netip.MustParseAddr(ip).Is4() == a.Is4() })
}

// balancerIPs is A1.9.
func balancerIPs(svc *corev1.Service) []string {
	var out []string
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if in.IP != "" && (in.IPMode == nil || *in.IPMode == corev1.LoadBalancerIPModeVIP) {
			out = append(out, in.IP)
		}
	}
	return out
}

func internalLocal(svc *corev1.Service) bool {
	p := svc.Spec.InternalTrafficPolicy
	return p != nil && *p == corev1.ServiceInternalTrafficPolicyLocal
}

// externalLocal is A2.2.
func externalLocal(svc *corev1.Service) bool {
	return svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal &&
		(svc.Spec.Type == corev1.ServiceTypeNodePort || svc.Spec.Type == corev1.ServiceTypeLoadBalancer || len(svc.Spec.ExternalIPs) > 0)
}

// endpoints implements A1.3 and A1.10 to A1.15. Slices are merged in the order of
// their names.
func (c *Cluster) endpoints(svc *corev1.Service, port *corev1.ServicePort, family netip.Addr) []endpoint {
	var mine []*discoveryv1.EndpointSlice
	for _, s := range c.Slices {
		_, headless := s.Labels["service.kubernetes.io/headless"]
		want := discoveryv1.AddressTypeIPv6
		if family.Is4() {
			want = discoveryv1.AddressTypeIPv4
		}
		if !headless && s.Namespace == svc.Namespace && s.Labels["kubernetes.io/service-name"] == svc.Name && s.AddressType == want {
			mine = append(mine, s)
		}
	}
	sort.Slice(mine, func(i, j int) bool { return mine[i].Name < mine[j].Name })
	found := map[string]endpoint{}
	for _, s := range mine {
		for _, p := range s.Ports {
			if *p.Name != port.Name || *p.Protocol != port.Protocol || p.Port == nil || *p.Port == 0 {
				continue
			}
			for _, e := range s.Endpoints {
				n := endpoint{
					addr:        netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(*p.Port)).String(),
					ready:       e.Conditions.Ready == nil || *e.Conditions.Ready,
					serving:     e.Conditions.Serving == nil || *e.Conditions.Serving,
					terminating: e.Conditions.Terminating != nil && *e.Conditions.Terminating,
				}
				if e.NodeName != nil {
					n.node = *e.NodeName
				}
				if e.Hints != nil {
					for _, z := range e.Hints.ForZones {
						n.zoneHints = append(n.zoneHints, z.Name)
					}
					for _, h := range e.Hints.ForNodes {
						n.nodeHints = append(n.nodeHints, h.Name)
					}
				}
				if old, twice := found[n.addr]; twice && worse(n, old) {
					continue // A1.13
				}
				found[n.addr] = n
			}
		}
	}
	out := make([]endpoint, 0, len(found))
	for _, e := range found {
		out = append(out, e)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].addr < out[j].addr })
	return out
}

// worse is A1.13: what does not terminate goes first, then what is ready, then what serves.
func worse(a, b endpoint) bool {
	switch {
	case a.terminating != b.terminating:
		return a.terminating
	case a.ready != b.ready:
		return b.ready
	}
	return b.serving && !a.serving
}

func keep(list []endpoint, f func(endpoint) bool) []endpoint {
	var out []endpoint
	for _, e := range list {
		if f(e) {
			out = append(out, e)
		}
	}
	return out
}

func isReady(e endpoint) bool { return e.ready }

// clusterList is A2.4, A2.7 to A2.10, and the topology keys.
func (c *Cluster) clusterList(svc *corev1.Service, all []endpoint) []endpoint {
	ready := keep(all, isReady)
	list := ready
	if len(list) == 0 {
		list = keep(all, endpoint.draining)
	}
	if keys := svc.Annotations["sluice.dev/topology-keys"]; keys != "" && !externalLocal(svc) {
		return c.keyed(list, strings.Split(keys, ","))
	}
	zone := c.label(c.NodeName, "topology.kubernetes.io/zone")
	here := keep(ready, func(e endpoint) bool { return slices.Contains(e.nodeHints, c.NodeName) })
	near := keep(ready, func(e endpoint) bool { return zone != "" && slices.Contains(e.zoneHints, zone) })
	allNode := len(keep(ready, func(e endpoint) bool { return len(e.nodeHints) > 0 })) == len(ready)
	allZone := len(keep(ready, func(e endpoint) bool { return len(e.zoneHints) > 0 })) == len(ready)
	switch {
	case allNode && len(here) > 0:
		return here
	case allZone && len(near) > 0:
		return near
	}
	return list
}

func (c *Cluster) keyed(list []endpoint, keys []string) []endpoint {
	for _, key := range keys {
		found := keep(list, func(e endpoint) bool {
			ours := c.label(c.NodeName, key)
			return key == "*" || ours != "" && ours == c.label(e.node, key)
		})
		if len(found) > 0 {
			return found
		}
	}
	return nil
}

// localList is A2.5.
func (c *Cluster) localList(all []endpoint) []endpoint {
	here := keep(all, func(e endpoint) bool { return e.node == c.NodeName })
	if ready := keep(here, isReady); len(ready) > 0 {
		return ready
	}
	return keep(here, endpoint.draining)
}

func (c *Cluster) label(node, key string) string {
	if n := c.node(node); n != nil {
		return n.Labels[key]
	}
	return ""
}

func (c *Cluster) node(name string) *corev1.Node {
	for _, n := range c.Nodes {
		if n.Name == name {
			return n
		}
	}
	return nil
}

// primary returns the node's own addresses: those of its object, or the configured
// ones if it has none.
func (c *Cluster) primary() []netip.Addr {
	var out []netip.Addr
	if n := c.node(c.NodeName); n != nil {
		for _, a := range n.Status.Addresses {
			if a.Type == corev1.NodeInternalIP {
				out = append(out, netip.MustParseAddr(a.Address))
			}
		}
	}
	if len(out) == 0 {
		return c.NodeIPs
	}
	return out
}

// IsLocal reports whether an address is one of the node's.
func (c *Cluster) IsLocal(a netip.Addr) bool {
	return a.IsLoopback() || slices.Contains(c.NodeAddresses, a) || slices.Contains(c.NodeIPs, a) || slices.Contains(c.primary(), a)
}

// isPod implements A4.6 and A3.7: the first range of the family counts, or the
// addresses behind the pods' interfaces.
func (c *Cluster) isPod(a netip.Addr) (pod, known bool) {
	ranges := c.ClusterCIDRs
	switch c.DetectLocal {
	case "Interface":
		return slices.ContainsFunc(c.PodRanges, func(p netip.Prefix) bool { return p.Contains(a) }), true
	case "NodeCIDR":
		ranges = nil
		if n := c.node(c.NodeName); n != nil {
			for _, text := range n.Spec.PodCIDRs {
				ranges = append(ranges, netip.MustParsePrefix(text))
			}
		}
	}
	for _, p := range ranges {
		if p.Addr().Is4() == a.Is4() {
			return p.Contains(a), true
		}
	}
	return false, false
}

// hasNodePorts is A4.1 to A4.5.
func (c *Cluster) hasNodePorts(a netip.Addr) bool {
	var ranges []netip.Prefix // of the address's family
	add := func(texts ...string) {
		for _, text := range texts {
			if p := netip.MustParsePrefix(text); p.Addr().Is4() == a.Is4() {
				ranges = append(ranges, p)
			}
		}
	}
	for _, v := range c.NodePortAddresses {
		switch v {
		case "all":
			add("0.0.0.0/0", "::/0")
		case "localhost":
			add("127.0.0.0/8", "::1/128")
		case "primary":
			for _, ip := range c.primary() {
				add(ip.String() + "/" + strconv.Itoa(ip.BitLen()))
			}
		default:
			add(v)
		}
	}
	all := len(ranges) == 0
	named := false // by a range other than all addresses
	for _, p := range ranges {
		all = all || p.Bits() == 0
		named = named || p.Bits() > 0 && p.Contains(a)
	}
	if a.IsLoopback() {
		return named || all && a.Is4() && c.LocalhostNodePorts
	}
	linkLocal := a.Is6() && a.IsLinkLocalUnicast()
	return c.IsLocal(a) && !linkLocal && (all || named)
}

// admitted is A3.10 and A3.11.
func (c *Cluster) admitted(svc *corev1.Service, client netip.Addr) bool {
	var ranges []netip.Prefix
	readable := true
	for _, text := range svc.Spec.LoadBalancerSourceRanges {
		p, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			readable = false
		} else if p.Addr().Is4() == client.Is4() {
			ranges = append(ranges, p)
		}
	}
	inside := func(a netip.Addr) bool {
		return slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	if len(ranges) == 0 {
		return readable // a range that cannot be read opens nothing
	}
	if inside(client) {
		return true
	}
	return slices.ContainsFunc(c.primary(), inside) && (c.IsLocal(client) || slices.Contains(balancerIPs(svc), client.String()))
}
