package flow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/bpffs"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Flows of a process that ended go on, and the next one adopts them.
func TestFlowsAreAdopted(t *testing.T) {
	lab := netns.NewLab(t, 2)
	for _, b := range lab.Backends {
		b.WitnessTCP(t, 8080)
		b.WitnessUDP(t, 8080)
	}
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	first := newNode(t, lab, pinned)
	services := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080))
	first.apply(services)
	tcp := lab.Client.Connect(t, "tcp", vip4+":80")
	must.OK(t, must.Err(netns.AskOn(tcp)))
	udp := lab.Client.Connect(t, "udp", vip4+":80")
	said := must.Get(question(udp))(t)
	first.leave()

	echo := func() error {
		if _, err := io.WriteString(tcp, "ping"); err != nil {
			return err
		}
		b := make([]byte, 4)
		if _, err := io.ReadFull(tcp, b); err != nil || string(b) != "ping" {
			return fmt.Errorf("%q, %v", b, err)
		}
		if again, err := question(udp); err != nil || again != said {
			return fmt.Errorf("%q after %q, %v", again, said, err)
		}
		return nil
	}
	for range 10 { // while nobody runs
		must.OK(t, echo())
	}
	next := newNode(t, lab, func(o *Options) { pinned(o); o.Keep = false })
	next.apply(services)
	check.Equalf(t, next.server.Stats().Open, 2, "flows were adopted")
	must.OK(t, echo())
	if said, err := lab.Client.Ask("tcp", vip4+":80"); err != nil || !strings.HasPrefix(said, "b") {
		t.Fatalf("%q, %v", said, err)
	}
	_ = tcp.Close()
	wait.For(t, "records", patience, func() error {
		for _, r := range next.taken() {
			if r.Client.String() != tcp.LocalAddr().String() {
				continue
			}
			if r.End != conntrack.ClientFin || r.BytesFromClient != 12+11*4 || r.ConnectTime <= 0 || r.Attempts != 1 || r.Port == nil || r.Endpoint == nil {
				t.Errorf("%+v", r)
			}
			return nil
		}
		return fmt.Errorf("%d records, none of the adopted connection", len(next.taken()))
	})
	check.Equalf(t, len(first.taken()), 0, "records of flows that went on")
	next.stop()
	dir := pinsOf(t, root, lab)
	if names, err := os.ReadDir(string(dir)); err == nil {
		t.Errorf("%s is there after the stop, with %v", dir, names)
	}
}

// UDP sessions of a version with other maps go on with the next process, whose programs see their
// datagrams first, with its records; so do they with a process of the version before.
func TestSessionsOfAnotherVersionGoOn(t *testing.T) {
	for _, hidden := range []bool{false, true} {
		t.Run(fmt.Sprintf("hidden %v", hidden), func(t *testing.T) { testOtherVersion(t, hidden) })
	}
}

func testOtherVersion(t *testing.T, hidden bool) {
	lab := netns.NewLab(t, 3)
	var endpoints []netip.AddrPort
	for _, b := range lab.Backends {
		b.WitnessTCP(t, 8080)
		b.WitnessUDP(t, 8080)
		endpoints = append(endpoints, at(b.IPv4, 8080))
	}
	root := netns.MountBPF(t)
	of := func(flows int, keep bool) func(*Options) { // the maps' size is of their version
		return func(o *Options) { o.BPFRoot, o.Name, o.Keep, o.MaxFlows = root, "test", keep, flows }
	}
	services := svc(vip4, nil, endpoints...)
	node := newNode(t, lab, of(4096, true))
	node.config.MasqueradeAll = hidden
	node.apply(services)
	tcp := lab.Client.Connect(t, "tcp", vip4+":80")
	must.OK(t, must.Err(netns.AskOn(tcp)))
	var sessions []net.Conn
	var saw []string
	for range 24 {
		udp := lab.Client.Connect(t, "udp", vip4+":80")
		said := must.Get(question(udp))(t)
		sessions, saw = append(sessions, udp), append(saw, said)
	}
	wait.True(t, "all are known", func() bool { return node.server.Stats().Open == int64(len(sessions))+1 })
	for turn, flows := range []int{2048, 4096} {
		node.leave()
		node = newNode(t, lab, of(flows, turn == 0))
		node.config.MasqueradeAll = hidden
		for range 2 { // as the programs find them, and as the process has adopted them
			for i, udp := range sessions {
				if said, err := question(udp); err != nil || said != saw[i] {
					t.Errorf("turn %d, session %d: the endpoint sees %q, and before %q; %v", turn, i, said, saw[i], err)
				}
			}
			must.OK(t, must.Err(io.WriteString(tcp, "ping")))
			must.OK(t, must.Err(io.ReadFull(tcp, make([]byte, 4))))
			node.apply(services)
		}
	}
	check.Equalf(t, node.server.Stats().Open, int64(len(sessions))+1, "flows were adopted")
	n := must.Get(firstProgram(lab))(t)
	if own, err := node.server.kernel.Ethernet.Ingress.Info(); err != nil {
		t.Error(err)
	} else if id, _ := own.ID(); id != n {
		t.Errorf("program %d of another version gets packets before %d", n, id)
	}
	_ = tcp.Close()
	wait.True(t, "the connection's record", func() bool { return node.endedBy(conntrack.ClientFin) == 1 })
	node.finish()
	for _, r := range node.taken() {
		if r.Protocol == service.UDP && (r.End != conntrack.Shutdown || r.Port == nil || r.Endpoint == nil || r.BytesFromClient != 5*uint64(len("who?"))) {
			t.Errorf("%+v", r)
		}
	}
}

// firstProgram returns which program gets a client's packets first.
func firstProgram(lab *netns.Lab) (id ebpf.ProgramID, err error) {
	err = lab.Node.Do(func() error {
		l, err := net.InterfaceByName("client")
		if err != nil {
			return err
		}
		at, err := link.QueryPrograms(link.QueryOptions{Target: l.Index, Attach: ebpf.AttachTCXIngress})
		if err == nil {
			id = at.Programs[0].ID
		}
		return err
	})
	return id, err
}

// atRest is how long a connection has to be quiet for the next process in TestAdoptedFlowsEndInTime.
const atRest = time.Millisecond

// The next process ends idle flows, however soon another one follows.
func TestAdoptedFlowsEndInTime(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessTCP(t, 8080)
	lab.Backends[0].WitnessUDP(t, 8080)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	first := newNode(t, lab, pinned)
	services := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080))
	first.apply(services)
	tcp := lab.Client.Connect(t, "tcp", vip4+":80")
	must.OK(t, must.Err(netns.AskOn(tcp)))
	openSessions(t, lab, 1)
	wait.True(t, "both are known", func() bool { return first.server.Stats().Open == 2 })
	first.leave()
	next := newNode(t, lab, func(o *Options) {
		pinned(o)
		o.Keep, o.IdleTimeout, o.UDPTimeout, o.UDPStreamTimeout = false, atRest, atRest, atRest
	})
	next.apply(services)
	open := make(chan int64, 1)
	next.onLoop(func() { // timers of now come before it
		next.loop.Schedule(new(poll.Timer), poll.Nanotime()+int64(confirmation/10), timed(func() { open <- next.server.Stats().Open }))
	})
	check.Equalf(t, <-open, 0, "how many of a connection and a session are open")
	wait.True(t, "the records", func() bool { return next.endedBy(conntrack.Idle) == 2 })
}

// timed is called when its timer is due.
type timed func()

func (f timed) HandleTimer(*poll.Timer) { f() }

// What an earlier process forwarded of a protocol is adopted by one that relays that protocol, as
// its flags say. The kernel begins nothing new of it: neither the table, nor by asking a process
// that would not answer.
func TestProtocolIsRelayedFromNowOn(t *testing.T) {
	for name, asks := range map[string]bool{"table": false, "process": true} {
		t.Run(name, func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].WitnessTCP(t, 8080)
			lab.Backends[0].WitnessUDP(t, 8080)
			root := netns.MountBPF(t)
			pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
			first := newNode(t, lab, func(o *Options) { pinned(o); o.ask = asks })
			services := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080))
			first.apply(services)
			open := lab.Client.Connect(t, "tcp", vip4+":80")
			must.OK(t, must.Err(netns.AskOn(open)))
			first.leave()

			next := newNodeOf(t, lab, func(o *Options) { pinned(o); o.Keep = false }, service.UDP)
			next.apply(services)
			check.Equalf(t, next.server.Stats().Open, 1, "connections were adopted")
			check.OK(t, must.Err(io.WriteString(open, "ping")))
			check.OKf(t, must.Err(io.ReadFull(open, make([]byte, 4))), "the open connection")
			// The node has the address, but no relay: it refuses what the kernel leaves to it.
			must.OK(t, lab.Node.Netlink().AddrAdd(lab.Node.Link(t, "lo"), &netlink.Addr{IPNet: netlink.NewIPNet(net.ParseIP(vip4))}))
			before := next.server.Stats().Kernel
			if said, err := lab.Client.Ask("tcp", vip4+":80"); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("a new connection gets %q, %v", said, err)
			}
			after := next.server.Stats().Kernel
			if after["asked"] != before["asked"] || after["decided"] != before["decided"] {
				t.Errorf("the kernel had %v before a new connection, and %v after it", before, after)
			}
			udp := lab.Client.Connect(t, "udp", vip4+":80")
			check.OKf(t, must.Err(question(udp)), "UDP")
		})
	}
}

// A process may be killed while it moves a UDP session to another endpoint. The next one ends
// the session: the client's next datagram begins another.
func TestSessionBetweenEndpointsIsAdopted(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessUDP(t, 8080)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	first := newNode(t, lab, pinned)
	services := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080))
	first.apply(services)
	udp := lab.Client.Connect(t, "udp", vip4+":80")
	must.OK(t, must.Err(question(udp)))
	wait.True(t, "the session is known", func() bool { return first.server.Stats().Open == 1 })
	first.leave()
	next := newNode(t, lab, func(o *Options) { pinned(o); o.Keep = false })
	for i := range next.server.kernel.Flows { // it follows none before it has Services
		if k := &next.server.kernel.Flows[i]; k.State == bpf.KernelStateOPEN {
			k.State = bpf.KernelStateMOVING
		}
	}
	next.apply(services)
	must.OK(t, must.Err(question(udp)))
	next.stop()
	if r := next.taken(); len(r) != 2 || r[0].End != conntrack.EndpointGone || r[1].End != conntrack.Shutdown {
		t.Errorf("%+v", r)
	}
}

// Pins have the inode number of their network namespace in their path, which a later namespace may
// get. That one does not adopt the earlier one's flows.
func TestPinsOfAnEarlierNamespaceAreNotAdopted(t *testing.T) {
	t.Parallel()
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	var labs [2]*netns.Lab
	var dirs [2]bpffs.Dir
	for i := range labs {
		labs[i] = netns.NewLab(t, 1)
		labs[i].Backends[0].EchoTCP(t, 8080)
		dirs[i] = pinsOf(t, root, labs[i])
	}
	first := newNode(t, labs[0], pinned)
	services := svc(vip4, nil, at(labs[0].Backends[0].IPv4, 8080))
	first.apply(services)
	must.OK(t, must.Err(labs[0].Client.Ask("tcp", vip4+":80")))
	first.leave()
	must.OK(t, os.Rename(string(dirs[0]), string(dirs[1])))
	next := newNode(t, labs[1], func(o *Options) { pinned(o); o.Keep = false })
	next.apply(services)
	check.Equalf(t, next.server.Stats().Open, 0, "flows of another namespace were adopted")
	check.Equal(t, must.Get(labs[1].Client.Ask("tcp", vip4+":80"))(t), "b1:8080")
}

// pinsOf returns where a lab's node pins.
func pinsOf(t *testing.T, root string, lab *netns.Lab) bpffs.Dir {
	t.Helper()
	return must.Get(bpffs.Of(root, "test", lab.Node.FD()))(t)
}

// TestOldPinsAreRemoved: what an earlier version has pinned is removed after a while.
func TestOldPinsAreRemoved(t *testing.T) {
	lab := netns.NewLab(t, 1)
	root := netns.MountBPF(t)
	dir := pinsOf(t, root, lab)
	must.OK(t, dir.Make())
	m := must.Get(ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1}))(t)
	defer m.Close()
	path := dir.Pin("flow_earlier_map")
	must.OK(t, m.Pin(path))
	newNode(t, lab, func(o *Options) { o.BPFRoot, o.Name, o.old = root, "test", time.Millisecond })
	wait.For(t, "the pin is removed", patience, func() error {
		if _, err := os.Stat(path); err == nil {
			return fmt.Errorf("%s is there", path)
		}
		return nil
	})
}

// A process that has handed over leaves alone what is the next one's: pins, which may be of another
// version, and the relay's UDP sessions.
func TestHandOverLeavesTheNextProcess(t *testing.T) {
	lab := netns.NewLab(t, 1)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name = root, "test" }
	first := newNode(t, lab, pinned)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	must.OK(t, first.server.HandOver(ctx))
	first.left = true
	if first.server.old.Stop() {
		t.Error("pins of other versions were still to be removed")
	}
	next := newNode(t, lab, pinned)
	client, vip := at(lab.Client.IPv4, 41000), netip.MustParseAddrPort(vip4+":80")
	next.server.Session(client, vip, true)
	first.server.Session(client, vip, false)
	key := bpf.TupleOf(syscall.IPPROTO_UDP, client, vip)
	var none uint64
	check.OKf(t, next.server.kernel.Maps.Sessions.Lookup(&key, &none), "a session of the next process")
}

// A process that has handed over reads no upcall: the next one alone decides and records.
func TestHandOverLeavesTheNextProcessItsUpcalls(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessTCP(t, 8080)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.ask = root, "test", true }
	first := newNode(t, lab, pinned)
	first.serve(0)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	must.OK(t, first.server.HandOver(ctx))
	first.left = true
	next := newNode(t, lab, pinned)
	next.serve(0)
	const connections = 20
	for range connections {
		_, err := lab.Client.Ask("tcp", vip4+":80")
		must.OK(t, err)
	}
	next.wait(t, connections)
	check.Equalf(t, len(first.taken()), 0, "records of the process before")
}
