package service

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestEarlierClaimStays: no Service takes over an address of another Service,
// whatever their ages, and a problem names the one that tries.
func TestEarlierClaimStays(t *testing.T) {
	const ip, at = "192.0.2.1", "192.0.2.1:80"
	external, balanced := withExternalIPs(ip), withIngress(ip)
	attacker := func(with ...func(*corev1.Service)) *corev1.Service {
		return newService("attacker", "10.96.0.1", append(with, withCreated(1))...)
	}
	victim := func(with ...func(*corev1.Service)) *corev1.Service {
		return newService("victim", "10.96.0.2", append(with, withCreated(2))...)
	}
	for _, tt := range []struct {
		name  string
		steps []Change
		want  string
	}{
		{"the older Service with an external IP, later", []Change{services(attacker(), victim(external)), services(attacker(external))}, "ExternalIP default/victim"},
		{"what the load balancer's controller wrote, earlier", []Change{services(attacker(), victim(balanced)), services(attacker(external))}, "LoadBalancer default/victim"},
		{"what the load balancer's controller wrote, later", []Change{services(attacker(external), victim()), services(victim(balanced))}, "LoadBalancer default/victim"},
		{"both at once", []Change{services(attacker(external), victim(balanced))}, "LoadBalancer default/victim"},
		{"a change of something else", []Change{services(attacker(), victim(external)), services(attacker(external)),
			services(victim(external, withIngress("192.0.2.9")))}, "ExternalIP default/victim"},
		{"the earlier one goes and comes back", []Change{services(attacker(), victim(external)), services(attacker(external)),
			services(victim()), services(victim(external))}, "ExternalIP default/attacker"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := NewStore(StoreOptions{})
			for _, c := range tt.steps {
				s.Apply(c)
			}
			check.Equal(t, found(s.Snapshot(), at, TCP), tt.want)
			_, winner, _ := strings.Cut(tt.want, " ")
			named := func(text string) bool { return strings.Contains(text, "belongs to Service "+winner) }
			if got := problemTexts(s.Snapshot()); !slices.ContainsFunc(got, named) {
				t.Errorf("the loser is not named: %q", got)
			}
		})
	}
}

// TestEarlierClaimStaysWhateverItsKind: where nothing allocates cluster IPs, a new
// Service's cluster IP does not displace what is served.
func TestEarlierClaimStaysWhateverItsKind(t *testing.T) {
	const ip = "192.0.2.1"
	served, late := newService("served", "10.96.0.2", withExternalIPs(ip)), newService("late", ip)
	for _, tt := range []struct {
		earlierFirst bool
		steps        []Change
		want         string
	}{
		{false, []Change{services(served), services(late)}, "ClusterIP default/late"},
		{true, []Change{services(served), services(late)}, "ExternalIP default/served"},
		{true, []Change{services(served, late)}, "ClusterIP default/late"}, // at the start the kind decides
		{true, []Change{services(served), services(late), services(newService("served", "10.96.0.3", withExternalIPs(ip)))}, "ExternalIP default/served"},
		{true, []Change{services(served), services(late), services(newService("served", "10.96.0.2"))}, "ClusterIP default/late"},
	} {
		s := NewStore(StoreOptions{EarlierFirst: tt.earlierFirst})
		for _, c := range tt.steps {
			s.Apply(c)
		}
		check.Equalf(t, found(s.Snapshot(), ip+":80", TCP), tt.want, "earlier first %v, %d steps", tt.earlierFirst, len(tt.steps))
	}
}

// TestUnknownAnnotationsAreProblems names an annotation of ours that does not exist.
func TestUnknownAnnotationsAreProblems(t *testing.T) {
	s := NewStore(StoreOptions{})
	svc := newService("web", "10.96.0.1")
	svc.Annotations = map[string]string{"sluice.dev/balancr": "random", "sluice.dev/balancer": "random", "example.com/balancr": "a"}
	got := problemTexts(s.Apply(services(svc)))
	if len(got) != 1 || !strings.HasPrefix(got[0], "Service default/web: annotation sluice.dev/balancr is not known: it has no effect") {
		t.Errorf("problems %q", got)
	}
	svc.Annotations = map[string]string{"sluice.dev/access-log": "none"}
	if got := problemTexts(s.Apply(services(svc))); len(got) != 1 || !strings.Contains(got[0], `"none" is not one of all, failed, off`) {
		t.Errorf("problems %q", got)
	}
}

// TestNodePortGoesBeforeExternalIP: an external IP on an address of the node does
// not take a node port, whichever Service came first.
func TestNodePortGoesBeforeExternalIP(t *testing.T) {
	web := newService("web", "10.96.0.1", withPorts(servicePort("", "TCP", 80, 30000)))
	thief := newService("thief", "10.96.0.2", withPorts(servicePort("", "TCP", 30000, 0)), withExternalIPs("172.16.0.1"))
	host := Change{Host: &Host{Addresses: []netip.Addr{netip.MustParseAddr("172.16.0.1")}}}
	for name, steps := range map[string][]Change{
		"later":    {host, services(web), services(thief)},
		"earlier":  {host, services(thief), services(web)},
		"together": {services(web, thief), host},
	} {
		s := NewStore(StoreOptions{})
		for _, c := range steps {
			s.Apply(c)
		}
		snap := s.Snapshot()
		check.Equalf(t, found(snap, "172.16.0.1:30000", TCP), "", "%s", name)
		if got := problemTexts(snap); len(got) != 1 || got[0] != "Service default/thief: ExternalIP 172.16.0.1:30000/TCP is a node port of Service default/web: left out" {
			t.Errorf("%s: problems %q", name, got)
		}
		s.Apply(Change{Host: &Host{}})
		check.Equalf(t, found(s.Snapshot(), "172.16.0.1:30000", TCP), "ExternalIP default/thief", "%s: on another node", name)
	}
}

// TestOthersClusterIPCannotBeTaken: the Store leaves out an external IP or load
// balancer IP that is the cluster IP of another proxy's Service, whichever came
// first, and serves it after that Service is deleted.
func TestOthersClusterIPCannotBeTaken(t *testing.T) {
	const ip = "10.96.0.20"
	other := newService("other", ip, withLabel(proxyNameLabel, "x"))
	for name, claim := range map[string]func(*corev1.Service){"external IP": withExternalIPs(ip), "load balancer IP": withIngress(ip)} {
		thief := newService("thief", "10.96.0.1", claim)
		for order, steps := range map[string][]Change{
			"later":   {services(other), services(thief)},
			"earlier": {services(thief), services(other)},
			"at once": {services(thief, other)},
		} {
			s := NewStore(StoreOptions{})
			for _, c := range steps {
				s.Apply(c)
			}
			named := func(text string) bool { return strings.Contains(text, "another proxy serves: left out") }
			if got := found(s.Snapshot(), ip+":80", TCP); got != "" || !slices.ContainsFunc(problemTexts(s.Snapshot()), named) {
				t.Errorf("%s, %s: got %q, %q", name, order, got, problemTexts(s.Snapshot()))
			}
			s.Apply(Change{Deleted: []ObjectKey{{Kind: KindService, Name: Name{other.Namespace, other.Name}}}})
			if got := found(s.Snapshot(), ip+":80", TCP); got == "" || len(problemTexts(s.Snapshot())) > 0 {
				t.Errorf("%s, %s, the other is gone: got %q, %q", name, order, got, problemTexts(s.Snapshot()))
			}
		}
	}
}
