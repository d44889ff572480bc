package service

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/test/check"
)

func TestStoreBeforeAnything(t *testing.T) {
	s := NewStore(StoreOptions{NodeName: "a"})
	snap := s.Snapshot()
	if snap.Node.Name != "a" || snap.Node.Found {
		t.Errorf("node: %+v", snap.Node)
	}
	check.Equalf(t, found(snap, "10.96.0.1:80", TCP), "", "lookup")
	if _, ok := snap.FindNodePort(TCP, 30000); ok {
		t.Error("a node port was found")
	}
	check.Equalf(t, s.Apply(Change{}), snap, "an empty change gave another snapshot")
}

// TestStoreOrder: a slice may appear before its Service, remain after it, and move
// to another.
func TestStoreOrder(t *testing.T) {
	s := NewStore(StoreOptions{})
	s.Apply(endpointSlices(newSlice("a", "web", 8080, withAddresses("10.0.0.1"))))
	first := s.Apply(services(newService("web", "10.96.0.1")))
	if got := addrs(only(t, first).Families[IPv4].Endpoints); !slices.Equal(got, []string{"10.0.0.1:8080"}) {
		t.Fatalf("slice first: %q", got)
	}
	gone := s.Apply(deleted(KindService, "web"))
	if found(gone, "10.96.0.1:80", TCP) != "" || gone.HasClusterIP(dest("10.96.0.1:80", TCP).Addr) {
		t.Error("a deleted service is found")
	}
	if found(first, "10.96.0.1:80", TCP) == "" {
		t.Error("an old snapshot lost a service")
	}
	back := s.Apply(services(newService("web", "10.96.0.1"), newService("other", "10.96.0.2")))
	port, _ := find(back, dest("10.96.0.1:80", TCP))
	check.Equalf(t, len(port.Families[IPv4].Endpoints), 1, "the slice did not outlive its service")
	moved := s.Apply(endpointSlices(newSlice("a", "other", 8080, withAddresses("10.0.0.1"))))
	port, _ = find(moved, dest("10.96.0.1:80", TCP))
	other, _ := find(moved, dest("10.96.0.2:80", TCP))
	if len(port.Families[IPv4].Endpoints) != 0 || len(other.Families[IPv4].Endpoints) != 1 {
		t.Error("the slice did not move")
	}
}

func TestStoreKeepsWhatDidNotChange(t *testing.T) {
	s := NewStore(StoreOptions{NodeName: "a"})
	web := func() *corev1.Service { return newService("web", "10.96.0.1", withExternalIPs("192.0.2.5")) }
	slice := func() *discoveryv1.EndpointSlice { return newSlice("a", "web", 8080, withAddresses("10.0.0.1")) }
	c := services(web(), newService("other", "10.96.0.2"))
	c.EndpointSlices = append(c.EndpointSlices, slice())
	c.Nodes = append(c.Nodes, newNode("a", "172.16.0.1"))
	c.ServiceCIDRs = append(c.ServiceCIDRs, newServiceCIDR("kubernetes", "10.96.0.0/12"))
	before := s.Apply(c)
	check.Equalf(t, s.Apply(c), before, "A1.17 the same objects gave another snapshot")
	same := web()
	same.ResourceVersion, same.Labels = "2", map[string]string{"a": "b"}
	same.Spec.Selector = map[string]string{"app": "web"}
	check.Equalf(t, s.Apply(services(same)), before, "A1.17 a service that differs in what does not matter gave another snapshot")
	heartbeat := newNode("a", "172.16.0.1")
	heartbeat.ResourceVersion, heartbeat.Status.Phase = "3", corev1.NodeRunning
	check.Equalf(t, s.Apply(Change{Nodes: []*corev1.Node{heartbeat}}), before, "A1.17 the snapshot after a node that differs in what does not matter")
	fresh := services(newService("new", "10.96.0.3"))
	fresh.Deleted = deleted(KindService, "web").Deleted
	fresh.Services = append(fresh.Services, web())
	after := s.Apply(fresh)
	for _, d := range []string{"10.96.0.1:80", "192.0.2.5:80", "10.96.0.2:80"} {
		p, _ := find(before, dest(d, TCP))
		q, _ := find(after, dest(d, TCP))
		if q == nil || p != q {
			t.Errorf("%s: the port is not the same any more", d)
		}
	}
	next := s.Apply(endpointSlices(newSlice("a", "web", 8080, withAddresses("10.0.0.1", "10.0.0.2"))))
	check.Equalf(t, next.index, after.index, "a changed slice copied the address index")
	p, _ := find(after, dest("10.96.0.1:80", TCP))
	q, _ := find(next, dest("10.96.0.1:80", TCP))
	if p == q || len(p.Families[IPv4].Endpoints) != 1 || len(q.Families[IPv4].Endpoints) != 2 {
		t.Error("a changed slice must give another port and leave the old one alone")
	}
	check.Equalf(t, q.ID, p.ID, "the ID")
}

// TestProxyNameToggled: setting the label that assigns a service to another proxy
// acts like a deletion, removing it like a creation (A1.1, A1.2).
func TestProxyNameToggled(t *testing.T) {
	const label = "service.kubernetes.io/service-proxy-name"
	edit := func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"nonsense"} } // a problem
	plain, theirs, ours := newService("web", "10.96.0.1", edit), newService("web", "10.96.0.1", edit, withLabel(label, "other")), newService("web", "10.96.0.1", edit, withLabel(label, "ours"))
	for _, tt := range []struct {
		rule, proxy string
		served, not *corev1.Service
	}{
		{"A1.1", "", plain, theirs},
		{"A1.2", "ours", ours, theirs},
		{"A1.2", "ours", ours, plain},
	} {
		s := NewStore(StoreOptions{ServiceProxyName: tt.proxy})
		s.Apply(endpointSlices(newSlice("a", "web", 8080, withAddresses("10.0.0.1"))))
		created := s.Apply(services(tt.served))
		toggled := s.Apply(services(tt.not))
		dst := dest("10.96.0.1:80", TCP)
		if p, _ := find(toggled, dst); p != nil || toggled.HasClusterIP(dst.Addr) || len(toggled.Problems) > 0 || slices.ContainsFunc(toggled.Ports, func(p *Port) bool { return p != nil }) {
			t.Errorf("%s: something of the service is left: %+v", tt.rule, toggled)
		}
		if o := toggled.Others[dst.Addr]; o.Service.Name != "web" {
			t.Errorf("%s: the cluster IP is not left to the other proxy: %+v", tt.rule, toggled.Others)
		}
		if gone := s.Apply(deleted(KindService, "web")); len(gone.Others) != 0 {
			t.Errorf("%s: the deleted Service is still another proxy's: %+v", tt.rule, gone.Others)
		}
		back := s.Apply(services(tt.served))
		if p := only(t, back); !p.equal(only(t, created)) || len(p.Families[IPv4].Endpoints) != 1 || len(back.Problems) != 1 {
			t.Errorf("%s: came back as %+v", tt.rule, p)
		}
	}
}

// TestStoreAddAndDelete: an object that one change adds and deletes leaves no
// trace (A1.18).
func TestStoreAddAndDelete(t *testing.T) {
	s := NewStore(StoreOptions{NodeName: "a"})
	before := s.Apply(services(newService("web", "10.96.0.1")))
	s.Apply(services(newService("x", "10.96.0.9", withExternalIPs("192.0.2.9"), withPorts(servicePort("", "TCP", 80, 30000)))))
	s.Apply(endpointSlices(newSlice("x", "x", 80, withAddresses("10.0.0.1", "bad"))))
	s.Apply(Change{Nodes: []*corev1.Node{newNode("a", "172.16.0.1", "bad")}})
	s.Apply(deleted(KindEndpointSlice, "x"))
	s.Apply(deleted(KindNode, "a"))
	after := s.Apply(deleted(KindService, "x"))
	check.EqualSlices(t, destinations(t, after), destinations(t, before))
	if len(after.Problems) != 0 || after.Node.Found {
		t.Errorf("A1.18 left over: %q, %+v", problemTexts(after), after.Node)
	}
	if len(s.services) != 1 || len(s.owners) != 0 || len(s.claims.byKey) != 1 || len(s.problems) != 0 {
		t.Errorf("A1.18 left over: %d services, %d slices, %d claims", len(s.services), len(s.owners), len(s.claims.byKey))
	}
	if _, ok := after.FindNodePort(TCP, 30000); ok {
		t.Error("A1.18 a node port is left over")
	}
}

func TestPortIDs(t *testing.T) {
	s := NewStore(StoreOptions{})
	ids := func(snap *Snapshot) string {
		var out []string
		for i, p := range snap.Ports {
			switch {
			case p == nil:
				out = append(out, "-")
			case p.ID != PortID(i):
				t.Errorf("%s at %d has the ID %d", p.Name, i, p.ID)
			default:
				out = append(out, strings.TrimPrefix(p.Name.String(), "default/"))
			}
		}
		return strings.Join(out, " ")
	}
	two := withPorts(servicePort("a", "TCP", 1, 0), servicePort("b", "TCP", 2, 0))
	steps := []struct {
		change Change
		want   string
	}{
		{services(newService("x", "10.96.0.1", two), newService("y", "10.96.0.2"), newService("z", "10.96.0.3")), "x:a x:b y z"},
		{deleted(KindService, "y"), "x:a x:b - z"},
		{services(newService("x", "10.96.0.1", withPorts(servicePort("b", "TCP", 2, 0)))), "- x:b - z"},
		{services(newService("w", "10.96.0.4")), "w x:b - z"},
		{services(newService("x", "10.96.0.1", withPorts(servicePort("c", "TCP", 3, 0), servicePort("b", "TCP", 9, 0)))), "w x:b x:c z"},
		{services(newService("y", "10.96.0.2")), "w x:b x:c z y"},
		{services(newService("x", "None")), "w - - z y"},
	}
	for i, st := range steps {
		check.Equalf(t, ids(s.Apply(st.change)), st.want, "step %d", i)
	}
}

// TestConflicts adds all Services in one change, as at the start of the proxy.
func TestConflicts(t *testing.T) {
	nodePort := func(n int32) func(*corev1.Service) { return withPorts(servicePort("", "TCP", 80, n)) }
	tests := []struct {
		name    string
		list    []*corev1.Service
		at      string
		want    string
		problem string
	}{
		{"the older has the cluster IP", []*corev1.Service{newService("a", "10.96.0.1", withCreated(2)), newService("b", "10.96.0.1", withCreated(1))},
			"10.96.0.1:80", "ClusterIP default/b", "Service default/a: ClusterIP 10.96.0.1:80/TCP belongs to Service default/b: left out"},
		{"then the lower name", []*corev1.Service{newService("b", "10.96.0.1"), newService("a", "10.96.0.1")},
			"10.96.0.1:80", "ClusterIP default/a", "Service default/b: ClusterIP 10.96.0.1:80/TCP belongs to Service default/a: left out"},
		{"another port is no conflict", []*corev1.Service{newService("a", "10.96.0.1"), newService("b", "10.96.0.1", withPorts(servicePort("", "TCP", 81, 0)))},
			"10.96.0.1:81", "ClusterIP default/b", ""},
		{"another protocol is no conflict", []*corev1.Service{newService("a", "10.96.0.1"), newService("b", "10.96.0.1", withPorts(servicePort("", "UDP", 80, 0)))},
			"10.96.0.1:80", "ClusterIP default/a", ""},
		{"the older has the external IP", []*corev1.Service{newService("a", "10.96.0.1", withExternalIPs("192.0.2.1"), withCreated(2)),
			newService("b", "10.96.0.2", withIngress("192.0.2.1"), withCreated(1))},
			"192.0.2.1:80", "LoadBalancer default/b", "Service default/a: ExternalIP 192.0.2.1:80/TCP belongs to Service default/b: left out"},
		{"an older external IP takes no cluster IP", []*corev1.Service{newService("a", "10.96.0.1", withCreated(2)),
			newService("b", "10.96.0.2", withExternalIPs("10.96.0.1"), withCreated(1))},
			"10.96.0.1:80", "ClusterIP default/a", "Service default/b: ExternalIP 10.96.0.1:80/TCP belongs to Service default/a: left out"},
		{"the older has the node port", []*corev1.Service{newService("a", "10.96.0.1", nodePort(30000), withCreated(2)),
			newService("b", "10.96.0.2", nodePort(30000), withCreated(1))},
			"node:30000", "default/b", "Service default/a: node port 30000/TCP belongs to Service default/b: left out"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			expect := func(snap *Snapshot) {
				t.Helper()
				var got string
				if tt.at == "node:30000" {
					id, _ := snap.FindNodePort(TCP, 30000)
					got = snap.Ports[id].Name.String()
				} else {
					got = found(snap, tt.at, TCP)
				}
				check.Equal(t, got, tt.want)
				check.Equalf(t, strings.Join(problemTexts(snap), "; "), tt.problem, "problems")
				destinations(t, snap)
			}
			s := NewStore(StoreOptions{})
			expect(s.Apply(services(tt.list...)))
			check.Equalf(t, s.Apply(services(tt.list...)), s.Snapshot(), "the snapshot after the same services again")
			expect(s.Snapshot())
			for _, svc := range tt.list[:len(tt.list)-1] { // the remaining service owns everything
				s.Apply(deleted(KindService, svc.Name))
			}
			if got := problemTexts(s.Snapshot()); got != nil {
				t.Errorf("problems of the one that is left: %q", got)
			}
			destinations(t, s.Snapshot())
		})
	}
}

// TestConflictLoserKeepsTheRest: a service loses only the address in conflict.
func TestConflictLoserKeepsTheRest(t *testing.T) {
	s := NewStore(StoreOptions{})
	snap := s.Apply(services(newService("a", "10.96.0.1"), newService("b", "10.96.0.1",
		withExternalIPs("192.0.2.5"), withPorts(servicePort("", "TCP", 80, 30000)))))
	check.Equalf(t, found(snap, "192.0.2.5:80", TCP), "ExternalIP default/b", "external IP")
	id, ok := snap.FindNodePort(TCP, 30000)
	p := snap.Ports[id]
	if !ok || !p.Families[IPv4].Exists || p.Families[IPv4].ClusterIP.IsValid() {
		t.Errorf("node port: %+v", p)
	}
}

// TestSnapshotsWhileApplying reads snapshots while Apply builds the next ones, for
// the race detector.
func TestSnapshotsWhileApplying(t *testing.T) {
	s := NewStore(StoreOptions{NodeName: worldNode})
	latest := make(chan *Snapshot, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for snap := range latest {
			dump(snap)
			found(snap, "[fd00::1]:80", TCP)
			snap.FindNodePort(TCP, 30000)
			snap.HasClusterIP(dest("10.96.0.1:80", TCP).Addr)
			snap.Nodes.Get(worldNode)
		}
	}()
	r := rand.New(rand.NewPCG(3, 0))
	w := newWorld()
	for i := range 300 {
		c := w.randomChange(r)
		c.Nodes = []*corev1.Node{newNode(fmt.Sprintf("n%d", i%3), fmt.Sprintf("172.16.0.%d", i%200))}
		latest <- s.Apply(c)
	}
	close(latest)
	<-done
}

func TestNodeAndServiceCIDRs(t *testing.T) {
	s := NewStore(StoreOptions{NodeName: "a"})
	n := newNode("a", "172.16.0.1", "bad", "fd01::1")
	n.Labels = map[string]string{"topology.kubernetes.io/zone": "z"}
	n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: "192.0.2.1"})
	n.Spec.PodCIDRs = []string{"10.244.1.0/24", "bad"}
	snap := s.Apply(Change{Nodes: []*corev1.Node{n, newNode("b", "172.16.0.2")}})
	if !snap.Node.Found || snap.Node.Zone() != "z" || len(snap.Node.Addresses) != 2 || len(snap.Node.PodCIDRs) != 1 {
		t.Errorf("A2.13 node: %+v", snap.Node)
	}
	if got := problemTexts(snap); len(got) != 2 || !strings.HasPrefix(got[0], "Node a: ") {
		t.Errorf("problems: %q", got)
	}
	nodes := snap.Nodes
	if b := nodes.Get("b"); b == nil || b.Addresses[0].String() != "172.16.0.2" || nodes.Get("c") != nil {
		t.Errorf("node b: %+v", b)
	}
	if got := s.Apply(deleted(KindNode, "b")).Nodes; got.Get("b") != nil || nodes.Get("b") == nil || got.Get("a") != nodes.Get("a") {
		t.Error("a deleted node must go from the next snapshot only")
	}
	c := Change{}
	c.ServiceCIDRs = append(c.ServiceCIDRs, newServiceCIDR("x", "10.97.0.0/16", "fd00::/108"), newServiceCIDR("kubernetes", "10.96.0.0/16", "bad"))
	snap = s.Apply(c)
	if got := len(snap.ServiceCIDRs); got != 3 || snap.ServiceCIDRs[0].String() != "10.96.0.0/16" {
		t.Errorf("service CIDRs: %v", snap.ServiceCIDRs)
	}
	if len(snap.Problems) != 3 || !snap.Node.Found {
		t.Errorf("problems: %q", problemTexts(snap))
	}
	snap = s.Apply(deleted(KindServiceCIDR, "x"))
	check.Equalf(t, len(snap.ServiceCIDRs), 1, "service CIDRs after deletion: %v", snap.ServiceCIDRs)
}
