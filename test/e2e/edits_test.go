package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/wait"
)

// edit is a stage in the life of one Service, with the results that clients
// outside of the node must get at each of its destinations: "web" is any of its
// endpoints, "api" any endpoint of its other target port, "world" the host that
// has the address; or "refused" or "silent".
type edit struct {
	name                             string
	change                           func(*object)
	clusterIP, nodePort, loadBalance string
	otherPort                        string // at the cluster IP's port 8443, which the Service has for some stages
}

// edits go from ClusterIP to ExternalName and back.
var edits = []edit{
	{"ClusterIP", func(o *object) { o.kind = corev1.ServiceTypeClusterIP }, "web", "refused", "world", "refused"},
	{"NodePort", func(o *object) { o.kind = corev1.ServiceTypeNodePort; o.nodePort = 30000 }, "web", "web", "world", "refused"},
	{"another target", func(o *object) { o.target = 8001 }, "api", "api", "world", "refused"},
	{"LoadBalancer", func(o *object) { o.kind = corev1.ServiceTypeLoadBalancer; o.lbIPs = lbIPs }, "api", "api", "api", "refused"},
	{"affinity", func(o *object) { o.affinity = true }, "api", "api", "api", "refused"},
	{"the port renamed", func(o *object) { o.portName = "web" }, "api", "api", "api", "refused"},
	{"the first target again", func(o *object) { o.target = 8000; o.affinity = false }, "web", "web", "web", "refused"},
	{"another port", func(o *object) { o.port = 8443 }, "refused", "web", "world", "web"},
	{"the first port again", func(o *object) { o.port = 1000 }, "web", "web", "web", "refused"},
	{"UDP", func(o *object) { o.protocol = corev1.ProtocolUDP }, "refused", "refused", "world", "refused"},
	{"TCP again", func(o *object) { o.protocol = corev1.ProtocolTCP }, "web", "web", "web", "refused"},
	{"ExternalName", func(o *object) { o.kind = corev1.ServiceTypeExternalName }, "silent", "refused", "world", "silent"},
	{"LoadBalancer again", func(o *object) { o.kind = corev1.ServiceTypeLoadBalancer }, "web", "web", "web", "refused"},
	{"NodePort again", func(o *object) { o.kind = corev1.ServiceTypeNodePort; o.lbIPs = nil }, "web", "web", "world", "refused"},
	{"ClusterIP again", func(o *object) { o.kind = corev1.ServiceTypeClusterIP; o.nodePort = 0; o.portName = "" }, "web", "refused", "world", "refused"},
}

// stages knows which edit was in force at which time.
type stages struct {
	mu   sync.Mutex
	list []stage // guarded by mu

}

// stage is an edit and its time: not in force before from, completely in force by
// until.
type stage struct {
	edit        edit
	from, until time.Time // until is zero until the edit is known to be in force
}

func (s *stages) begin(e edit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, stage{edit: e, from: time.Now()})
}

func (s *stages) inForce() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list[len(s.list)-1].until = time.Now()
}

// during returns the edits that may have been in force at some time between the
// two.
func (s *stages) during(from, to time.Time) []edit {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []edit
	for i, st := range s.list {
		over := i+1 < len(s.list) && !s.list[i+1].until.IsZero() && s.list[i+1].until.Before(from)
		if !st.from.After(to) && !over {
			list = append(list, st.edit)
		}
	}
	return list
}

// TestServiceEditedWhileClientsConnect changes everything about one Service while
// clients connect to all its past, present and future destinations. No connection
// may reach a wrong endpoint, and none may fail that should succeed.
func TestServiceEditedWhileClientsConnect(t *testing.T) {
	w := newWorld(t, "tcp", []row{{name: "web", endpoints: "here there"}, {name: "api", endpoints: "here there"}})
	m := modes[0]
	o := *w.services[0]
	o.kind, o.nodePort, o.externalIPs, o.lbIPs, o.lbProxied = corev1.ServiceTypeClusterIP, 0, nil, nil, nil
	w.World.WitnessTCP(t, o.port)
	p := newClusterProxy(t, w.Cluster)
	p.mode = m
	p.put(&o)
	p.start(decisionFlags()...)

	var s stages
	s.begin(edits[0])
	s.inForce()
	targets := map[string][]netip.AddrPort{
		clusterIP: w.services[0].at(clusterIP), nodePort: w.services[0].at(nodePort), loadBalancerIP: w.services[0].at(loadBalancerIP),
		"another port": {netip.MustParseAddrPort("10.96.0.10:8443"), netip.MustParseAddrPort("[fd00:96::a]:8443")},
	}
	stop := make(chan struct{})
	var running sync.WaitGroup
	end := sync.OnceFunc(func() {
		close(stop)
		running.Wait()
	})
	defer end()
	var mu sync.Mutex
	served, denied, wrong := 0, 0, 0 // guarded by mu
	for kind, list := range targets {
		if m.lacks(kind) {
			continue
		}
		for _, c := range []client{w.clients[0], w.clients[2]} { // a pod, and one outside
			running.Go(func() {
				for i := 0; ; i++ {
					select {
					case <-stop:
						return
					case <-time.After(5 * time.Millisecond):
					}
					// Wait for silence only where it is expected: elsewhere a
					// repeated SYN may still reach its destination.
					patience, from := wait.Patience, time.Now()
					if now := s.during(from, from); slices.Contains(expected(kind, now), "silent") {
						patience = silence / 10
					}
					got := c.dial(list[i%2], w.nodeAddrs, patience)
					want := expected(kind, s.during(from, time.Now()))
					ok := slices.Contains(want, servedBy(got))
					mu.Lock()
					switch {
					case !ok:
						if wrong++; wrong <= 20 {
							t.Errorf("%s to %s %s: %s, want %v, under %s", c.name, kind, list[i%2], got, want, names(s.during(from, time.Now())))
						}
					case servedBy(got) == "refused" || servedBy(got) == "silent":
						denied++
					default:
						served++
					}
					mu.Unlock()
				}
			})
		}
	}
	turns := 2
	if full() {
		turns = 20
	}
	for range turns {
		for _, e := range edits[1:] { // the last edit equals the first one
			s.begin(e)
			p.settled(func() {
				e.change(&o)
				p.put(&o)
			})
			s.inForce()
			w.meets(t, e, targets)
		}
	}
	end()
	t.Logf("%d connections served, %d refused or not answered, %d wrong, during %d edits", served, denied, wrong, turns*(len(edits)-1))
	p.stop()
}

// meets expects new clients to see what an edit says.
func (w *world) meets(t *testing.T, e edit, targets map[string][]netip.AddrPort) {
	t.Helper()
	for kind, list := range targets {
		want := expected(kind, []edit{e})[0]
		if modes[0].lacks(kind) || want == "silent" {
			continue
		}
		for _, to := range list {
			check.Equalf(t, servedBy(w.clients[2].dial(to, w.nodeAddrs, startTimeout)), want, "after %s: %s %s", e.name, kind, to)
		}
	}
}

// expected returns what clients may see at a kind of destination under any of some
// edits.
func expected(kind string, during []edit) []string {
	var list []string
	for _, e := range during {
		list = append(list, map[string]string{
			clusterIP: e.clusterIP, nodePort: e.nodePort, loadBalancerIP: e.loadBalance, "another port": e.otherPort,
		}[kind])
	}
	return list
}

// names returns the edits' names.
func names(list []edit) string {
	var names []string
	for _, e := range list {
		names = append(names, e.name)
	}
	return strings.Join(names, ", ")
}

// servedBy names who served a connection, in one word.
func servedBy(got string) string {
	server, _, _ := strings.Cut(got, " ")
	name, port, _ := strings.Cut(server, ":")
	switch {
	case strings.HasPrefix(name, "pod-") && port == "8000":
		return "web"
	case strings.HasPrefix(name, "pod-") && port == "8001":
		return "api"
	case name == "world":
		return "world"
	case got == "refused", got == "silent":
		return got
	}
	return fmt.Sprintf("neither: %s", got)
}
