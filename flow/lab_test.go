package flow

import (
	"context"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
	"github.com/sluice-proxy/sluice/test/records"
	"github.com/sluice-proxy/sluice/test/usrsctp"
)

func TestMain(m *testing.M) {
	runtime.GOMAXPROCS(poll.Procs(1))
	status := m.Run()
	usrsctp.Clean()
	closeLoaded()
	os.Exit(status)
}

// patience bounds every wait of the tests.
const patience = 20 * time.Second

// plan waits longer than balancer.DefaultPlan does: on a busy machine, and in an emulated
// guest, an endpoint that is up may need more than 250 ms.
var plan = balancer.Plan{Timeouts: []time.Duration{patience}, After: patience, Total: patience}

// hasty gives up the first endpoint of a connection soon: the silent one. One that is up may
// need some seconds.
var hasty = balancer.Plan{Timeouts: []time.Duration{5 * time.Second}, After: patience, Total: patience}

// noRelay is a Relay that serves nothing: what a test sees, the kernel did.
type noRelay struct {
	options   balancer.Options
	balancers map[service.PortName]*balancer.Balancer
	names     map[service.PortName]string // of their algorithms
	held      error                       // why nothing can be bound
}

func (r *noRelay) Bind(policy.Opening) error                         { return r.held }
func (*noRelay) Unbind(service.Destination)                          {}
func (r *noRelay) Balancer(name service.PortName) *balancer.Balancer { return r.balancers[name] }

func (*noRelay) Places(service.PortName) conntrack.Places { return nil }

// apply has balancers for the ports of a policy.
func (r *noRelay) apply(table *policy.Table) {
	for _, port := range table.Snapshot().Ports {
		if port == nil {
			continue
		}
		name := port.Annotations["balancer"]
		o, _ := r.options.For(port)
		if b := r.balancers[port.Name]; b != nil && r.names[port.Name] == name {
			b.Configure(o)
		} else {
			r.balancers[port.Name], r.names[port.Name] = balancer.New(o), name
		}
	}
}

// node is a Server in a lab's node.
type node struct {
	t      testing.TB
	lab    *netns.Lab
	store  *service.Store
	loop   *poll.Loop
	table  *conntrack.Table
	server *Server
	config policy.Config
	relay  *noRelay
	end    func()
	left   bool
	// release passes the maps and programs on to other tests; nil: they must not get them.
	release func()
	ports   []*service.Port // of the last change
	records records.Sink
}

// taken returns the records so far.
func (n *node) taken() []conntrack.Record { return n.records.All() }

// newNode starts a node. change may alter the options that tests use.
func newNode(t testing.TB, lab *netns.Lab, change func(*Options)) *node {
	t.Helper()
	return newNodeOf(t, lab, change, service.TCP, service.UDP, service.SCTP)
}

// newNodeOf is newNode with protocols that the kernel serves; the others are the relay's.
func newNodeOf(t testing.TB, lab *netns.Lab, change func(*Options), protocols ...service.Protocol) *node {
	t.Helper()
	n := &node{t: t, lab: lab, store: service.NewStore(service.StoreOptions{NodeName: "node"})}
	n.config = policy.Config{
		NodeName: "node", NodeAddresses: []netip.Addr{lab.Node.IPv4, lab.Node.IPv6}, NodeIPs: []netip.Addr{lab.Node.IPv4, lab.Node.IPv6},
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/14"), netip.MustParsePrefix("fd00::/16")},
	}
	n.table = conntrack.NewTable(conntrack.Options{Shards: 1, Sink: &n.records})
	var err error
	if n.loop, err = poll.New(); err != nil {
		t.Fatal(err)
	}
	loop, shard := n.loop, n.table.Shard(0)
	shard.OnPending(func() { loop.Post(shard.Flush) })
	o := Options{
		Shortcuts: true,
		MaxFlows:  4096, Namespace: lab.Node.FD(), Loop: loop, Shard: shard, Table: n.table,
		// No session may end while a busy machine verifies the programs of the next process.
		HalfClosedTimeout: time.Hour, UDPTimeout: time.Hour, UDPStreamTimeout: time.Hour,
		// As the plan: a thread that is stopped for seconds must not make the relay get a packet.
		waits:  waits{ask: patience, resend: patience, dead: patience},
		Logger: zerolog.New(zerolog.NewTestWriter(t)),
	}
	o.open = func(flows int, p *bpf.Pins) (k *bpf.Kernel, err error) {
		if p != nil || o.filters { // links and filters may stay
			return bpf.Open(flows, p)
		}
		k, n.release, err = openLoaded(flows)
		return k, err
	}
	if change != nil {
		change(&o)
	}
	must.OK(t, lab.Node.Do(func() (err error) {
		n.server, err = New(o)
		return err
	}))
	n.relay = &noRelay{options: balancer.Options{MaxPins: 100, Plan: plan}, balancers: make(map[service.PortName]*balancer.Balancer), names: make(map[service.PortName]string)}
	for _, p := range protocols {
		n.server.Over(n.relay, p)
	}
	var running sync.WaitGroup
	running.Go(func() {
		check.OK(t, lab.Node.Do(loop.Run))
	})
	must.OK(t, lab.Node.Do(n.server.Start))
	n.end = sync.OnceFunc(func() {
		loop.Stop()
		running.Wait()
		if t.Failed() {
			t.Logf("%+v", n.server.Stats())
		}
		n.server.Close()
		if !t.Failed() && n.release != nil {
			n.release()
		}
	})
	t.Cleanup(func() {
		if !n.left {
			n.stop()
		}
		n.end()
	})
	return n
}

// forgetsSoon keeps the first datagrams of a session no longer than a node does.
func (n *node) forgetsSoon() {
	n.onLoop(func() { n.server.worker.waits.resend = resendable })
}

// leave ends the node as a killed process ends.
func (n *node) leave() {
	n.left, n.release = true, nil
	n.onLoop(func() {
		w := n.server.worker
		w.waits.dead = 0
		atomic.StoreUint64(&w.kernel.Control.Beat, uint64(sys.Monotonic()))
	})
	n.end()
}

// stop ends all flows and waits for their records.
func (n *node) stop() {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := n.server.Stop(ctx); err != nil {
		n.t.Error(err)
	}
	if err := n.table.Close(ctx); err != nil {
		n.t.Error(err)
	}
	check.Equalf(n.t, n.server.Stats().Open, 0, "flows are open after the stop")
	check.Equalf(n.t, n.table.Stats().Misuse, 0, "records opened or closed twice")
	for _, port := range n.ports {
		if port == nil {
			continue
		}
		for f := range port.Families {
			for _, e := range port.Families[f].Endpoints {
				check.Equalf(n.t, n.table.Counters(port.Name).Loads().Of(e.Addr).Open(), 0, "connections of %s after the stop", e.Addr)
			}
		}
	}
	check.Equalf(n.t, n.entries(), 0, "entries are left after the stop")
	check.Equalf(n.t, n.spareTwice(), 0, "indices are spare twice")
}

// finish stops the node and its loop before the test ends.
func (n *node) finish() {
	n.stop()
	n.left = true
	n.end()
}

// spareTwice counts the indices that two flows would get.
func (n *node) spareTwice() (count int) {
	spare := make([]bool, len(n.server.kernel.Flows))
	count = n.server.kernel.Spares.Len()
	n.server.kernel.Spares.Mark(spare)
	for _, is := range spare {
		if is {
			count--
		}
	}
	return count
}

// entries counts the entries in the kernel.
func (n *node) entries() int {
	count := 0
	for _, b := range n.server.kernel.Index.Buckets {
		for i := range b.Slot {
			if atomic.LoadUint64(&b.Slot[i]) != 0 {
				count++
			}
		}
	}
	return count
}

// apply puts a change in force, as the listeners' manager does.
func (n *node) apply(c service.Change) {
	n.t.Helper()
	table := policy.Compile(nil, n.store.Apply(c), n.config)
	n.ports = table.Snapshot().Ports
	host := hostnet.NewAddresses([]netip.Addr{n.lab.Node.IPv4, n.lab.Node.IPv6})
	n.relay.apply(table)
	for _, p := range n.server.paths {
		if p != nil && p.relay != nil {
			p.Apply(table, host)
		}
	}
}

// full reports whether tests run at full size.
func full() bool { return os.Getenv("SLUICE_TEST_FULL") == "1" }

// svc gives a Service with port 80 of both protocols, and its endpoints.
func svc(clusterIP string, change func(*corev1.Service), endpoints ...netip.AddrPort) service.Change {
	c := objects.Service("web", clusterIP, []corev1.ServicePort{
		{Name: "tcp", Port: 80, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(8080)},
		{Name: "udp", Port: 80, Protocol: corev1.ProtocolUDP, TargetPort: intstr.FromInt32(8080)},
	}, 4, endpoints...)
	if change != nil {
		change(c.Services[0])
	}
	return c
}

// forDeciders runs a test twice: with flows that the table in BPF decides about where it can,
// and with flows that userspace decides about.
func forDeciders(t *testing.T, test func(t *testing.T, by func(*Options))) {
	for name, by := range map[string]func(*Options){"table": func(*Options) {}, "upcall": func(o *Options) { o.ask = true }} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they wait most of the time
			test(t, by)
		})
	}
}

// nobodyAt returns an address from which no answer comes: a backend gets its packets and drops
// them. Without a neighbour, the node would say after five seconds that it is unreachable.
func nobodyAt(t testing.TB, lab *netns.Lab, b *netns.Host) netip.Addr {
	t.Helper()
	ip := b.IPv4.Next()
	must.OK(t, lab.Node.Netlink().NeighSet(&netlink.Neigh{
		LinkIndex: lab.Node.Link(t, b.Name()).Attrs().Index, State: netlink.NUD_PERMANENT,
		IP: ip.AsSlice(), HardwareAddr: b.Link(t, "eth0").Attrs().HardwareAddr,
	}))
	return ip
}

func at(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

// requireRoot skips a test that loads BPF programs.
func requireRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP-NEEDS: root, to load BPF programs")
	}
}
