package service

import (
	"cmp"
	"slices"
)

// claim is one service port's claim to a key. A port may claim an address
// under two kinds; the lower rank then names it.
type claim struct {
	svc  *state
	port int // place in svc.spec.ports
	rank claimRank
}

// claimRank orders kinds. The API server gives a cluster IP to one service
// only, while anybody may write an external IP: so a cluster IP goes first,
// and nobody takes another service's with an external IP. Among the kinds of
// one port the load balancer IP goes before the external IP, as it has the
// source ranges (A3.10).
type claimRank uint8

const (
	rankClusterIP claimRank = iota
	rankLoadBalancer
	rankExternalIP
	rankNodePort
)

// compareClaims puts the better right first: a cluster IP before all others,
// the older service, the lower name, the earlier port, the kind.
func compareClaims(a, b claim) int {
	return cmp.Or(
		-compareBool(a.rank == rankClusterIP, b.rank == rankClusterIP),
		cmp.Compare(a.svc.spec.created, b.svc.spec.created),
		compareNames(a.svc.name, b.svc.name),
		cmp.Compare(a.port, b.port),
		cmp.Compare(a.rank, b.rank),
	)
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

func compareNames(a, b Name) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

// claims knows who claims what, best right first.
type claims struct {
	byKey      map[key][]claim
	clusterIPs map[key]int // how many services have a cluster IP
}

func newClaims() claims {
	return claims{byKey: make(map[key][]claim), clusterIPs: make(map[key]int)}
}

// each calls f for everything that a service's spec claims.
func (st *state) each(f func(key, claim)) {
	if st.spec == nil {
		return
	}
	for i, p := range st.spec.ports {
		if p.nodePort != 0 {
			f(nodePortKey(eitherFamily, p.protocol, p.nodePort), claim{st, i, rankNodePort})
		}
		for j := range st.spec.families {
			fam := &st.spec.families[j]
			if !fam.clusterIP.IsValid() {
				continue
			}
			f(addrKey(Destination{fam.clusterIP, p.port, p.protocol}), claim{st, i, rankClusterIP})
			for _, a := range fam.loadBalancerIPs {
				f(addrKey(Destination{a, p.port, p.protocol}), claim{st, i, rankLoadBalancer})
			}
			for _, a := range fam.externalIPs {
				f(addrKey(Destination{a, p.port, p.protocol}), claim{st, i, rankExternalIP})
			}
		}
	}
}

// withdraw takes back all that a service claims; touched gets the keys.
func (c *claims) withdraw(st *state, touched map[key]struct{}) {
	st.each(func(k key, _ claim) {
		touched[k] = struct{}{}
		list := slices.DeleteFunc(c.byKey[k], func(o claim) bool { return o.svc == st })
		if len(list) == 0 {
			delete(c.byKey, k)
		} else {
			c.byKey[k] = list
		}
	})
	c.countClusterIPs(st, -1, touched)
}

// enter puts in all that a service claims; touched gets the keys.
func (c *claims) enter(st *state, touched map[key]struct{}) {
	st.each(func(k key, n claim) {
		touched[k] = struct{}{}
		list := c.byKey[k]
		at, _ := slices.BinarySearchFunc(list, n, compareClaims)
		c.byKey[k] = slices.Insert(list, at, n)
	})
	c.countClusterIPs(st, 1, touched)
}

func (c *claims) countClusterIPs(st *state, by int, touched map[key]struct{}) {
	if st.spec == nil {
		return
	}
	for i := range st.spec.families {
		a := st.spec.families[i].clusterIP
		if !a.IsValid() {
			continue
		}
		k := clusterIPKey(a)
		touched[k] = struct{}{}
		if c.clusterIPs[k] += by; c.clusterIPs[k] == 0 {
			delete(c.clusterIPs, k)
		}
	}
}

// winner tells who has a key.
func (c *claims) winner(k key) (claim, bool) {
	if list := c.byKey[k]; len(list) > 0 {
		return list[0], true
	}
	return claim{}, false
}
