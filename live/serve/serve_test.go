package serve

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"reflect"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// site is a server over a table of connections.
type site struct {
	podAt  map[string]string // names of pods by address
	url    string
	table  *conntrack.Table
	shard  *conntrack.Shard
	loop   *poll.Loop
	port   *service.Port
	client *http.Client
	mayAct atomic.Bool
	log    bytes.Buffer
	set    policy.Drained // the last set that was put in force
	v      string         // the last verbosity
}

// slice returns an EndpointSlice of the Service shop/web.
func slice(name string, port int32, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: &port}}, Endpoints: endpoints,
	}
}

func pod(name string) *corev1.ObjectReference {
	return &corev1.ObjectReference{Kind: "Pod", Namespace: "shop", Name: name}
}

// newSite returns a server of the Service shop/web, with two endpoints if no slices are
// given.
func newSite(t testing.TB, slices ...*discoveryv1.EndpointSlice) *site {
	t.Helper()
	before := runtime.GOMAXPROCS(max(poll.Procs(1), runtime.GOMAXPROCS(0)))
	t.Cleanup(func() { runtime.GOMAXPROCS(before) })
	loop, err := poll.New()
	must.OK(t, err)
	go func() { _ = loop.Run() }()
	t.Cleanup(loop.Stop)
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
	svc.Spec.ClusterIP = "10.96.0.10"
	svc.Spec.Ports = []corev1.ServicePort{{Port: 80, Name: "http"}}
	if len(slices) == 0 {
		slices = append(slices, slice("web-1", 80, discoveryv1.Endpoint{Addresses: []string{"10.1.0.4"}, TargetRef: pod("web-a")}, discoveryv1.Endpoint{Addresses: []string{"10.1.0.5"}}))
	}
	snap := service.NewStore(service.StoreOptions{}).Apply(service.Change{Services: []*corev1.Service{svc}, EndpointSlices: slices})
	policies := policy.Compile(nil, snap, policy.Config{})
	table := conntrack.NewTable(conntrack.Options{})
	s := &site{table: table, shard: table.Shard(0), loop: loop, port: snap.Ports[0]}
	view := live.New(table, conntrack.OnLoops([]*poll.Loop{loop}))
	history, err := live.NewHistory(view, false)
	must.OK(t, err)
	past := conntrack.NewPast(table, conntrack.LeastPast)
	t.Cleanup(past.Close)
	h := New(Options{
		View: view, History: history, Past: past,
		Version: api.Version{API: "v1", Node: "node-a"},
		Policy:  func() *policy.Table { return policies },
		PodAt: func(a netip.Addr) (pod service.Name) {
			if name := s.podAt[a.String()]; name != "" {
				pod = service.Name{Namespace: "shop", Name: name}
			}
			return pod
		},
		Pods: func() (all []service.Name) {
			for _, name := range s.podAt {
				all = append(all, service.Name{Namespace: "shop", Name: name})
			}
			return all
		},
		Choosing: func(*service.Port) live.Choosing { return live.Choosing{} },
		MayAct:   func(*http.Request) bool { return s.mayAct.Load() },
		Status:   func(context.Context) (*api.Status, error) { return &api.Status{Ready: true}, nil },
		Config:   func() map[string]string { return map[string]string{"v": "0"} },
		Explain: func(protocol, from, to string, text bool) (any, error) {
			if from == "" {
				return nil, errors.New("from is needed")
			}
			return map[string]string{"verdict": fmt.Sprint(protocol, from, to, text)}, nil
		},
		Destinations: func(_ context.Context, visit func(service.Destination, string)) error {
			visit(service.Destination{Addr: netip.MustParseAddr("10.96.0.99"), Port: 53, Protocol: service.UDP}, "refused")
			visit(service.Destination{Addr: netip.MustParseAddr("10.96.0.10"), Port: 80, Protocol: service.TCP}, "steered")
			return nil
		},
		Drains: NewDrains(func(_ context.Context, set policy.Drained) error {
			s.set = set
			return nil
		}, nil),
		SetVerbosity: func(v int, d time.Duration) { s.v = fmt.Sprint(v, d) },
		Log:          zerolog.New(&s.log),
	})
	server := httptest.NewServer(h)
	t.Cleanup(server.CloseClientConnections)
	s.url, s.client = server.URL, server.Client()
	return s
}

// on runs f on the loop.
func (s *site) on(f func()) {
	done := make(chan struct{})
	s.loop.Post(func() { defer close(done); f() })
	<-done
}

// open opens a connection that its endpoint has answered.
func (s *site) open(client string) *conntrack.Record {
	r := &conntrack.Record{
		Client: netip.MustParseAddrPort(client), VIP: netip.MustParseAddrPort("10.96.0.10:80"), Port: s.port, Protocol: service.TCP,
	}
	s.on(func() {
		r.Start = poll.Nanotime()
		s.shard.Open(r)
		r.BeginAttempt(&service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.4:80")}, r.Start)
		r.AttemptFailed(conntrack.DialRefused, r.Start+1000)
		r.BeginAttempt(&service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.5:80"), Place: service.At("n", "")}, r.Start+1000)
		r.AttemptSucceeded(r.Start + 2000)
		s.shard.Flush()
	})
	return r
}

func (s *site) end(r *conntrack.Record) {
	s.on(func() {
		r.End = conntrack.ClientFin
		s.shard.Close(r)
		s.shard.Flush()
	})
}

// ask sends a request, and decodes the answer strictly: each field must be known.
func (s *site) ask(t *testing.T, path string, status int, answer any) {
	t.Helper()
	resp, err := s.client.Get(s.url + path)
	must.OK(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	must.OK(t, err)
	if resp.StatusCode != status {
		t.Fatalf("%s: status %d: %s", path, resp.StatusCode, body)
	}
	strict(t, body, answer)
}

func strict(t *testing.T, body []byte, answer any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(string(body)))
	d.DisallowUnknownFields()
	if err := d.Decode(answer); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
}

func TestConnections(t *testing.T) {
	s := newSite(t)
	s.open("10.0.0.1:1000")
	second := s.open("10.0.0.2:1000")
	var page api.Connections
	s.ask(t, "/v1/connections?sort=-client&filter="+url.QueryEscape("service=shop/web attempts=2"), 200, &page)
	if page.Open != 2 || page.Matched != 2 || len(page.Connections) != 2 {
		t.Fatalf("%+v", page)
	}
	c := page.Connections[0]
	if c.Client != "10.0.0.2:1000" || c.State != "open" || c.Path != "relay" || c.End != "" || c.Endpoint != "10.1.0.5:80" ||
		len(c.Failed) != 1 || c.Failed[0].Error != "refused" || *c.ConnectUS != 2 || c.DurationUS < 1 {
		t.Errorf("%+v", c)
	}
	var one api.Connection
	s.ask(t, "/v1/connections/2", 200, &one)
	check.Equalf(t, one.ID, second.ID, "%+v", one)
	s.ask(t, "/v1/connections?limit=1&offset=1", 200, &page)
	if page.Matched != 2 || len(page.Connections) != 1 {
		t.Errorf("%+v", page)
	}
	var failed api.Error
	s.ask(t, "/v1/connections/77", 404, &failed)
	s.ask(t, "/v1/connections/x", 400, &failed)
	s.ask(t, "/v1/connections?limit=20000", 400, &failed)
	s.ask(t, "/v1/connections?limit=9000&offset=9000", 400, &failed)
	s.ask(t, "/v1/connections?sort=nix", 400, &failed)
	s.ask(t, "/v1/connections?nix=1", 400, &failed)
	s.ask(t, "/v1/connections?limit=1&limit=2", 400, &failed)
	s.ask(t, "/v1/nix", 404, &failed)
	failed = api.Error{}
	s.ask(t, "/v1/connections?filter=attemptss%3D1", 400, &failed)
	if want := (api.Error{Error: `filter, column 1: there is no field "attemptss"; did you mean attempts?`, Filter: "attemptss=1", End: 9}); failed != want {
		t.Errorf("%+v, want %+v", failed, want)
	}
	var failures api.Failures
	for _, endpoint := range []string{"10.1.0.4:80", "10.1.0.4", "[::ffff:10.1.0.4]:80"} {
		s.ask(t, "/v1/failures?endpoint="+endpoint, 200, &failures)
		if len(failures.Failures) != 2 || failures.Failures[0].Service != "shop/web:http" || failures.Failures[0].Error != "refused" {
			t.Errorf("%s: %+v", endpoint, failures)
		}
	}
	s.ask(t, "/v1/failures?endpoint=web-1", 400, &failed)
	for _, service := range []string{"web", "/web", "shop/"} {
		for _, path := range []string{"/v1/failures?service=", "/v1/services?service=", "/v1/history?by=service&service="} {
			failed = api.Error{}
			if s.ask(t, path+service, 400, &failed); !strings.Contains(failed.Error, "namespace/name") {
				t.Errorf("%s%s: %+v", path, service, failed)
			}
		}
	}
	s.ask(t, "/v1/destinations?steering=nix", 400, &failed)
	var services api.Services
	s.ask(t, "/v1/services?search=10.96.0.1", 200, &services)
	if services.Matched != 1 || services.Services[0].Service != "shop/web:http" || services.Services[0].VIPs[0] != "10.96.0.10" {
		t.Errorf("%+v", services)
	}
	if s.ask(t, "/v1/services?search=Shop/Web-A", 200, &services); services.Matched != 1 {
		t.Errorf("the name of a pod: %+v", services)
	}
	s.ask(t, "/v1/failures?service=shop/web&limit=1", 200, &failures)
	check.Equalf(t, len(failures.Failures), 1, "%+v", failures)
	s.ask(t, "/v1/failures?service=shop/cart", 200, &failures)
	check.Equalf(t, len(failures.Failures), 0, "%+v", failures)
	var destinations api.Destinations
	s.ask(t, "/v1/destinations", 200, &destinations)
	if want := (api.Destination{Destination: "10.96.0.10:80", Protocol: "TCP", Steering: "steered", Service: "shop/web:http"}); destinations.Matched != 2 || destinations.Destinations[0] != want {
		t.Errorf("%+v", destinations)
	}
	for _, query := range []string{"steering=refused", "search=0.99", "offset=1", "steering=refused&search=0.99"} {
		if s.ask(t, "/v1/destinations?"+query, 200, &destinations); len(destinations.Destinations) != 1 || destinations.Destinations[0].Destination != "10.96.0.99:53" {
			t.Errorf("%s: %+v", query, destinations)
		}
	}
	if s.ask(t, "/v1/destinations?search=Shop/Web", 200, &destinations); destinations.Matched != 1 {
		t.Errorf("%+v", destinations)
	}
	s.ask(t, "/v1/services?service=shop/cart", 200, &services)
	check.Equalf(t, services.Matched, 0, "%+v", services)
	var version api.Version
	s.ask(t, "/v1/version", 200, &version)
	if version.Node != "node-a" || version.Actions {
		t.Errorf("%+v", version)
	}
}

// lines reads a stream.
func (s *site) lines(t *testing.T, path string) *bufio.Scanner {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, http.NoBody)
	must.OK(t, err)
	resp, err := s.client.Do(req)
	must.OK(t, err)
	t.Cleanup(func() { _ = resp.Body.Close() })
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Fatalf("%s: %s", path, resp.Status)
	}
	return bufio.NewScanner(resp.Body)
}

func next[T any](t *testing.T, lines *bufio.Scanner) *T {
	t.Helper()
	if !lines.Scan() {
		t.Fatalf("the stream has ended: %v", lines.Err())
	}
	answer := new(T)
	strict(t, lines.Bytes(), answer)
	return answer
}

func TestStreams(t *testing.T) {
	s := newSite(t)
	first := s.open("10.0.0.1:1000")
	tap := s.lines(t, "/v1/tap?opens=true&filter=client%3D10.0.0.2")
	rates := s.lines(t, "/v1/rates?by=service,endpoint&sort=name")
	busy := s.lines(t, "/v1/rates?by=service,endpoint&quiet=false")
	all := s.lines(t, "/v1/connections/stream?filter=client%3D10.0.0.1")
	if c := next[api.Connection](t, all); c.ID != first.ID || c.State != "open" {
		t.Errorf("%+v", c)
	}
	if all.Scan() {
		t.Errorf("the stream has another line: %s", all.Text())
	}
	second := s.open("10.0.0.2:1000")
	if c := next[api.Connection](t, tap); c.ID != second.ID || c.Event != "open" || c.End != "" {
		t.Errorf("%+v", c)
	}
	s.end(first)
	s.end(second)
	if c := next[api.Connection](t, tap); c.ID != second.ID || c.Event != "" || c.End != "client_fin" {
		t.Errorf("%+v", c)
	}
	for {
		f := next[api.Frame](t, rates)
		if f.Total.Ended == 0 { // a frame for which the stream was late is lost
			s.end(s.open("10.0.0.3:1000"))
			continue
		}
		if len(f.Rows) != 2 || f.Rows[1].Endpoint != "10.1.0.5:80" || f.Rows[1].Service != "shop/web:http" || f.Rows[1].Node != "n" ||
			!reflect.DeepEqual(f.By, []string{"endpoint", "service"}) {
			t.Errorf("%+v", f)
		}
		break
	}
	for len(next[api.Frame](t, busy).Rows) == 0 {
		s.end(s.open("10.0.0.4:1000"))
	}
	for {
		f := next[api.Frame](t, busy)
		if f.Total.Open > 0 || f.Total.Opened+f.Total.Ended > 0 {
			continue
		}
		if len(f.Rows) > 0 {
			t.Errorf("rows of what is quiet: %+v", f)
		}
		break
	}
}

// The answer to HEAD ends, so that the next request on the connection is answered.
func TestHeadOfStreams(t *testing.T) {
	s := newSite(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, path := range []string{"/v1/tap", "/v1/rates", "/v1/connections/stream"} {
		for _, method := range []string{http.MethodHead, http.MethodGet} {
			req, err := http.NewRequestWithContext(ctx, method, s.url+path, http.NoBody)
			must.OK(t, err)
			resp, err := s.client.Do(req)
			must.OKf(t, err, "%s %s", method, path)
			if _ = resp.Body.Close(); resp.StatusCode != http.StatusOK {
				t.Errorf("%s %s: %s", method, path, resp.Status)
			}
		}
	}
}

// docs/admin-api.md lists each path, and none that is not there.
func TestDocsListEachPath(t *testing.T) {
	read := func(file, pattern string) map[string]bool {
		text := must.Read(t, file)
		found := make(map[string]bool)
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(string(text), -1) {
			found[strings.NewReplacer("{id}", "ID").Replace(m[1])] = true
		}
		return found
	}
	paths := read("../api/api.go", `= "(/v1/[^"]*)"`)
	documented := read("../../docs/admin-api.md", "(?m)^\\| `(/v1/[^`]*)` \\|")
	if len(paths) < 16 {
		t.Errorf("only %d paths", len(paths))
	}
	if !maps.Equal(paths, documented) {
		t.Errorf("paths:\n%v\ndocumented:\n%v", paths, documented)
	}
}

// A filter selects Services and endpoints by what is configured.
func TestServicesByFilter(t *testing.T) {
	s := newSite(t)
	for filter, want := range map[string]struct {
		endpoints int // -1: the Service is not selected
		partial   bool
	}{
		"":                                {2, false},
		"web":                             {2, false},
		"service=shop/web protocol=TCP":   {2, false},
		"service=shop/cart":               {-1, false},
		"protocol=UDP":                    {-1, false},
		"endpoint=10.1.0.5":               {1, false},
		"endpoint!=10.1.0.5":              {1, false},
		"pod=web-a vip=10.96.0.10:80":     {1, false},
		"vip=10.96.0.11":                  {-1, false},
		"10.96.0.10":                      {2, false},
		"service=web client=10.0.0.1":     {2, true},
		"service=shop/web bytes>1MB":      {2, true},
		"service=shop/cart attempts>1":    {-1, true},
		"node=none,elsewhere":             {-1, false},
		"tried=10.1.0.4 namespace=shop":   {1, false},
		"pod!=shop/web-a endpoint!=::/0":  {1, false},
		"state=open end=client_fin id=17": {2, true},
	} {
		var got api.Services
		s.ask(t, api.PathServices+"?filter="+url.QueryEscape(filter), http.StatusOK, &got)
		endpoints := -1
		if len(got.Services) == 1 {
			endpoints = len(got.Services[0].Endpoints)
		}
		if endpoints != want.endpoints || got.Partial != want.partial {
			t.Errorf("%q: %d endpoints, partial %v, want %+v", filter, endpoints, got.Partial, want)
		}
	}
	var failed api.Error
	s.ask(t, api.PathServices+"?filter=bites%3E1", http.StatusBadRequest, &failed)
	if failed.At != 0 || failed.End != len("bites") {
		t.Errorf("%+v", failed)
	}
}
