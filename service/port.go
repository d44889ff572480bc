package service

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// fill sets everything in a port that follows from its service's spec, which is all
// but the endpoints. It leaves out addresses that other services own and adds a
// problem for each.
func (s *Store) fill(p *Port, st *state, i int, problems []string) []string {
	sp, ps := st.spec, st.spec.ports[i]
	*p = Port{
		ID:                  st.ids[i],
		Name:                PortName{Name: st.name, Port: ps.name, Protocol: ps.protocol},
		Type:                sp.kind,
		Port:                ps.port,
		InternalLocal:       sp.internalLocal,
		ExternalLocal:       sp.externalLocal,
		AffinityTimeout:     sp.affinityTimeout,
		IdleTimeout:         sp.idleTimeout,
		HalfClosedTimeout:   sp.halfClosedTimeout,
		HealthCheckNodePort: sp.healthCheckNodePort,
		SlowStart:           sp.slowStart,
		TopologyKeys:        sp.topologyKeys,
		Annotations:         sp.annotations,
	}
	if ps.protocol == TCP {
		p.SendProxy, p.AcceptProxy = sp.sendProxy, sp.acceptProxy
		p.Rebalance = sp.rebalance
	}
	if ps.protocol != UDP {
		p.Hold, p.Drain, p.Limits = sp.hold, sp.drain, sp.limits
	}
	problems = slices.Clip(problems) // appending must not change the spec's list
	has := func(k key, what AddressKind) bool {
		w, _ := s.claims.winner(k)
		if w.svc == st && w.port == i {
			return true
		}
		subject := k.String()
		if what != NodePort {
			subject = what.String() + " " + subject
		}
		problems = append(problems, fmt.Sprintf("%s belongs to Service %s: left out", subject, w.portName()))
		return false
	}
	hasAddr := func(a netip.Addr, what AddressKind) bool {
		at := Destination{a, ps.port, ps.protocol}
		switch {
		case !has(addrKey(at), what):
			return false
		case what == ClusterIP:
			return true
		case s.otherIPs[a] > 0: // a cluster IP takes precedence, whichever proxy serves it
			problems = append(problems, fmt.Sprintf("%s %s is the cluster IP of a Service that another proxy serves: left out", what, a))
			return false
		case s.hosts.broadcast.Has(a):
			problems = append(problems, fmt.Sprintf("%s %s is the broadcast address of a link: left out", what, a))
			return false
		case st.leadsTo(i, at):
			return false // the endpoint has this address, for example in the host network
		case !s.hosts.own.Has(a):
			return true
		case what == ExternalIP:
			// Node ports take precedence over external IPs, which any tenant may write.
			w, taken := s.claims.winner(nodePortKey(eitherFamily, ps.protocol, ps.port))
			if taken && (w.svc != st || w.port != i) {
				problems = append(problems, fmt.Sprintf("%s %s is a node port of Service %s: left out", what, addrKey(at), w.portName()))
			}
			return !taken
		}
		return true
	}
	if ps.nodePort != 0 && has(nodePortKey(eitherFamily, ps.protocol, ps.nodePort), NodePort) {
		p.NodePort = ps.nodePort
	}
	for f := range sp.families {
		from, v := &sp.families[f], &p.Families[f]
		if !from.clusterIP.IsValid() {
			continue
		}
		v.Exists = true
		if hasAddr(from.clusterIP, ClusterIP) {
			v.ClusterIP = from.clusterIP
		}
		for _, a := range from.externalIPs {
			if hasAddr(a, ExternalIP) {
				v.ExternalIPs = append(v.ExternalIPs, a)
			}
		}
		for _, a := range from.loadBalancerIPs {
			if hasAddr(a, LoadBalancer) {
				v.LoadBalancerIPs = append(v.LoadBalancerIPs, a)
			}
		}
		v.SourceRanges = from.sourceRanges
	}
	return problems
}

// equal reports whether all exported fields of a port are equal.
func (p *Port) equal(o *Port) bool {
	return p.ID == o.ID && p.Name == o.Name && p.Type == o.Type && p.Port == o.Port &&
		p.NodePort == o.NodePort && p.InternalLocal == o.InternalLocal &&
		p.ExternalLocal == o.ExternalLocal && p.AffinityTimeout == o.AffinityTimeout &&
		p.IdleTimeout == o.IdleTimeout && p.HalfClosedTimeout == o.HalfClosedTimeout &&
		p.Hold == o.Hold && p.Drain == o.Drain && p.Rebalance == o.Rebalance &&
		p.Limits == o.Limits && p.SlowStart == o.SlowStart && p.SendProxy == o.SendProxy && slices.Equal(p.AcceptProxy, o.AcceptProxy) &&
		p.HealthCheckNodePort == o.HealthCheckNodePort &&
		slices.Equal(p.TopologyKeys, o.TopologyKeys) && maps.Equal(p.Annotations, o.Annotations) &&
		p.Families[IPv4].equal(&o.Families[IPv4]) && p.Families[IPv6].equal(&o.Families[IPv6])
}

func (v *FamilyView) equal(o *FamilyView) bool {
	return v.Exists == o.Exists && v.ClusterIP == o.ClusterIP &&
		slices.Equal(v.ExternalIPs, o.ExternalIPs) &&
		slices.Equal(v.LoadBalancerIPs, o.LoadBalancerIPs) &&
		slices.Equal(v.SourceRanges, o.SourceRanges) &&
		endpointsEqual(v.Endpoints, o.Endpoints)
}

// Destinations yields each address and port of the service port (A3.1) and its
// kind, except the node port. An address that is both external IP and load balancer
// IP counts as the latter, so that its source ranges apply.
func (p *Port) Destinations(yield func(Destination, AddressKind) bool) {
	for f := range p.Families {
		v := &p.Families[f]
		if v.ClusterIP.IsValid() && !yield(p.at(v.ClusterIP), ClusterIP) {
			return
		}
		for _, a := range v.LoadBalancerIPs {
			if a != v.ClusterIP && !yield(p.at(a), LoadBalancer) {
				return
			}
		}
		for _, a := range v.ExternalIPs {
			if a != v.ClusterIP && !slices.Contains(v.LoadBalancerIPs, a) && !yield(p.at(a), ExternalIP) {
				return
			}
		}
	}
}

func (p *Port) at(a netip.Addr) Destination {
	return Destination{Addr: a, Port: p.Port, Protocol: p.Name.Protocol}
}
