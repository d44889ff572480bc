package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/listener"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/tproxy"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
	"github.com/sluice-proxy/sluice/test/records"
	"github.com/sluice-proxy/sluice/test/wait"
	"github.com/sluice-proxy/sluice/upstream"
)

func TestMain(m *testing.M) {
	runtime.GOMAXPROCS(poll.Procs(loops))
	os.Exit(netns.Main(m))
}

// loops is the number of event loops of a node.
const loops = 2

// patience bounds every wait of the tests.
const patience = 20 * time.Second

// patient is the plan of nodes whose endpoints answer or refuse: a busy machine may take
// longer for that than the default plan waits.
var patient = balancer.Plan{Timeouts: []time.Duration{patience}, Total: patience}

// besideSilent is the plan of nodes with a silent endpoint: it soon goes on to another
// one, and comes back to that with more patience if the machine is busy.
var besideSilent = balancer.Plan{Timeouts: []time.Duration{
	250 * time.Millisecond, 250 * time.Millisecond, time.Second, time.Second, 4 * time.Second, 4 * time.Second,
}, Total: patience}

// node is a Server with everything around it, in a lab's node.
type node struct {
	t       testing.TB
	policy  policy.Config
	lab     *netns.Lab
	store   *service.Store
	steer   *spy
	table   *conntrack.Table
	server  *Server
	manager *listener.Manager
	options listener.Options // of manager
	passed  atomic.Int64     // the clock of grace periods
	records records.Sink
}

// spy is a Redirector that remembers the plan.
type spy struct {
	redirect.Redirector
	plan redirect.Plan
	// mute has no answers come back to clients' addresses.
	mute bool
}

func (s *spy) Traits() redirect.Traits {
	t := s.Redirector.Traits()
	if s.mute {
		t.Replies = redirect.Replies{}
	}
	return t
}

func (s *spy) Apply(p redirect.Plan) error {
	s.plan = p
	return s.Redirector.Apply(p)
}

// setup is what a node is made with.
type setup struct {
	listener.Options
	Config
}

// newNode starts a node with two event loops. change may alter the
// configuration that tests use.
func newNode(t testing.TB, lab *netns.Lab, change func(*setup)) *node {
	t.Helper()
	n := &node{t: t, lab: lab, policy: policy.Config{NodeName: "node"}, store: service.NewStore(service.StoreOptions{NodeName: "node"})}
	n.table = conntrack.NewTable(conntrack.Options{Shards: loops, Sink: &n.records})
	r := relay.New(relay.Config{Splice: true})
	var shares []Loop
	var polls []*poll.Loop
	var running sync.WaitGroup
	for range loops {
		loop := must.Get(poll.New())(t)
		shares = append(shares, Loop{Poll: loop, Relay: r.NewWorker(loop)})
		polls = append(polls, loop)
		running.Add(1)
		go func() {
			defer running.Done()
			check.OK(t, lab.Node.Do(loop.Run))
		}()
	}
	steer := must.Get(tproxy.New(tproxy.Options{Routes: route.Options{NetNS: lab.Node.FD()}}))(t)
	n.steer = &spy{Redirector: steer}
	o := setup{
		Config: Config{
			Backlog: 128, MaxListeners: 100, MaxConnections: 1000, MaxServiceConnections: 1000, MaxNamespaceConnections: 1000,
			MaxServiceDialing: 100, Balancer: balancer.Options{MaxPins: 100, Plan: patient},
		},
		Options: listener.Options{
			Report:   func(service.Name, string) {},
			MaxBound: 100, Loops: polls, Table: n.table, Redirector: n.steer, Logger: zerolog.New(zerolog.NewTestWriter(t)),
			Clock: n.passed.Load, // so that no grace period ends because the machine is slow
		},
	}
	if change != nil {
		change(&o)
	}
	if o.HostAddresses != nil {
		n.policy.NodeAddresses = o.HostAddresses()
	}
	traits := o.Redirector.Traits()
	var rules *upstream.Rules
	must.OK(t, lab.Node.Do(func() error {
		rules = upstream.New(traits, nil, o.Logger) // which asks for the node's range of local ports
		return nil
	}))
	n.server = New(Options{Config: o.Config, Loops: shares, Table: n.table, Traits: traits, Upstream: rules, Clock: o.Clock, Logger: o.Logger})
	o.Options.Descriptors = n.server
	udp := datagram.New(datagram.Options{
		Config: datagram.Config{MaxListeners: o.MaxListeners, Balancer: o.Balancer},
		Loops:  polls, Table: n.table, Traits: traits, Upstream: rules, Logger: o.Logger,
	})
	o.Protocols = map[service.Protocol]listener.Protocol{
		service.TCP: {Ports: n.server, Listeners: n.server, SocketsPerPort: 1, KeepsConnections: true},
		service.UDP: {Ports: udp, Listeners: udp, SocketsPerPort: udp.SocketsPerPort()},
	}
	o.DataPaths = []listener.DataPath{n.server, udp}
	n.options = o.Options
	n.manager = listener.New(o.Options)
	t.Cleanup(func() {
		check.OK(t, n.steer.Close())
		n.stop()
		for _, l := range shares {
			l.Poll.Stop()
			l.Relay.Close()
		}
		running.Wait()
	})
	return n
}

// stop ends all connections and waits for their records.
func (n *node) stop() {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := n.manager.Stop(ctx); err != nil {
		n.t.Error(err)
	}
	if err := n.table.Close(ctx); err != nil {
		n.t.Error(err)
	}
	check.Equalf(n.t, n.server.Stats().Open, 0, "connections open after the stop")
}

// apply puts a change in force.
func (n *node) apply(c service.Change) {
	n.t.Helper()
	err := n.lab.Node.Do(func() error {
		return n.manager.Apply(policy.Compile(n.server.state.Load().table, n.store.Apply(c), n.policy))
	})
	must.OK(n.t, err)
}

// web gives a Service on port 80 and a slice for each of its endpoints.
func web(name, clusterIP string, endpoints ...netip.AddrPort) service.Change {
	return objects.Service(name, clusterIP, []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}, 0, endpoints...)
}

// echo starts an echo server on a backend and gives its endpoint.
func (n *node) echo(backend int, port uint16) netip.AddrPort {
	n.t.Helper()
	n.lab.Backends[backend].EchoTCP(n.t, port)
	return netip.AddrPortFrom(n.lab.Backends[backend].IPv4, port)
}

// silent gives an endpoint that swallows what is sent to it.
func (n *node) silent() netip.AddrPort {
	return netip.MustParseAddrPort("10.2.1.77:80")
}

// dial connects from the client host.
func (n *node) dial(address string) *net.TCPConn {
	n.t.Helper()
	c := n.lab.Client.Connect(n.t, "tcp", address)
	_ = c.SetDeadline(time.Now().Add(patience))
	return c.(*net.TCPConn)
}

// name reads who answered.
func name(t *testing.T, c net.Conn) string {
	t.Helper()
	return must.Get(netns.AskOn(c))(t)
}

// wantReset connects and wants to be reset, which may be as soon as the
// connection is made.
func wantReset(t *testing.T, from *netns.Host, address string) {
	t.Helper()
	c, err := from.Dial("tcp", address)
	if err == nil {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		_, err = c.Read(make([]byte, 1))
	}
	check.ErrorIsf(t, err, syscall.ECONNRESET, "%s", address)
}

func TestPlanSaysWhatIsSteeredRefusedAndLocal(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) {
		o.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	})
	ep4, ep6 := netip.MustParseAddrPort("10.2.1.2:80"), netip.MustParseAddrPort("[fd00:2:1::2]:80")
	n.apply(web("inside", "10.96.0.1", ep4))
	n.apply(web("outside", "10.97.0.1", ep4))
	n.apply(web("six", "fd00:96::1", ep6))
	n.apply(web("empty", "10.96.0.2"))
	dst := func(a string) service.Destination {
		return service.Destination{Addr: netip.MustParseAddr(a), Port: 80, Protocol: service.TCP}
	}
	p := n.steer.plan
	for _, a := range []string{"10.96.0.1", "10.97.0.1", "fd00:96::1"} {
		if target, _ := p.Steer.Get(dst(a)); target.Port == 0 {
			t.Errorf("%s is not steered", a)
		}
	}
	if !p.Refuse.Has(dst("10.96.0.2")) || p.Steer.Len() != 3 || p.Refuse.Len() != 1 || p.ClusterIPs.Len() != 4 {
		t.Errorf("A3.4: steer %v, refuse %v, cluster IPs %v", p.Steer, p.Refuse, p.ClusterIPs)
	}
	local := redirect.Ranges(p.Local)
	want := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("10.97.0.1/32"), netip.MustParsePrefix("fd00:96::1/128")}
	check.EqualSlicesf(t, local, want, "local")

	// The listener of a port stays as long as the port, with endpoints or not.
	port, _ := p.Steer.Get(dst("10.96.0.1"))
	n.apply(service.Change{Deleted: objects.Gone("inside", 1).Deleted[1:]})
	n.apply(web("inside", "10.96.0.1", ep4))
	if got, _ := n.steer.plan.Steer.Get(dst("10.96.0.1")); got != port {
		t.Errorf("listener moved from %v to %v", port, got)
	}
	before := n.server.Stats().Listeners
	n.apply(objects.Gone("inside", 1))
	check.Equalf(t, n.server.Stats().Listeners, before-1, "listeners after a service is gone, had %d", before)
}

func TestServicesShareLanesBeyondTheBound(t *testing.T) {
	netns.Require(t)
	const services = 7
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) { o.MaxListeners = 2 })
	for i := range services {
		n.apply(web(fmt.Sprintf("s%d", i), fmt.Sprintf("10.96.0.%d", i+1), n.echo(0, uint16(8000+i))))
	}
	check.Equalf(t, n.server.Stats().Listeners, 2, "listeners")
	for i := range services {
		c := n.dial(fmt.Sprintf("10.96.0.%d:80", i+1))
		check.Equalf(t, name(t, c), fmt.Sprintf("b1:%d", 8000+i), "service %d: who answered", i)
	}
	for i := range services {
		n.apply(objects.Gone(fmt.Sprintf("s%d", i), 1))
	}
	check.Equalf(t, n.server.Stats().Listeners, 0, "listeners left")
}

// An address that has left the model stays local as long as a connection needs
// it (A8.7), and no longer.
func TestA87_ConnectionOutlivesItsService(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), nil)
	n.apply(web("web", "10.97.0.1", n.echo(0, 8080)))
	c := n.dial("10.97.0.1:80")
	must.Equal(t, name(t, c), "b1:8080")
	n.apply(objects.Gone("web", 1))
	must.OK(t, must.Err(c.Write([]byte("still there"))))
	buf := make([]byte, 11)
	if _, err := io.ReadFull(c, buf); err != nil || string(buf) != "still there" {
		t.Fatalf("%q, %v", buf, err)
	}
	must.OK(t, must.Err(n.manager.Maintain()))
	must.Equalf(t, n.steer.plan.Local.Len(), 1, "local %v while a connection uses 10.97.0.1", n.steer.plan.Local)
	_ = c.CloseWrite()
	if _, err := c.Read(buf); err != io.EOF {
		t.Fatal(err)
	}
	wait.True(t, "the connection is over", func() bool { return n.server.Stats().Open == 0 })
	n.pass()
	check.Equalf(t, n.steer.plan.Local.Len(), 0, "local %v when nothing uses 10.97.0.1", n.steer.plan.Local)
}

// More connections than may be dialled at once wait for their turn; none is
// lost, and the neighbour service does not notice.
func TestDialingLimitMakesClientsWait(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) { o.MaxServiceDialing, o.Balancer.Plan = 2, besideSilent })
	live := n.echo(0, 8080)
	n.apply(web("half", "10.96.0.1", live, n.silent()))
	n.apply(web("well", "10.96.0.2", live))
	var wg sync.WaitGroup
	for range 24 {
		wg.Go(func() {
			c, err := n.lab.Client.Dial("tcp", "10.96.0.1:80")
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(patience))
			said, err := netns.AskOn(c)
			check.OK(t, err)
			check.Equal(t, said, "b1:8080")
		})
	}
	wait.True(t, "two connections are dialled", func() bool { return n.server.Stats().Dialing >= 2 })
	name(t, n.dial("10.96.0.2:80"))
	wg.Wait()
}

func TestServiceLimitResetsAndIsRecorded(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) { o.MaxServiceConnections = 3 })
	n.apply(web("web", "10.96.0.1", n.echo(0, 8080)))
	for range 3 {
		name(t, n.dial("10.96.0.1:80"))
	}
	wantReset(t, n.lab.Client, "10.96.0.1:80")
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.LimitReached: 1, conntrack.Shutdown: 3})
}

func TestLimitOfAllMakesClientsWait(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) { o.MaxConnections = 3 })
	n.apply(web("web", "10.96.0.1", n.echo(0, 8080)))
	var held []*net.TCPConn
	for range 3 {
		c := n.dial("10.96.0.1:80")
		name(t, c)
		held = append(held, c)
	}
	waiting := n.dial("10.96.0.1:80")
	wait.True(t, "accepting is paused", func() bool { return n.server.Stats().AtLimit > 0 })
	_ = held[0].Close()
	check.Equal(t, name(t, waiting), "b1:8080")
}

// A dead endpoint's attempts are in the record; the connection is answered.
func TestAttemptsAreRecorded(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), nil)
	closed := netip.AddrPortFrom(n.lab.Backends[0].IPv4, 9)
	n.apply(web("web", "10.96.0.1", closed, n.echo(0, 8080)))
	for range 4 {
		c := n.dial("10.96.0.1:80")
		name(t, c)
		_ = c.CloseWrite()
		_, _ = io.Copy(io.Discard, c)
	}
	wait.True(t, "four records", func() bool { return n.records.Ends()[conntrack.ClientFin] == 4 })
	refused := 0
	for _, r := range n.records.All() {
		check.Equalf(t, int(r.Attempts), len(r.Failed)+1, "%d attempts, %d failed", r.Attempts, len(r.Failed))
		for _, a := range r.Failed {
			refused++
			if a.Error != conntrack.DialRefused || a.Endpoint.Addr != closed {
				t.Errorf("attempt on %s: %s", a.Endpoint.Addr, a.Error)
			}
		}
		if r.ConnectTime <= 0 || r.FirstByte < r.ConnectTime || r.Duration < r.FirstByte {
			t.Errorf("times: connect %d, first byte %d, duration %d", r.ConnectTime, r.FirstByte, r.Duration)
		}
	}
	if refused == 0 {
		t.Error("no connection met the closed port")
	}
}

// A connection that looks for an endpoint while another Service gets its address does not
// reach that Service's endpoints: its record would name the wrong Service.
func TestConnectionStaysWithItsService(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), nil)
	n.apply(web("before", "10.96.0.1", netip.AddrPortFrom(n.lab.Backends[0].IPv4, 9))) // closed
	c := n.dial("10.96.0.1:80")
	wait.True(t, "the connection waits for an endpoint", func() bool { return n.server.Stats().Dialing == 1 })
	change := web("after", "10.96.0.1", n.echo(0, 8080))
	change.Deleted = objects.Gone("before", 1).Deleted
	n.apply(change)
	if got, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%d bytes, %v, want a reset", got, err)
	}
	check.Equal(t, name(t, n.dial("10.96.0.1:80")), "b1:8080")
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.ConnectFailed: 1, conntrack.Shutdown: 1})
}

// A stray connection, sent to a listening socket's own address, is reset and makes no
// record.
func TestStraysAreReset(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), nil)
	n.apply(web("web", "10.96.0.1", n.echo(0, 8080)))
	for _, target := range n.steer.plan.Steer.All() {
		wantReset(t, n.lab.Node, netip.AddrPortFrom(redirect.ListenIPv4, target.Port).String())
	}
	check.Equalf(t, n.server.Stats().Strays, 1, "strays")
}

// A cluster IP, or a range of them, that meets an address of the node spoils
// nothing else.
func TestNodesOwnAddressesAreNotTaken(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, func(o *setup) {
		o.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
		o.HostAddresses = func() []netip.Addr { return []netip.Addr{lab.Node.IPv4, lab.Node.IPv6} }
	})
	ep := n.echo(0, 8080)
	n.apply(web("wrong", lab.Node.IPv4.String(), ep))
	n.apply(web("right", "10.1.7.7", ep))
	check.Equal(t, name(t, n.dial("10.1.7.7:80")), "b1:8080")
	check.EqualSlicesf(t, redirect.Ranges(n.steer.plan.Local), []netip.Prefix{netip.MustParsePrefix("10.1.7.7/32")}, "local")
}

// Rule A3.5: a port whose policy leaves no endpoint on this node is silent.
func TestA35_LocalPolicyWithoutLocalEndpointsIsSilent(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), nil)
	change := web("web", "10.96.0.1", n.echo(0, 8080))
	local := corev1.ServiceInternalTrafficPolicyLocal
	change.Services[0].Spec.InternalTrafficPolicy = &local
	n.apply(change)
	dst := service.Destination{Addr: netip.MustParseAddr("10.96.0.1"), Port: 80, Protocol: service.TCP}
	if !n.steer.plan.Silent.Has(dst) {
		t.Errorf("steer %v, refuse %v, silent %v", n.steer.plan.Steer, n.steer.plan.Refuse, n.steer.plan.Silent)
	}
	c, err := n.lab.Client.Dialer(&net.Dialer{Timeout: 300 * time.Millisecond}, "tcp", "10.96.0.1:80")
	if err == nil {
		_ = c.Close()
	}
	var timeout net.Error
	if !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("connect got %v, want no answer", err)
	}
}
