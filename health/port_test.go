package health

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// world is a Store, and a Server that follows it on 127.0.0.1 and ::1: the only
// addresses of the node in the test.
type world struct {
	t      *testing.T
	store  *service.Store
	server *Server
	clock  *fakeClock
	log    *output.Text
	table  *policy.Table
}

func newWorld(t *testing.T, o Options) *world {
	w := &world{t: t, store: service.NewStore(service.StoreOptions{NodeName: "n0"}), clock: newFakeClock(), log: new(output.Text)}
	o.Now, o.Logger = w.clock.now, zerolog.New(w.log)
	if o.Sockets == nil {
		o.Sockets = &someSockets{most: 1 << 20}
	}
	if o.Event == nil {
		o.Event = func(service.Name, string, string) {}
	}
	if o.Listen == nil {
		// All addresses would reach beyond the machine; loopback will do.
		o.Listen = func(network, address string) (net.Listener, error) {
			return listen(network, strings.NewReplacer("0.0.0.0", home, "[::]", "[::1]").Replace(address))
		}
	}
	w.server = New(o)
	t.Cleanup(w.server.Close)
	return w
}

func (w *world) apply(c service.Change) {
	w.server.Queued()
	w.table = policy.Compile(w.table, w.store.Apply(c), policy.Config{NodeName: "n0"})
	w.server.Update(w.table)
	w.server.Applied()
}

// balanced is a Service with policy Local; words as "10.0.0.1:local,ready".
func balanced(name string, port uint16, ports int, endpoints ...string) service.Change {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	svc.Spec.ClusterIP = fmt.Sprintf("10.96.%d.%d", port>>8, port&255)
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	svc.Spec.HealthCheckNodePort = int32(port)
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for i := range ports {
		portName, number := fmt.Sprintf("p%d", i), int32(8080+i)
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: portName, Port: number})
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &portName, Port: &number})
	}
	for _, text := range endpoints {
		addr, words, _ := strings.Cut(text, ":")
		e := discoveryv1.Endpoint{Addresses: []string{addr}}
		yes, no, here := true, false, "n0"
		for _, word := range strings.Split(words, ",") {
			switch word {
			case "local":
				e.NodeName = &here
			case "unready":
				e.Conditions.Ready, e.Conditions.Serving = &no, &no
			case "terminating":
				e.Conditions.Ready, e.Conditions.Serving, e.Conditions.Terminating = &no, &yes, &yes
			}
		}
		slice.Endpoints = append(slice.Endpoints, e)
	}
	return service.Change{Services: []*corev1.Service{svc}, EndpointSlices: []*discoveryv1.EndpointSlice{slice}}
}

// home is an address of loopback that no other process uses, so that none takes a port
// of the tests, or answers there.
var home = fmt.Sprintf("127.%d.%d.%d", 100+os.Getpid()>>16&63, os.Getpid()>>8&255, os.Getpid()&255)

// at is home with a port.
func at(port uint16) string { return net.JoinHostPort(home, fmt.Sprint(port)) }

// freePort returns a currently unused port.
func freePort(t *testing.T) uint16 {
	l := must.Get(net.Listen("tcp4", home+":0"))(t)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port()
}

var client = &http.Client{Timeout: wait.Patience, Transport: &http.Transport{DisableKeepAlives: true}}

func (w *world) ask(method string, port uint16, path string) (*http.Response, string) {
	w.t.Helper()
	req := must.Get(http.NewRequestWithContext(context.Background(), method, "http://"+at(port)+path, nil))(w.t)
	resp := must.Get(client.Do(req))(w.t)
	defer resp.Body.Close()
	body := must.Get(io.ReadAll(resp.Body))(w.t)
	return resp, string(body)
}

func (w *world) refused(port uint16) bool {
	c, err := net.Dial("tcp4", at(port))
	if err == nil {
		_ = c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

const wantBody = `{
	"service": {
		"namespace": "shop",
		"name": "web"
	},
	"localEndpoints": %d,
	"serviceProxyHealthy": %v
}`

// check wants an answer in all its bytes (A6.2, A6.4, A6.5).
func (w *world) check(rule string, port uint16, code, endpoints int, healthy bool) {
	w.t.Helper()
	resp, body := w.ask("GET", port, "/")
	if resp.StatusCode != code || body != fmt.Sprintf(wantBody, endpoints, healthy) {
		w.t.Errorf("%s: %d %s", rule, resp.StatusCode, body)
	}
	for name, want := range map[string]string{
		"Content-Type":                     "application/json",
		"X-Content-Type-Options":           "nosniff",
		"X-Load-Balancing-Endpoint-Weight": fmt.Sprint(endpoints),
		"Content-Length":                   fmt.Sprint(len(body)),
	} {
		check.Equalf(w.t, resp.Header.Get(name), want, "%s: %s is", rule, name)
	}
}

// TestServicePort shows A6.1 to A6.5, A6.7 and A6.8 on real sockets.
func TestServicePort(t *testing.T) {
	w := newWorld(t, Options{})
	port := freePort(t)
	w.apply(balanced("web", port, 1, "10.0.0.1:local", "10.0.0.2:local", "10.0.1.1:"))
	w.check("A6.2 two local endpoints", port, 200, 2, true)
	if resp, _ := w.ask("POST", port, "/any/where?x=1"); resp.StatusCode != 200 {
		t.Errorf("A6.2: any path and method: %s", resp.Status)
	}
	w.apply(balanced("web", port, 3, "10.0.0.1:local", "10.0.0.2:local"))
	w.check("A6.3 addresses count once for all ports", port, 200, 2, true)
	w.apply(balanced("web", port, 1, "10.0.0.1:local,terminating", "10.0.0.2:local,unready"))
	w.check("A6.3 only terminating endpoints", port, 503, 0, true)
	w.apply(balanced("web", port, 1, "10.0.0.1:local,terminating", "10.0.0.2:local"))
	w.check("A6.3 one ready, one terminating", port, 200, 1, true)

	leaving := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n0"}, Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler"}}}}
	w.apply(service.Change{Nodes: []*corev1.Node{leaving}})
	if _, ok := w.server.state.Healthz(); ok {
		t.Error("A7.3: a tainted node is eligible")
	}
	w.check("A6.8 a node that leaves", port, 200, 1, true)

	w.server.Queued()
	w.clock.advance(Timeout)
	w.check("A6.2, A6.4 the proxy is late", port, 503, 1, false)
	w.server.Applied()

	moved := freePort(t)
	w.apply(balanced("web", moved, 1, "10.0.0.1:local"))
	if !w.refused(port) {
		t.Error("A6.7: the old port is still open")
	}
	w.check("A6.7 moved", moved, 200, 1, true)
	c := balanced("web", moved, 1, "10.0.0.1:local")
	c.Services[0].Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	w.apply(c)
	if !w.refused(moved) || w.server.Stats().Ports != 0 {
		t.Error("A6.1: a port is open under policy Cluster")
	}
	w.apply(balanced("web", moved, 1))
	w.check("A6.7 no endpoints", moved, 503, 0, true)
	w.apply(service.Change{Deleted: []service.ObjectKey{{Kind: service.KindService, Name: service.Name{Namespace: "shop", Name: "web"}}}})
	if !w.refused(moved) {
		t.Error("A6.1: the port of a deleted service is open")
	}
}

// TestServicePortKept wants a change that leaves the port alone to leave its
// connections alone (A6.7).
func TestServicePortKept(t *testing.T) {
	w := newWorld(t, Options{})
	port := freePort(t)
	w.apply(balanced("web", port, 1, "10.0.0.1:local"))
	keep := &http.Client{Timeout: wait.Patience, Transport: &http.Transport{MaxConnsPerHost: 1}}
	var local string
	for n := range 3 {
		resp := must.Get(keep.Get("http://" + at(port) + "/"))(t)
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		p := w.server.ports[portKey{service.Name{Namespace: "shop", Name: "web"}, service.IPv4}]
		if got := fmt.Sprintf("%p", p.http); n > 0 && got != local {
			t.Error("A6.7: another server after a change")
		} else {
			local = got
		}
		w.apply(balanced("web", port, 1+n, "10.0.0.1:local", "10.0.0.2:local"))
	}
}

// TestServicePortSwap has two services exchange their ports in one change.
func TestServicePortSwap(t *testing.T) {
	w := newWorld(t, Options{})
	a, b := freePort(t), freePort(t)
	w.apply(balanced("web", a, 1, "10.0.0.1:local"))
	w.apply(balanced("api", b, 1))
	c, d := balanced("web", b, 1), balanced("api", a, 1)
	w.apply(service.Change{Services: append(c.Services, d.Services...)})
	w.check("A6.7 swapped", b, 200, 1, true)
	if got := w.server.Stats(); got.PortFailures != 0 || got.Ports != 2 {
		t.Errorf("%+v", got)
	}
}

// TestServicePortTaken shows A6.6: a port that another program holds is
// reported once, counted, and opened when it is free.
func TestServicePortTaken(t *testing.T) {
	taken := must.Get(net.Listen("tcp4", home+":0"))(t)
	port := taken.Addr().(*net.TCPAddr).AddrPort().Port()
	tried := make(chan error, 100)
	w := newWorld(t, Options{Retry: time.Millisecond, Listen: func(network, address string) (net.Listener, error) {
		l, err := listen(network, strings.Replace(address, "0.0.0.0", home, 1))
		tried <- err
		return l, err
	}})
	w.apply(balanced("web", port, 1, "10.0.0.1:local"))
	for range 3 {
		if err := <-tried; !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatal(err)
		}
	}
	if got := w.server.Stats(); got.PortFailures < 2 || got.Ports != 0 {
		t.Errorf("A6.6: %+v", got)
	}
	must.OK(t, taken.Close())
	for <-tried != nil {
	}
	w.check("A6.6 free at last", port, 200, 1, true)
	if log := w.log.String(); strings.Count(log, "FailedToStartServiceHealthcheck") != 1 || !strings.Contains(log, `"object":"Service shop/web"`) {
		t.Errorf("A6.6: the log says %s", log)
	}
}

// TestServicePortAddresses shows A6.6: the wildcard addresses by default, else
// those that have node ports, each family by itself.
func TestServicePortAddresses(t *testing.T) {
	c := balanced("web", 32000, 1, "10.0.0.1:local")
	c.Services[0].Spec.ClusterIPs = []string{"10.96.0.1", "fd00::1"}
	c.Services[0].Spec.ClusterIP = "10.96.0.1"
	six := c.EndpointSlices[0].DeepCopy()
	six.Name, six.AddressType = "web-6", discoveryv1.AddressTypeIPv6
	for i := range 2 {
		e := six.Endpoints[0]
		e.Addresses = []string{fmt.Sprintf("fd44::%d", i)}
		six.Endpoints = append(six.Endpoints, e)
	}
	six.Endpoints = six.Endpoints[1:]
	c.EndpointSlices = append(c.EndpointSlices, six)
	snap := service.NewStore(service.StoreOptions{NodeName: "n0"}).Apply(c)
	local := []netip.Addr{netip.MustParseAddr("172.16.0.1"), netip.MustParseAddr("192.168.0.1"), netip.MustParseAddr("fd01::1")}
	for _, tt := range []struct {
		ranges string
		want   string
	}{
		{"", "IPv4 [0.0.0.0] 1, IPv6 [::] 2"},
		{"172.16.0.0/12", "IPv4 [172.16.0.1] 1, IPv6 [::] 2"},
		{"172.16.0.0/12 fd01::/16", "IPv4 [172.16.0.1] 1, IPv6 [fd01::1] 2"},
		{"0.0.0.0/0 fd01::/16", "IPv4 [0.0.0.0] 1, IPv6 [fd01::1] 2"},
		{"198.51.100.0/24", "IPv6 [::] 2"},
	} {
		cfg := policy.Config{NodeName: "n0", NodeAddresses: local}
		for _, r := range strings.Fields(tt.ranges) {
			cfg.NodePortAddresses = append(cfg.NodePortAddresses, netip.MustParsePrefix(r))
		}
		all := targets(policy.Compile(nil, snap, cfg))
		var got []string
		for _, f := range []service.Family{service.IPv4, service.IPv6} {
			if tg, ok := all[portKey{service.Name{Namespace: "shop", Name: "web"}, f}]; ok {
				got = append(got, fmt.Sprintf("%s %v %d", familyNames[f], tg.addresses, tg.endpoints))
			}
		}
		check.Equalf(t, strings.Join(got, ", "), tt.want, "A6.6 %q", tt.ranges)
	}
}

// TestProxyAddress shows A7.7: an address that is taken is tried again.
func TestProxyAddress(t *testing.T) {
	taken := must.Get(net.Listen("tcp4", home+":0"))(t)
	tried := make(chan error, 100)
	w := newWorld(t, Options{Address: taken.Addr().String(), Retry: time.Millisecond, Listen: func(network, address string) (net.Listener, error) {
		l, err := listen(network, address)
		tried <- err
		return l, err
	}})
	if err := <-tried; !errors.Is(err, syscall.EADDRINUSE) {
		t.Fatal(err)
	}
	must.OK(t, taken.Close())
	for <-tried != nil {
	}
	resp, _ := w.ask("GET", taken.Addr().(*net.TCPAddr).AddrPort().Port(), "/livez")
	check.Equalf(t, resp.StatusCode, 200, "A7.7: %s", resp.Status)
	if log := w.log.String(); strings.Count(log, "FailedToStartProxierHealthcheck") != 1 {
		t.Errorf("A7.7: the log says %s", log)
	}
	w.server.Close()
	if !w.refused(taken.Addr().(*net.TCPAddr).AddrPort().Port()) {
		t.Error("the address is open after Close")
	}
}
