package listener

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// fakeRedirector keeps plans in memory, and refuses invalid ones as others do.
type fakeRedirector struct {
	traits redirect.Traits
	plan   redirect.Plan
	err    error // of the next Apply
}

var _ redirect.Redirector = (*fakeRedirector)(nil)

func (f *fakeRedirector) Traits() redirect.Traits { return f.traits }

func (f *fakeRedirector) Apply(to redirect.Plan) error {
	if err := f.err; err != nil {
		f.err = nil
		return err
	}
	c := redirect.Diff(&f.plan, &to)
	if err := c.Validate(&to); err != nil {
		return err
	}
	f.plan = to
	return nil
}

func (f *fakeRedirector) Verify() (bool, error)    { return false, nil }
func (f *fakeRedirector) Changed() <-chan struct{} { return nil }
func (f *fakeRedirector) Close() error             { return nil }
func (f *fakeRedirector) Leave()                   {}

// fakeTransport is all of one protocol. It opens no sockets, and writes down what it is
// told to do.
type fakeTransport struct {
	lacks error
	ports map[service.PortName]uint16 // of listening sockets
	bound map[service.Destination]policy.Action
	taken map[service.Destination]bool // by another program
	table *policy.Table
	calls []string
}

func newFakeTransport() *fakeTransport {
	return &fakeTransport{
		ports: map[service.PortName]uint16{},
		bound: map[service.Destination]policy.Action{}, taken: map[service.Destination]bool{},
	}
}

func (f *fakeTransport) say(format string, args ...any) {
	f.calls = append(f.calls, fmt.Sprintf(format, args...))
}

func (f *fakeTransport) Listen(o policy.Opening) (redirect.Target, error) {
	f.say("listen %s%s", o.Destination, ranges(o))
	if f.ports[o.Name] == 0 {
		f.ports[o.Name] = uint16(len(f.ports) + 1)
	}
	return redirect.Target{Port: f.ports[o.Name]}, nil
}

func (f *fakeTransport) Unlisten(o policy.Opening) {
	f.say("unlisten %s", o.Destination)
}

func (f *fakeTransport) Bind(o policy.Opening) error {
	f.say("bind %s %s%s", o.Destination, o.Action, ranges(o))
	if f.taken[o.Destination] {
		return fmt.Errorf("bind: %w", sys.EADDRINUSE)
	}
	f.bound[o.Destination] = o.Action
	return nil
}

func (f *fakeTransport) Unbind(d service.Destination) {
	f.say("unbind %s", d)
	delete(f.bound, d)
}

func (f *fakeTransport) Apply(table *policy.Table, _ hostnet.Addresses, withdrawn bool) {
	f.table = table
	f.say("apply withdrawn=%t", withdrawn)
}

func (f *fakeTransport) Prune()                     { f.say("prune") }
func (f *fakeTransport) InGrace() bool              { return false }
func (f *fakeTransport) Stop(context.Context) error { return nil }

// ranges shows who may connect, if that is not everybody.
func ranges(o policy.Opening) string {
	if !o.Limited {
		return ""
	}
	return fmt.Sprint(" for ", o.Allowed)
}

// plane is a Manager on fakes: nothing of it touches the kernel.
type plane struct {
	t        testing.TB
	store    *service.Store
	policy   policy.Config
	steer    *fakeRedirector
	tcp, udp *fakeTransport
	host     []netip.Addr
	now      int64
	manager  *Manager
}

// newPlane makes a Manager without event loops. change may alter the options.
func newPlane(t testing.TB, change func(*plane, *Options)) *plane {
	t.Helper()
	p := &plane{
		t: t, store: service.NewStore(service.StoreOptions{NodeName: "node"}), policy: policy.Config{NodeName: "node"},
		steer: &fakeRedirector{}, tcp: newFakeTransport(), udp: newFakeTransport(),
	}
	o := Options{
		Report:   func(service.Name, string) {},
		MaxBound: 100, Table: conntrack.NewTable(conntrack.Options{}), Redirector: p.steer,
		Clock: func() int64 { return p.now }, Logger: zerolog.New(zerolog.NewTestWriter(t)),
		Protocols: map[service.Protocol]Protocol{
			service.TCP: {Ports: p.tcp, Listeners: p.tcp, SocketsPerPort: 1, KeepsConnections: true},
			service.UDP: {Ports: p.udp, Listeners: p.udp, SocketsPerPort: 2},
		},
		DataPaths: []DataPath{p.tcp, p.udp},
	}
	loop := must.Get(poll.New())(t)
	o.Loops = []*poll.Loop{loop}
	ran := make(chan error, 1)
	go func() { ran <- loop.Run() }()
	t.Cleanup(func() {
		loop.Stop()
		check.OK(t, <-ran)
	})
	if change != nil {
		change(p, &o)
	}
	p.manager = New(o)
	return p
}

// apply puts a change in force.
func (p *plane) apply(c service.Change) {
	p.t.Helper()
	if p.host != nil {
		p.policy.NodeAddresses = p.host
	}
	must.OK(p.t, p.manager.Apply(policy.Compile(p.manager.table.Load(), p.store.Apply(c), p.policy)))
}

// pass lets the grace period end.
func (p *plane) pass() {
	p.t.Helper()
	p.now += int64(redirect.Grace) + 1
	must.OK(p.t, must.Err(p.manager.Maintain()))
}

// want compares the dump of the plan in force.
func (p *plane) want(lines ...string) {
	p.t.Helper()
	slices.Sort(lines)
	got, want := dump(&p.steer.plan), strings.Join(append(lines, ""), "\n")
	check.Textf(p.t, got, want, "the plan")
}

// calls returns what a protocol was told since the last time.
func (f *fakeTransport) took() []string {
	calls := f.calls
	f.calls = nil
	return calls
}

// wantCalls compares what a protocol was told.
func wantCalls(t *testing.T, f *fakeTransport, want ...string) {
	t.Helper()
	if got := f.took(); !slices.Equal(got, want) {
		t.Errorf("calls\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// dump returns a plan as text: one line for each entry, sorted.
func dump(p *redirect.Plan) string {
	var lines []string
	for d, target := range p.Steer.All() {
		lines = append(lines, fmt.Sprintf("steer %s to %d", d, target.Port))
	}
	for name, set := range map[string]redirect.Set[service.Destination]{
		"refuse": p.Refuse, "drop": p.Silent, "linger": p.Lingering, "own": p.Own,
	} {
		for d := range set.Keys() {
			lines = append(lines, name+" "+d.String())
		}
	}
	for a := range p.ClusterIPs.Keys() {
		lines = append(lines, "cluster "+a.String())
	}
	for a := range p.NonLocal.Keys() {
		lines = append(lines, "foreign "+a.String())
	}
	for r := range p.Local.Keys() {
		lines = append(lines, "local "+r.String())
	}
	slices.Sort(lines)
	return strings.Join(append(lines, ""), "\n")
}

var errSteering = errors.New("no netlink today")

// web returns a Service on port 80 with endpoints.
func web(name, clusterIP string, endpoints ...string) service.Change {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "test", Name: name},
		Spec:       corev1.ServiceSpec{ClusterIP: clusterIP, Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}},
	}
	family, port := discoveryv1.AddressTypeIPv4, int32(8080)
	if netip.MustParseAddr(clusterIP).Is6() {
		family = discoveryv1.AddressTypeIPv6
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "test", Name: name + "-0", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: family,
		Ports:       []discoveryv1.EndpointPort{{Port: &port}},
	}
	for _, a := range endpoints {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return service.Change{Services: []*corev1.Service{s}, EndpointSlices: []*discoveryv1.EndpointSlice{slice}}
}

// gone deletes a Service of web.
func gone(name string) service.Change {
	return service.Change{Deleted: []service.ObjectKey{
		{Kind: service.KindService, Name: service.Name{Namespace: "test", Name: name}},
		{Kind: service.KindEndpointSlice, Name: service.Name{Namespace: "test", Name: name + "-0"}},
	}}
}

// nodePort gives a Service of web a node port.
func nodePort(c service.Change, port int32) service.Change {
	c.Services[0].Spec.Type = corev1.ServiceTypeNodePort
	c.Services[0].Spec.Ports[0].NodePort = port
	return c
}

// balanced gives a Service of web a load balancer IP with source ranges.
func balanced(c service.Change, ip string, ranges ...string) service.Change {
	s := c.Services[0]
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	s.Spec.LoadBalancerSourceRanges = ranges
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: ip}}
	return c
}
