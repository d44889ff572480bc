package service

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
)

// Other is a Service of another proxy, according to the label
// service.kubernetes.io/service-proxy-name (A1.1, A1.2).
type Other struct {
	Service Name
	Label   string // value of the label
	Labeled bool   // it has the label
}

// String describes the Service and its proxy.
func (o Other) String() string {
	if !o.Labeled {
		return fmt.Sprintf("Service %s, which has no label %s and is the default proxy's", o.Service, proxyNameLabel)
	}
	return fmt.Sprintf("Service %s, which the label %s gives to the proxy %q", o.Service, proxyNameLabel, o.Label)
}

// otherSpec holds the cluster IPs of another proxy's Service.
type otherSpec struct {
	Other
	clusterIPs [2]netip.Addr // by family
}

// parseOther parses another proxy's Service. It reports no problems, because that
// proxy does.
func parseOther(svc *corev1.Service, label string, labeled bool) *otherSpec {
	var s spec
	s.parseClusterIPs(svc)
	o := &otherSpec{Other: Other{Service: Name{Namespace: svc.Namespace, Name: svc.Name}, Label: label, Labeled: labeled}}
	for f := range s.families {
		o.clusterIPs[f] = s.families[f].clusterIP
	}
	return o
}

// noteOther updates the records of other proxies' Services when a service gets a
// new spec. It adds addresses that another proxy gains or loses to moved.
func (s *Store) noteOther(st *state, next *spec, moved sets.Set[netip.Addr], u *update) {
	was, is := s.others[st.name], (*otherSpec)(nil)
	if next != nil {
		is = next.other
	}
	if was == nil && is == nil {
		return
	}
	u.others = true
	delete(s.others, st.name)
	s.countOther(was, -1, moved)
	if is != nil {
		s.others[st.name] = is
		s.countOther(is, 1, moved)
	}
}

func (s *Store) countOther(o *otherSpec, by int32, moved sets.Set[netip.Addr]) {
	if o == nil {
		return
	}
	for _, a := range o.clusterIPs {
		if a.IsValid() {
			bump(s.otherIPs, a, by)
			moved.Insert(a)
		}
	}
}

// othersOf returns the cluster IPs of other proxies' Services. If two have one
// address, the first by name counts.
func (s *Store) othersOf() map[netip.Addr]Other {
	out := make(map[netip.Addr]Other, len(s.others))
	for _, name := range slices.SortedFunc(maps.Keys(s.others), Name.Compare) {
		for _, a := range s.others[name].clusterIPs {
			if _, taken := out[a]; a.IsValid() && !taken {
				out[a] = s.others[name].Other
			}
		}
	}
	return out
}
