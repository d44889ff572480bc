package service

import (
	"cmp"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"
)

// claim is a service port's claim to a key. A port may claim an address as two
// kinds; the lower rank then decides its kind.
type claim struct {
	svc  *state
	port int // index in svc.spec.ports
	rank claimRank
	// since is the number of the Store's change in which the service first claimed
	// the key.
	since uint64
}

// claimRank orders kinds of addresses by precedence, highest first. The API server
// assigns a cluster IP to one service only, and a load balancer's controller writes
// the load balancer IP. Any tenant may write an external IP. If one port has an
// address as both, it counts as the load balancer IP, which has the source ranges
// (A3.10).
type claimRank uint8

const (
	rankClusterIP claimRank = iota
	rankLoadBalancer
	rankExternalIP
	rankNodePort
)

// compare sorts claims by precedence: by kind, then the earlier claim, so
// that no service takes over an address in use. Claims from the same change, such
// as all claims at the start, sort by age of the service, name and port. With
// earlierFirst, the earlier claim goes before the kind.
func (c *claims) compare(a, b claim) int {
	if c.earlierFirst && a.since != b.since {
		return cmp.Compare(a.since, b.since)
	}
	return cmp.Or(
		cmp.Compare(a.rank, b.rank),
		cmp.Compare(a.since, b.since),
		cmp.Compare(a.svc.spec.created, b.svc.spec.created),
		a.svc.name.Compare(b.svc.name),
		cmp.Compare(a.port, b.port),
	)
}

// claims holds all claims to each key, by precedence.
type claims struct {
	byKey      map[key][]claim
	clusterIPs map[key]int // number of services by cluster IP
	// outer counts the claims to external and load balancer IPs by address.
	outer map[netip.Addr]int
	// now counts changes. earlier holds claim.since of the claims that the current
	// change has withdrawn, in case it enters them again.
	now     uint64
	earlier map[claimant]uint64

	earlierFirst bool // StoreOptions.EarlierFirst
}

// claimant identifies a claim in earlier.
type claimant struct {
	key key
	svc Name
}

func newClaims(earlierFirst bool) claims {
	return claims{earlierFirst: earlierFirst, byKey: make(map[key][]claim), clusterIPs: make(map[key]int), outer: make(map[netip.Addr]int), earlier: make(map[claimant]uint64)}
}

// portName names the service port of a claim.
func (c *claim) portName() string {
	return PortName{Name: c.svc.name, Port: c.svc.spec.ports[c.port].name}.String()
}

// each calls f for each claim of a service's spec.
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

// withdraw removes all claims of a service and adds their keys to touched.
func (c *claims) withdraw(st *state, touched sets.Set[key]) {
	st.each(func(k key, _ claim) {
		touched.Insert(k)
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

// enter adds all claims of a service and adds their keys to touched.
func (c *claims) enter(st *state, touched sets.Set[key]) {
	st.each(func(k key, n claim) {
		touched.Insert(k)
		list := c.byKey[k]
		var was bool
		if n.since, was = c.earlier[claimant{k, st.name}]; !was {
			n.since = c.now
		}
		at, _ := slices.BinarySearchFunc(list, n, c.compare)
		c.byKey[k] = slices.Insert(list, at, n)
	})
	c.count(st, 1, touched)
}

// count updates clusterIPs and outer.
func (c *claims) count(st *state, by int, touched sets.Set[key]) {
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
		touched.Insert(k)
		if c.clusterIPs[k] += by; c.clusterIPs[k] == 0 {
			delete(c.clusterIPs, k)
		}
	}
}

// winner returns the claim that owns a key.
func (c *claims) winner(k key) (claim, bool) {
	if list := c.byKey[k]; len(list) > 0 {
		return list[0], true
	}
	return claim{}, false
}
