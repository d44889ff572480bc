package datagram

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/tproxy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
	"github.com/sluice-proxy/sluice/test/records"
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

// node is a Server with steering, in a lab's node.
type node struct {
	t       testing.TB
	lab     *netns.Lab
	store   *service.Store
	steer   redirect.Redirector
	table   *conntrack.Table
	loops   []*poll.Loop
	server  *Server
	host    hostnet.Addresses
	records records.Sink
}

// newNode starts a node. change may modify the options.
func newNode(t testing.TB, lab *netns.Lab, change func(*Options)) *node {
	t.Helper()
	steer := must.Get(tproxy.New(tproxy.Options{Routes: route.Options{NetNS: lab.Node.FD()}}))(t)
	return newNodeBy(t, lab, steer, change)
}

// newNodeBy is newNode with a steering mode.
func newNodeBy(t testing.TB, lab *netns.Lab, steer redirect.Redirector, change func(*Options)) *node {
	t.Helper()
	n := &node{t: t, lab: lab, store: service.NewStore(service.StoreOptions{NodeName: "node"})}
	n.table = conntrack.NewTable(conntrack.Options{Shards: loops, Sink: &n.records})
	var running sync.WaitGroup
	for i := range loops {
		loop := must.Get(poll.New())(t)
		n.loops = append(n.loops, loop)
		shard := n.table.Shard(i)
		shard.OnPending(func() { loop.Post(shard.Flush) })
		running.Add(1)
		go func() {
			defer running.Done()
			check.OK(t, lab.Node.Do(loop.Run))
		}()
	}
	n.steer = steer
	o := Options{
		Config: Config{
			MaxSessions: 1000, MaxServiceSessions: 1000, MaxListeners: 100,
			Timeout: 30 * time.Second, StreamTimeout: 2 * time.Minute, Balancer: balancer.Options{MaxPins: 100, Plan: balancer.DefaultPlan()},
		},
		Loops: n.loops, Table: n.table, Traits: steer.Traits(), Logger: zerolog.New(zerolog.NewTestWriter(t)),
	}
	if change != nil {
		change(&o)
	}
	must.OK(t, lab.Node.Do(func() error {
		o.Upstream = upstream.New(o.Traits, nil, o.Logger) // which asks for the node's ranges of local ports
		return nil
	}))
	n.server = New(o)
	t.Cleanup(func() {
		check.OK(t, steer.Close())
		n.stop()
		for _, l := range n.loops {
			l.Stop()
		}
		running.Wait()
	})
	return n
}

// stall has the loops do nothing until resume is called.
func (n *node) stall() (resume func()) {
	stalled, end := make(chan struct{}), make(chan struct{})
	for _, l := range n.loops {
		l.Post(func() {
			stalled <- struct{}{}
			<-end
		})
	}
	for range n.loops {
		<-stalled
	}
	resume = sync.OnceFunc(func() { close(end) })
	n.t.Cleanup(resume)
	return resume
}

// stop ends all sessions and waits for their records.
func (n *node) stop() {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := errors.Join(n.server.Stop(ctx), n.table.Close(ctx)); err != nil {
		n.t.Error(err)
	}
	check.Equalf(n.t, n.server.Stats().Sessions.Load(), 0, "sessions open after the stop")
	check.Equalf(n.t, n.table.Stats().Misuse, 0, "records opened or closed twice")
}

// apply applies a change in the same steps as listener.Manager.
func (n *node) apply(c service.Change) {
	n.t.Helper()
	var bound error
	err := n.lab.Node.Do(func() error {
		table := policy.Compile(nil, n.store.Apply(c), policy.Config{
			NodeName: "node", NodeAddresses: []netip.Addr{n.lab.Node.IPv4, n.lab.Node.IPv6},
		})
		n.server.Apply(table, n.host, false)
		var plan redirect.Plan
		for _, port := range table.Snapshot().Ports {
			if port == nil {
				continue
			}
			for d := range port.Destinations {
				plan.ClusterIPs = plan.ClusterIPs.With(d.Addr, struct{}{})
				plan.Local = plan.Local.With(netip.PrefixFrom(d.Addr, d.Addr.BitLen()), struct{}{})
				if table.Steering(d) != policy.Accept {
					plan.Refuse = plan.Refuse.With(d, struct{}{})
					continue
				}
				if n.steer.Traits().BindEach {
					plan.Steer = plan.Steer.With(d, redirect.Target{Port: d.Port})
					defer func() { bound = errors.Join(bound, n.server.Bind(table.Open(d, port.Name, service.ClusterIP))) }()
					continue
				}
				target, err := n.server.Listen(table.Open(d, port.Name, service.ClusterIP))
				if err != nil {
					return err
				}
				plan.Steer = plan.Steer.With(d, target)
			}
		}
		defer n.server.Prune()
		return n.steer.Apply(plan)
	})
	if err = errors.Join(err, bound); err != nil {
		n.t.Fatal(err)
	}
}

// dnsPorts are those of svc.
var dnsPorts = []corev1.ServicePort{{Port: 53, Protocol: corev1.ProtocolUDP}}

// svc returns a UDP Service on port 53 and its endpoints. The annotations have no
// prefix.
func svc(name, clusterIP string, annotations map[string]string, endpoints ...netip.AddrPort) service.Change {
	c := objects.Service(name, clusterIP, dnsPorts, 3, endpoints...)
	for k, v := range annotations {
		c.Services[0].Annotations["sluice.dev/"+k] = v
	}
	return c
}

// endpointSlices returns three EndpointSlices of svc.
func endpointSlices(name, clusterIP string, endpoints ...netip.AddrPort) []*discoveryv1.EndpointSlice {
	return objects.Slices(name, clusterIP, dnsPorts, 3, endpoints...)
}

// at returns an endpoint.
func at(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

// client returns a socket on the client host that is connected to an address.
func client(t testing.TB, h *netns.Host, to string) net.Conn {
	t.Helper()
	return h.Connect(t, "udp", to)
}

// ask sends a datagram and returns the answer.
func ask(c net.Conn, question string, wait time.Duration) (string, error) {
	if _, err := c.Write([]byte(question)); err != nil {
		return "", err
	}
	if err := c.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return "", err
	}
	buf := make([]byte, 1<<16)
	n, err := c.Read(buf)
	return string(buf[:n]), err
}
