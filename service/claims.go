package service

import (
	"cmp"
	"net/netip"
	"slices"
)

// claim is one service port's claim to a key. A port may claim an address
// under two kinds; the lower rank then names it.
type claim struct {
	svc  *state
	port int // place in svc.spec.ports
	rank claimRank
	// since says when the service began to claim the key: in which change, of
	// those that the Store has seen.
	since uint64
}

// claimRank orders kinds, the best right first. The API server gives a cluster
// IP to one service only, a load balancer's controller writes the load balancer
// IP, while any tenant may write an external IP. Among the kinds of one port the
// load balancer IP names the address, as it has the source ranges (A3.10).
type claimRank uint8

const (
	rankClusterIP claimRank = iota
	rankLoadBalancer
	rankExternalIP
	rankNodePort
)

// compareClaims puts the better right first: by kind; the earlier claim, so that
// nobody takes over an address that is in use; of claims that are equally old,
// as they all are when the proxy begins, the older service, the lower name, the
// earlier port.
func compareClaims(a, b claim) int {
	return cmp.Or(
		cmp.Compare(a.rank, b.rank),
		cmp.Compare(a.since, b.since),
		cmp.Compare(a.svc.spec.created, b.svc.spec.created),
		compareNames(a.svc.name, b.svc.name),
		cmp.Compare(a.port, b.port),
	)
}

func compareNames(a, b Name) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

// claims knows who claims what, best right first.
type claims struct {
	byKey      map[key][]claim
	clusterIPs map[key]int // how many services have a cluster IP
	// outer counts the claims to external and load balancer IPs by address.
	outer map[netip.Addr]int
	// now counts changes. earlier says since when the services claimed that a
	// change has withdrawn and may enter again.
	now     uint64
	earlier map[claimant]uint64
}

// claimant is who claims what.
type claimant struct {
	key key
	svc Name
}

func newClaims() claims {
	return claims{byKey: make(map[key][]claim), clusterIPs: make(map[key]int), outer: make(map[netip.Addr]int), earlier: make(map[claimant]uint64)}
}

// portName names the service port of a claim.
func (c *claim) portName() string {
	return PortName{Name: c.svc.name, Port: c.svc.spec.ports[c.port].name}.String()
}

// each calls f for everything that a service's spec claims.
func (st *state) each(f func(key, claim)) {
	if st.spec == nil {
		return
	}
	for i, p := range st.spec.ports {
		if p.nodePort != 0 {
			f(nodePortKey(eitherFamily, p.protocol, p.nodePort), claim{svc: st, port: i, rank: rankNodePort})
		}
		for j := range st.spec.families {
			fam := &st.spec.families[j]
			if !fam.clusterIP.IsValid() {
				continue
			}
			f(addrKey(Destination{fam.clusterIP, p.port, p.protocol}), claim{svc: st, port: i, rank: rankClusterIP})
			for _, a := range fam.loadBalancerIPs {
				f(addrKey(Destination{a, p.port, p.protocol}), claim{svc: st, port: i, rank: rankLoadBalancer})
			}
			for _, a := range fam.externalIPs {
				f(addrKey(Destination{a, p.port, p.protocol}), claim{svc: st, port: i, rank: rankExternalIP})
			}
		}
	}
}

// withdraw takes back all that a service claims; touched gets the keys.
func (c *claims) withdraw(st *state, touched map[key]struct{}) {
	st.each(func(k key, _ claim) {
		touched[k] = struct{}{}
		list := slices.DeleteFunc(c.byKey[k], func(o claim) bool {
			if o.svc == st {
				c.earlier[claimant{k, st.name}] = o.since
			}
			return o.svc == st
		})
		if len(list) == 0 {
			delete(c.byKey, k)
		} else {
			c.byKey[k] = list
		}
	})
	c.count(st, -1, touched)
}

// enter puts in all that a service claims; touched gets the keys.
func (c *claims) enter(st *state, touched map[key]struct{}) {
	st.each(func(k key, n claim) {
		touched[k] = struct{}{}
		list := c.byKey[k]
		var was bool
		if n.since, was = c.earlier[claimant{k, st.name}]; !was {
			n.since = c.now
		}
		at, _ := slices.BinarySearchFunc(list, n, compareClaims)
		c.byKey[k] = slices.Insert(list, at, n)
	})
	c.count(st, 1, touched)
}

// count keeps clusterIPs and outer.
func (c *claims) count(st *state, by int, touched map[key]struct{}) {
	if st.spec == nil {
		return
	}
	for i := range st.spec.families {
		f := &st.spec.families[i]
		a := f.clusterIP
		if !a.IsValid() {
			continue
		}
		for _, list := range [][]netip.Addr{f.loadBalancerIPs, f.externalIPs} {
			for _, a := range list {
				if c.outer[a] += by; c.outer[a] == 0 {
					delete(c.outer, a)
				}
			}
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
