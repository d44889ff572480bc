package kubernetes

import (
	"context"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

const patience = 20 * time.Second

// follower runs a Source and keeps what it gives on in a Store.
type follower struct {
	t      *testing.T
	source *Source
	log    *output.Text

	mu      sync.Mutex
	store   *service.Store
	changes []service.Change
	apply   func() // called with each change, before it is stored
}

// follow runs a Source of a fake API server until the test ends. The first change waits
// for Nodes and ServiceCIDRs as long as the test does: they may be late.
func follow(t *testing.T, api *fakeAPI, o Options, apply func()) *follower {
	t.Helper()
	client := must.Get(Connect(Connection{Master: api.server.URL, QPS: 1000, Burst: 1000}))(t)
	f := &follower{t: t, log: &output.Text{}, apply: apply}
	o.Logger = zerolog.New(f.log)
	f.store = service.NewStore(service.StoreOptions{NodeName: o.NodeName, ServiceProxyName: o.ServiceProxyName})
	f.source = New(client, o)
	f.source.nodePatience = time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		check.OK(t, f.source.Run(ctx, f.take))
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return f
}

func (f *follower) take(c service.Change) {
	if f.apply != nil {
		f.apply()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changes = append(f.changes, c)
	f.store.Apply(c)
}

func (f *follower) given() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.changes)
}

// dump returns what is known, one line for each service port and node.
func (f *follower) dump() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var lines []string
	snap := f.store.Snapshot()
	for _, p := range snap.Ports {
		if p == nil {
			continue
		}
		var eps []string
		for _, v := range p.Families {
			for _, e := range v.Endpoints {
				eps = append(eps, e.Addr.String())
			}
		}
		lines = append(lines, fmt.Sprintf("%s=%s", p.Name, strings.Join(eps, ",")))
	}
	slices.Sort(lines)
	return strings.Join(lines, " ")
}

func (f *follower) expect(want string) {
	f.t.Helper()
	wait.For(f.t, "what is known", wait.Patience, func() error {
		if got := f.dump(); got != want {
			return fmt.Errorf("%q, want %q\n%s", got, want, f.log)
		}
		return nil
	})
}

func svc(name, ip string) *corev1.Service {
	return &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}},
	}
}

func slice(owner string, ips ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: owner + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: owner}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To(""), Port: ptr.To[int32](8080), Protocol: ptr.To(corev1.ProtocolTCP)}},
	}
	for _, ip := range ips {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{ip}})
	}
	return s
}

func node(name, zone string) *corev1.Node {
	return &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"topology.kubernetes.io/zone": zone}},
	}
}

// The first change holds everything, node and ServiceCIDRs too; each change
// that follows comes alone.
func TestFollows(t *testing.T) {
	for _, noStream := range []bool{false, true} {
		t.Run(map[bool]string{false: "streaming lists", true: "plain lists"}[noStream], func(t *testing.T) {
			api := newFakeAPI(t)
			api.noStream = noStream
			api.put("services", svc("web", "10.96.0.1"))
			api.put("endpointslices", slice("web", "10.1.0.1", "10.1.0.2"))
			api.put("nodes", node("a", "z1"))
			api.put("nodes", node("b", "z2"))
			api.put("servicecidrs", &networkingv1.ServiceCIDR{
				TypeMeta:   metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDR"},
				ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}},
			})
			f := follow(t, api, Options{NodeName: "a"}, nil)
			f.expect("default/web=10.1.0.1:8080,10.1.0.2:8080")
			f.mu.Lock()
			first, snap := f.changes[0], f.store.Snapshot()
			f.mu.Unlock()
			if len(first.Services) != 1 || len(first.Slices) != 1 || len(first.Nodes) != 1 || len(first.ServiceCIDRs) != 1 {
				t.Errorf("the first change holds %d services, %d slices, %d nodes, %d ServiceCIDRs; want one each",
					len(first.Services), len(first.Slices), len(first.Nodes), len(first.ServiceCIDRs))
			}
			if snap.Node.Zone() != "z1" || len(snap.ServiceCIDRs) != 1 || snap.ServiceCIDRs[0] != netip.MustParsePrefix("10.96.0.0/16") {
				t.Errorf("zone %q, ServiceCIDRs %v", snap.Node.Zone(), snap.ServiceCIDRs)
			}
			wait.True(t, "synced", func() bool { return f.source.synced.Load() })
			if s := f.source.Stats(); !s.Connected || s.ServiceChanges != 1 || s.EndpointChanges != 1 {
				t.Errorf("stats %+v", s)
			}

			api.put("endpointslices", slice("web", "10.1.0.2"))
			f.expect("default/web=10.1.0.2:8080")
			api.remove("endpointslices", slice("web"), false)
			f.expect("default/web=")
			api.put("services", svc("db", "10.96.0.2"))
			f.expect("default/db= default/web=")
			api.remove("services", svc("web", ""), false)
			f.expect("default/db=")
		})
	}
}

// A1.1 to A1.3: what does not count is not even asked for. As the default proxy
// we have to know the cluster IPs that are another proxy's.
func TestSelectors(t *testing.T) {
	for _, test := range []struct{ proxyName, want string }{
		{"", ""},
		{"sluice", "service.kubernetes.io/service-proxy-name=sluice"},
	} {
		api := newFakeAPI(t)
		mine := svc("mine", "10.96.0.1")
		if test.proxyName != "" {
			mine.Labels = map[string]string{proxyNameLabel: test.proxyName}
		}
		api.put("services", mine)
		other := svc("other", "10.96.0.2")
		other.Labels = map[string]string{proxyNameLabel: "somebody"}
		api.put("services", other)
		f := follow(t, api, Options{NodeName: "a", ServiceProxyName: test.proxyName}, nil)
		f.expect("default/mine=")
		f.mu.Lock()
		if o := f.store.Snapshot().Others; len(o) > 0 != (test.proxyName == "") {
			t.Errorf("%q: what other proxies serve: %v", test.proxyName, o)
		}
		f.mu.Unlock()
		for resource, want := range map[string][2]string{
			"services":       {"labelSelector", test.want},
			"endpointslices": {"labelSelector", "!service.kubernetes.io/headless"},
			"nodes":          {"fieldSelector", "metadata.name=a"},
		} {
			for _, q := range api.queries(resource) {
				check.Equalf(t, query(t, q, want[0]), want[1], "%s: %s", resource, want[0])
			}
		}
		if q := api.queries("services")[0]; query(t, q, "fieldSelector") != "spec.clusterIP!=None" {
			t.Errorf("services: %s", q)
		}
	}
}

func query(t *testing.T, raw, key string) string {
	t.Helper()
	return httptest.NewRequest("GET", "/?"+raw, nil).URL.Query().Get(key)
}

// A1.16: nothing is given on before Services and EndpointSlices are both known.
func TestNothingBeforeBothAreKnown(t *testing.T) {
	api := newFakeAPI(t)
	api.put("services", svc("web", "10.96.0.1"))
	api.put("endpointslices", slice("web", "10.1.0.1"))
	api.setForbidden("endpointslices", true)
	f := follow(t, api, Options{NodeName: "a"}, nil)
	wait.True(t, "a refusal in the log", func() bool { return strings.Contains(f.log.String(), "does not show us the endpointslices") })
	wait.True(t, "services", func() bool { return f.source.Stats().ServiceChanges == 1 })
	if f.source.Stats().Connected {
		t.Error("connected although slices are forbidden")
	}
	// Forbidden ends the wait for node and ServiceCIDRs only; here it must not.
	select {
	case <-f.source.required[0]:
	case <-time.After(patience):
		t.Fatal("services are not listed")
	}
	must.Equalf(t, f.given(), 0, "changes were given on")
	api.setForbidden("endpointslices", false)
	f.expect("default/web=10.1.0.1:8080")
	wait.True(t, "connected", func() bool { return f.source.Stats().Connected })
}

// The server goes away, objects change, its history is lost: what is known stays
// meanwhile, and the difference is found afterwards.
func TestServerGoesAndComesBack(t *testing.T) {
	api := newFakeAPI(t)
	api.put("services", svc("web", "10.96.0.1"))
	api.put("services", svc("gone", "10.96.0.2"))
	api.put("endpointslices", slice("web", "10.1.0.1"))
	f := follow(t, api, Options{NodeName: "a"}, nil)
	f.expect("default/gone= default/web=10.1.0.1:8080")
	given := f.given()

	for _, r := range []string{"services", "endpointslices", "nodes", "servicecidrs"} {
		api.setForbidden(r, true)
	}
	api.breakOff()
	wait.True(t, "the loss", func() bool { return !f.source.Stats().Connected })
	api.remove("services", svc("gone", ""), true)
	api.put("endpointslices", slice("web", "10.1.0.9"))
	api.expire()
	check.Equalf(t, f.given(), given, "something was given on while the server was away")
	for _, r := range []string{"services", "endpointslices", "nodes", "servicecidrs"} {
		api.setForbidden(r, false)
	}
	f.expect("default/web=10.1.0.9:8080")
	wait.True(t, "connected", func() bool { return f.source.Stats().Connected })
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.changes[given:] {
		for _, s := range c.Services {
			t.Errorf("%s was given on again although it had not changed", s.Name)
		}
	}
}

// A watch that ends with 410 (too old a resource version) begins anew with a list.
func TestExpiredWatch(t *testing.T) {
	api := newFakeAPI(t)
	api.put("services", svc("web", "10.96.0.1"))
	f := follow(t, api, Options{NodeName: "a"}, nil)
	f.expect("default/web=")
	api.put("services", svc("db", "10.96.0.2"))
	f.expect("default/db= default/web=")
	api.remove("services", svc("web", ""), true)
	api.expire()
	api.breakOff()
	f.expect("default/db=")
	check.Equalf(t, f.source.Stats().Errors, 0, "errors were counted")
}

// After a backup of the server's store was restored, watches would wait for versions that
// lie in the future; everything is listed anew instead, and changes are seen.
func TestRestoredStore(t *testing.T) {
	for _, noStream := range []bool{false, true} {
		t.Run(map[bool]string{false: "streaming lists", true: "plain lists"}[noStream], func(t *testing.T) {
			api := newFakeAPI(t)
			api.noStream = noStream
			api.put("services", svc("web", "10.96.0.1"))
			api.put("endpointslices", slice("web", "10.1.0.1"))
			f := follow(t, api, Options{NodeName: "a"}, nil)
			f.expect("default/web=10.1.0.1:8080")
			version, objects := api.backup()
			for i := range 50 {
				api.put("endpointslices", slice("web", fmt.Sprintf("10.1.0.%d", i+2)))
			}
			api.put("services", svc("later", "10.96.0.2"))
			f.expect("default/later= default/web=10.1.0.51:8080")

			api.restore(version, objects)
			f.expect("default/web=10.1.0.1:8080")
			api.put("endpointslices", slice("web", "10.1.0.99")) // at a version that was another one's before
			f.expect("default/web=10.1.0.99:8080")
			check.Containsf(t, f.log.String(), "the API server's store was restored to an older version", "the log does not say so")
		})
	}
}

// A watch that breaks off costs one small request more, and goes on where it was.
func TestBrokenWatchGoesOn(t *testing.T) {
	api := newFakeAPI(t)
	api.put("services", svc("web", "10.96.0.1"))
	f := follow(t, api, Options{NodeName: "a"}, nil)
	f.expect("default/web=")
	api.put("services", svc("cache", "10.96.0.3")) // client-go lists anew after a watch without an event
	f.expect("default/cache= default/web=")
	api.breakOff()
	wait.True(t, "a look at the store's version", func() bool {
		return slices.ContainsFunc(api.queries("services"), func(q string) bool { return strings.Contains(q, "limit=1&") || strings.HasSuffix(q, "limit=1") })
	})
	api.put("services", svc("db", "10.96.0.2"))
	f.expect("default/cache= default/db= default/web=")
	if strings.Contains(f.log.String(), "watching the services could not go on") {
		t.Error("services were listed anew")
	}
}

// A list that breaks off in the middle is no list: nothing is given on, nothing
// counts as gone.
func TestListThatBreaksOff(t *testing.T) {
	for _, noStream := range []bool{false, true} {
		t.Run(map[bool]string{false: "streaming lists", true: "plain lists"}[noStream], func(t *testing.T) {
			api := newFakeAPI(t)
			api.noStream = noStream
			for i := range 9 {
				api.put("services", svc(fmt.Sprintf("s%d", i), fmt.Sprintf("10.96.0.%d", i+1)))
			}
			f := follow(t, api, Options{NodeName: "a"}, nil)
			f.expect("default/s0= default/s1= default/s2= default/s3= default/s4= default/s5= default/s6= default/s7= default/s8=")
			given := f.given()
			api.setBreakAfter(5)
			api.remove("services", svc("s3", ""), true)
			api.replaceQuietly("services", svc("s0", "10.96.1.1")) // a watch would tell of it before it ends
			api.expire()
			api.breakOff()
			wait.True(t, "a list that broke off", func() bool { return api.brokenLists() > 0 })
			check.Equalf(t, f.given(), given, "something of half a list was given on")
			api.setBreakAfter(0)
			f.expect("default/s0= default/s1= default/s2= default/s4= default/s5= default/s6= default/s7= default/s8=")
			if n := f.source.Stats().Relists; n == 0 {
				t.Error("no new list was counted")
			}
			wait.True(t, "a new list in the log", func() bool { return strings.Contains(f.log.String(), "were listed anew") })
		})
	}
}

// An object of the same name and version that is another one is noticed: the
// server's store was set up afresh.
func TestAnotherObjectOfTheSameVersion(t *testing.T) {
	api := newFakeAPI(t)
	first := svc("web", "10.96.0.1")
	first.UID = "first"
	api.put("services", first)
	f := follow(t, api, Options{NodeName: "a"}, nil)
	f.expect("default/web=")
	given := f.given()
	second := svc("web", "10.96.0.2")
	second.UID, second.ResourceVersion = "second", first.ResourceVersion
	api.replaceQuietly("services", second)
	api.expire()
	api.breakOff()
	wait.True(t, "the other object", func() bool { return f.given() > given })
	f.mu.Lock()
	defer f.mu.Unlock()
	if got := f.changes[given].Services; len(got) != 1 || got[0].Spec.ClusterIP != "10.96.0.2" {
		t.Errorf("given on: %v", got)
	}
}

// A storm of changes comes as a few, a lone one at once.
func TestStormsAreGathered(t *testing.T) {
	api := newFakeAPI(t)
	api.put("services", svc("web", "10.96.0.1"))
	busy, entered := make(chan struct{}), make(chan struct{}, 100)
	release := sync.OnceFunc(func() { close(busy) })
	f := follow(t, api, Options{NodeName: "a"}, func() {
		entered <- struct{}{}
		<-busy
	})
	t.Cleanup(release) // before the follower's, which waits for it
	<-entered          // all kinds are listed, and the receiver is busy with that
	const storm = 200
	for i := range storm {
		api.put("endpointslices", slice("web", fmt.Sprintf("10.1.0.%d", i+1)))
	}
	wait.True(t, "all slices", func() bool { return f.source.Stats().EndpointChanges >= storm })
	release()
	f.expect("default/web=10.1.0.200:8080")
	if n := f.given(); n > 3 {
		t.Errorf("%d changes, want at most 3", n)
	}
}

// --min-sync-period keeps changes apart.
func TestMinSyncPeriod(t *testing.T) {
	const period = 300 * time.Millisecond
	api := newFakeAPI(t)
	api.put("services", svc("web", "10.96.0.1"))
	var mu sync.Mutex
	var times []time.Time
	f := follow(t, api, Options{NodeName: "a"}, func() {
		mu.Lock()
		defer mu.Unlock()
		times = append(times, time.Now())
	})
	f.expect("default/web=")
	f.source.SetMinSyncPeriod(period) // as when the configuration file changes
	var made []time.Time
	for i := range 4 {
		ip := fmt.Sprintf("10.1.0.%d", i+1)
		made = append(made, time.Now())
		api.put("endpointslices", slice("web", ip))
		f.expect("default/web=" + ip + ":8080")
	}
	mu.Lock()
	defer mu.Unlock()
	must.Equalf(t, len(times), 1+len(made), "changes")
	// A time may be taken long after its period began, so a change is compared with
	// the moment before which the first one cannot have begun.
	for i, at := range times[1:] {
		if d, least := at.Sub(made[0]), time.Duration(i)*period; d < least {
			t.Errorf("change %d came %s after the first was made, want at least %s", i, d, least)
		}
	}
}

// The labels of all nodes are watched while somebody needs them, as metadata.
func TestNodesAreWatchedForTopologyKeysOnly(t *testing.T) {
	api := newFakeAPI(t)
	api.put("nodes", node("a", "z1"))
	api.put("nodes", node("b", "z2"))
	api.put("services", svc("web", "10.96.0.1"))
	f := follow(t, api, Options{NodeName: "a"}, nil)
	f.expect("default/web=")
	zone := func() string {
		f.mu.Lock()
		defer f.mu.Unlock()
		if n := f.store.Snapshot().Nodes.Get("b"); n != nil {
			return n.Zone()
		}
		return ""
	}
	if q := api.queries("metadata of nodes"); len(q) != 0 || zone() != "" {
		t.Fatalf("all nodes are watched without need: %q", q)
	}
	wants := svc("web", "10.96.0.1")
	wants.Annotations = map[string]string{topologyAnnotation: "topology.kubernetes.io/zone,*"}
	api.put("services", wants)
	wait.True(t, "node b", func() bool { return zone() == "z2" })
	api.put("nodes", node("b", "z3"))
	wait.True(t, "node b's new zone", func() bool { return zone() == "z3" })
	api.put("services", svc("web", "10.96.0.1"))
	wait.True(t, "node b forgotten", func() bool { return zone() == "" })
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.store.Snapshot().Node.Found {
		t.Error("this node was forgotten with the others")
	}
}

// The first change holds the labels of all nodes, where a Service needs them to
// choose its endpoints.
func TestFirstChangeHoldsNodesForTopologyKeys(t *testing.T) {
	api := newFakeAPI(t)
	api.put("nodes", node("a", "z1"))
	api.put("nodes", node("b", "z2"))
	web := svc("web", "10.96.0.1")
	web.Annotations = map[string]string{topologyAnnotation: "topology.kubernetes.io/zone,*"}
	api.put("services", web)
	f := follow(t, api, Options{NodeName: "a"}, nil)
	f.expect("default/web=")
	f.mu.Lock()
	defer f.mu.Unlock()
	if first := f.changes[0]; len(first.Nodes) != 2 {
		t.Errorf("the first change has the nodes %v", first.Nodes)
	}
}

// The rights to ServiceCIDRs are newer than the kind of proxy that we replace:
// where they are missing, all else is served.
func TestServiceCIDRsMayBeForbidden(t *testing.T) {
	api := newFakeAPI(t)
	api.put("services", svc("web", "10.96.0.1"))
	api.setForbidden("servicecidrs", true)
	f := follow(t, api, Options{NodeName: "a"}, nil)
	f.expect("default/web=")
}

func TestTriggers(t *testing.T) {
	api := newFakeAPI(t)
	api.put("services", svc("web", "10.96.0.1"))
	old := slice("web", "10.1.0.1")
	old.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().Add(-time.Hour).Format(time.RFC3339Nano)}
	api.put("endpointslices", old)
	f := follow(t, api, Options{NodeName: "a"}, nil)
	f.expect("default/web=10.1.0.1:8080")
	at := time.Now().Add(time.Second).UTC().Round(0)
	for _, ip := range []string{"10.1.0.2", "10.1.0.3"} { // the second has the same time
		s := slice("web", ip)
		s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: at.Format(time.RFC3339Nano)}
		api.put("endpointslices", s)
		f.expect("default/web=" + ip + ":8080")
	}
	var got []time.Time
	wait.True(t, "the time", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		got = nil
		for _, c := range f.changes {
			got = append(got, c.Triggers...)
		}
		return len(got) > 0
	})
	if len(got) != 1 || !got[0].Equal(at) {
		t.Errorf("times %v, want %v", got, at)
	}
}
