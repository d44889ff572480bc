package flow

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// decided counts the flows that the table has decided about, and those of which userspace
// was asked.
func (n *node) decided() (table, asked uint64) {
	s := n.server.Stats()
	return s.Kernel["decided"], s.Kernel["asked"]
}

// expectDecided compares these counts with those before. Userspace is asked again if a client
// repeats its SYN before the answer.
func (n *node) expectDecided(what string, table, asked uint64, do func()) {
	n.t.Helper()
	t0, a0 := n.decided()
	do()
	if t1, a1 := n.decided(); t1-t0 != table || a1-a0 < asked || asked == 0 && a1 != a0 {
		n.t.Errorf("%s: the table decided about %d, userspace about %d; want %d and %d", what, t1-t0, a1-a0, table, asked)
	}
}

// hasOpenFlow reports whether BPF knows an open flow.
func (n *node) hasOpenFlow() bool {
	for i := range n.server.kernel.Flows {
		if atomic.LoadUint32((*uint32)(&n.server.kernel.Flows[i].State)) == uint32(bpf.KernelStateOPEN) {
			return true
		}
	}
	return false
}

func (n *node) ask(times int) {
	n.t.Helper()
	for range times {
		if said, err := n.lab.Client.Ask("tcp", vip4+":80"); err != nil {
			n.t.Fatalf("%q, %v", said, err)
		}
	}
}

// TestWhoDecides: the table decides where the Service alone does; userspace is asked where
// the client counts.
func TestWhoDecides(t *testing.T) {
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	b1, b2 := at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)
	for _, c := range []struct {
		what         string
		change       func(*corev1.Service)
		table, asked uint64
	}{
		{"round-robin", nil, 4, 0},
		{"random", func(s *corev1.Service) { s.Annotations["sluice.dev/balancer"] = "random" }, 4, 0},
		{"A2.2: internal policy Local, which all clients share", func(s *corev1.Service) {
			local := corev1.ServiceInternalTrafficPolicyCluster
			s.Spec.InternalTrafficPolicy = &local
		}, 4, 0},
	} {
		n.apply(svc(vip4, c.change, b1, b2))
		n.expectDecided(c.what, c.table, c.asked, func() { n.ask(4) })
	}
	// A3.8: of clients that are no pods, the endpoint sees the node's address.
	n.config.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.77.0.0/16")}
	n.apply(svc(vip4, nil, b1, b2))
	n.expectDecided("the client is no pod", 2, 0, func() { n.ask(2) })
	n.config.ClusterCIDRs = nil // A3.7
	n.apply(svc(vip4, nil, b1, b2))
	n.expectDecided("pods are unknown", 2, 0, func() { n.ask(2) })
	n.config.MasqueradeAll = true
	n.apply(svc(vip4, nil, b1, b2))
	n.expectDecided("all clients are hidden", 2, 0, func() { n.ask(2) })
	setHiding(n.server.kernel, bpf.KernelHidingHIDES, false)
	n.expectDecided("the kernel does not tell the node's address", 0, 2, func() { n.ask(2) })
}

// An endpoint that fails makes userspace decide, which knows when to try it again.
func TestFailureLeavesTheDecisionToUserspace(t *testing.T) {
	lab := netns.NewLab(t, 2)
	lab.Backends[1].EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)))
	n.ask(2) // one of both meets the dead endpoint
	n.expectDecided("after a refusal", 0, 5, func() { n.ask(5) })
	s := n.server.paths[service.TCP].state.Load().services
	for _, each := range s {
		if each != nil {
			until := &n.server.kernel.Loads[each.load].AskUntil
			if left := time.Duration(atomic.LoadUint64(until) - n.server.worker.kernelTime(poll.Nanotime())); left > balancer.Distrust {
				t.Errorf("for %s", left)
			}
			atomic.StoreUint64(until, 0)
		}
	}
	n.expectDecided("when it is over", 1, 0, func() { n.ask(1) })
}

// A client may use a port again as soon as its connection has ended. The table decides then
// too, deletes what the old connection had, and leaves what the new one has.
func TestPortIsUsedAgainAtOnce(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	for _, b := range lab.Backends {
		b.WitnessTCP(t, 8080)
	}
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)))
	const times, port = 20, 40001
	client := at(lab.Client.IPv4, port)
	n.expectDecided("connections from one port", times, 0, func() {
		last := ""
		for i := range times {
			c := dialFrom(t, lab.Client, port, vip4+":80")
			said, err := netns.AskOn(c)
			if err != nil || !strings.HasSuffix(said, ":8080 "+client.String()) || said == last {
				t.Fatalf("connection %d: %q after %q, %v", i, said, last, err)
			}
			last = said
			if i == times-1 {
				break
			}
			if err := c.(*net.TCPConn).SetLinger(0); err != nil { // it ends by an RST
				t.Fatal(err)
			}
			must.OK(t, c.Close())
			// The next SYN must not overtake the RST on another CPU.
			wait.True(t, "the RST has passed", func() bool { return !n.hasOpenFlow() })
		}
	})
	wait.True(t, "only the last connection's entries and flow are left", func() bool {
		return n.entries() == 2 && n.server.Stats().Open == 1
	})
	for _, r := range n.wait(t, times-1) {
		if r.End != conntrack.ClientReset || r.Client != client || r.BytesFromClient == 0 {
			t.Errorf("%+v", r)
		}
	}
}

// Clients whose own ports are those of the relay get others, and the table decides about them
// too. It asks where another flow has that port, or where it is the relay's as well.
func TestClientsOnReplyPorts(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessTCP(t, 8080)
	n := newNode(t, lab, func(o *Options) { o.ReplyPorts = [2]uint16{20000, 29999} })
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	const port, count = 20001, bpf.LastPort - bpf.FirstPort + 1
	seen := make(map[string]bool)
	connect := func(what string, port int, table, asked uint64) (source string) {
		t.Helper()
		n.expectDecided(what, table, asked, func() {
			c := dialFrom(t, lab.Client, port, vip4+":80")
			said, err := netns.AskOn(c)
			source = strings.TrimPrefix(said, "b1:8080 ")
			sees, parseErr := netip.ParseAddrPort(source)
			if err != nil || parseErr != nil || sees.Addr() != lab.Client.IPv4 || sees.Port() < bpf.FirstPort || sees.Port() > bpf.LastPort || seen[source] {
				t.Fatalf("%s: %q, %v", what, said, err)
			}
			seen[source] = true
		})
		return source
	}
	want := at(lab.Client.IPv4, bpf.FirstPort+port%count).String()
	check.Equalf(t, connect("a port of the relay's", port, 1, 0), want, "the endpoint saw")
	connect("another client port that becomes the same", port+count, 0, 1)

	n.server.kernel.Control.FirstReply = bpf.FirstPort
	connect("all ports are the relay's", port+1, 0, 1)
}

// Hosts of one link would answer each other without this node, so that the endpoint must see
// the node's address.
func TestSameLinkIsHidden(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].WitnessTCP(t, 8080)
	all := netip.MustParsePrefix("10.0.0.0/8")
	client := netip.PrefixFrom(lab.Client.IPv4, 32)
	var links atomic.Pointer[[]hostnet.Link]
	links.Store(new([]hostnet.Link))
	n := newNode(t, lab, func(o *Options) {
		o.Links = func() []hostnet.Link { return *links.Load() }
		o.SameLink = func(netip.Addr, netip.Addr) bool { return len(*links.Load()) == 1 }
	})
	services := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080))
	for _, c := range []struct {
		links        []hostnet.Link
		table, asked uint64
		sees         netip.Addr
	}{
		{[]hostnet.Link{{Range: all, Number: 7}}, 1, 0, netip.MustParseAddr("10.2.1.1")},
		{[]hostnet.Link{{Range: all, Number: 7}, {Range: client, Number: 0}}, 1, 0, lab.Client.IPv4},
		{nil, 1, 0, lab.Client.IPv4},
	} {
		links.Store(&c.links)
		n.apply(services)
		n.expectDecided(fmt.Sprint(c.links), c.table, c.asked, func() {
			if said, err := lab.Client.Ask("tcp", vip4+":80"); err != nil || !strings.HasPrefix(said, "b1:8080 "+c.sees.String()+":") {
				t.Errorf("%q, %v", said, err)
			}
		})
	}
}

// TestNewConnectionsWhileNobodyRuns kills the process: new connections go on, and the next
// process has exactly one record of each.
// TestTableBeginsAtTheRank: the table takes endpoints in the order of the balancer, and its
// first connection goes where the node's rank says.
func TestTableBeginsAtTheRank(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 3)
	var list []netip.AddrPort
	names := make(map[netip.AddrPort]string)
	for i, b := range lab.Backends {
		b.EchoTCP(t, 8080)
		list = append(list, at(b.IPv4, 8080))
		names[list[i]] = fmt.Sprintf("b%d:8080", i+1)
	}
	for _, rank := range []string{"10.0.7.0/24", "10.0.8.0/24", "10.0.9.0/24"} {
		n := newNode(t, lab, nil)
		n.relay.options.Rank = &balancer.Rank{}
		n.relay.options.Rank.Set("node", []netip.Prefix{netip.MustParsePrefix(rank)}, nil)
		n.apply(svc(vip4, nil, list...))
		for name, b := range n.relay.balancers {
			if name.Protocol != service.TCP {
				continue
			}
			var candidates []service.Endpoint
			for _, addr := range list {
				candidates = append(candidates, service.Endpoint{Addr: addr})
			}
			ordered, start := b.Turns(nil, candidates)
			n.expectDecided(rank, 6, 0, func() {
				for k := range 6 {
					want := names[ordered[(int(start)+k)%len(ordered)]]
					if said, err := lab.Client.Ask("tcp", vip4+":80"); err != nil || said != want {
						t.Errorf("rank %s, connection %d: %q, %v; want %q", rank, k, said, err, want)
					}
				}
			})
		}
		n.stop()
		n.left = true
		n.end()
	}
}

// A list has another endpoint in the place of one, and then the first one again.
func TestTableFollowsAReplacedEndpoint(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, nil)
	for _, b := range lab.Backends {
		b.EchoTCP(t, 8080)
	}
	for _, i := range []int{0, 1, 0} {
		n.apply(svc(vip4, nil, at(lab.Backends[i].IPv4, 8080)))
		want := fmt.Sprintf("b%d:8080", i+1)
		n.expectDecided(want, 1, 0, func() {
			if said, err := lab.Client.Ask("tcp", vip4+":80"); err != nil || said != want {
				t.Errorf("%q, %v; want %q", said, err, want)
			}
		})
	}
}

// A table that nobody has brought up to date for some minutes decides no more: Sluice may have been
// removed from the node. What it has decided goes on.
func TestTableOfAProcessThatIsGone(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	c := n.server.kernel.Control
	if until := c.DecidesUntil; until < uint64(sys.Monotonic()+int64(tableAge)/2) {
		t.Errorf("the table decides until %d, now is %d", until, sys.Monotonic())
	}
	held := lab.Client.Connect(t, "tcp", vip4+":80")
	n.onLoop(func() { n.loop.Cancel(&n.server.worker.beat) })
	atomic.StoreUint64(&c.Beat, 0)
	decided := n.server.Stats().Decided
	atomic.StoreUint64(&c.DecidesUntil, uint64(sys.Monotonic()))
	if said, err := lab.Client.Ask("tcp", vip4+":80"); err == nil {
		t.Errorf("a new connection reaches %s", said)
	}
	check.Equalf(t, n.server.Stats().Decided, decided, "connections that upcalls have decided about")
	check.OKf(t, must.Err(netns.AskOn(held)), "an open connection")
	n.onLoop(func() { (*beater)(n.server.worker).HandleTimer(nil) }) // for the end of the test
	wait.True(t, "the table decides again", func() bool { return c.DecidesUntil > uint64(sys.Monotonic()) })
	n.ask(1)
}

func TestNewConnectionsWhileNobodyRuns(t *testing.T) {
	t.Run("told", func(t *testing.T) { whileNobodyRuns(t, func(*worker) {}) })
	t.Run("untold", func(t *testing.T) { // the rings had no room for what the table said
		whileNobodyRuns(t, func(w *worker) {
			w.readNotices()
			w.read(w.upcalls, math.MaxInt, w.handle)
			w.early = nil
		})
	})
}

// whileNobodyRuns calls before on the loop of the next process, which has no Services yet.
func whileNobodyRuns(t *testing.T, before func(*worker)) {
	connections, sessions := 100, 20
	if full() {
		connections, sessions = 1000, 200
	}
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	lab.EchoUDP(t, 8080)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	first := newNode(t, lab, pinned)
	services := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080))
	first.apply(services)
	first.ask(4)
	wait.True(t, "records", func() bool { return len(first.taken()) == 4 })
	first.leave()
	servers := make(map[string]int)
	for range connections {
		said := must.Get(lab.Client.Ask("tcp", vip4+":80"))(t)
		servers[said]++
	}
	if len(servers) != 2 || max(servers["b1:8080"], servers["b2:8080"]) != connections/2 {
		t.Errorf("not round-robin: %v", servers)
	}
	openSessions(t, lab, sessions) // at once: none gets the port of an earlier one
	held := lab.Client.Connect(t, "tcp", vip4+":80")
	next := newNode(t, lab, func(o *Options) { pinned(o); o.Keep = false })
	next.onLoop(func() { before(next.server.worker) })
	next.apply(services)
	check.OK(t, must.Err(netns.AskOn(held)))
	next.ask(3)
	_ = held.Close()
	next.wait(t, connections+4)
	next.stop()
	tcp, udp := 0, 0
	clients := make(map[string]bool)
	for _, r := range next.taken() {
		if clients[r.Protocol.String()+r.Client.String()] {
			t.Errorf("two records of %s", r.Client)
		}
		clients[r.Protocol.String()+r.Client.String()] = true
		if r.Path != conntrack.Kernel || r.Attempts != 1 || r.Port == nil || r.Endpoint == nil || r.BytesFromEndpoint == 0 || r.Counters == nil {
			t.Errorf("%+v", r)
		}
		if r.Protocol == service.UDP {
			udp++
			continue
		}
		tcp++
		if r.End != conntrack.ClientFin || !r.Connected || r.ConnectTime <= 0 || r.FirstByte < r.ConnectTime || r.BytesFromClient != 12 {
			t.Errorf("%+v", r)
		}
	}
	if tcp != connections+4 || udp != sessions {
		t.Errorf("%d records of connections, %d of sessions", tcp, udp)
	}
}

// The next process takes the table over: it removes what nobody wants any more, and later
// lists have other numbers.
func TestTableOfAnEarlierProcess(t *testing.T) {
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	b1, b2 := at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)
	first := newNode(t, lab, pinned)
	first.apply(svc(vip4, nil, b1))
	first.apply(named("old", svc("10.96.0.99", nil, b1)))
	first.ask(1)
	first.leave()
	next := newNode(t, lab, func(o *Options) { pinned(o); o.Keep = false })
	next.ask(1) // nobody has configured it yet
	next.apply(svc(vip4, nil, b2))
	check.Equal(t, must.Get(lab.Client.Ask("tcp", vip4+":80"))(t), "b2:8080")
	var destinations []string
	var d bpf.KernelDestination
	var s bpf.KernelServed
	for all := next.server.kernel.Maps.Destinations.Iterate(); all.Next(&d, &s); {
		destinations = append(destinations, fmt.Sprintf("%d %s", d.Protocol, d.Addr.Addr()))
	}
	slices.Sort(destinations)
	check.EqualSlicesf(t, destinations, []string{"17 " + vip4, "6 " + vip4}, "destinations")
	var slot bpf.KernelSlot
	var place bpf.KernelPlace
	places := 0
	for all := next.server.kernel.Maps.Places.Iterate(); all.Next(&slot, &place); places++ {
		check.Equalf(t, place.Addr.Addr(), b2.Addr(), "list %d", slot.List)
	}
	if places != 2 { // a list for each protocol
		t.Errorf("%d endpoints", places)
	}
}

// A process that was killed may have had indices in its hands.
func TestIndicesAreReclaimed(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	first := newNode(t, lab, pinned)
	for range 10 {
		if _, ok := first.server.worker.spares.Take(); !ok {
			t.Fatal("no index")
		}
	}
	first.leave()
	next := newNode(t, lab, func(o *Options) { pinned(o); o.Keep = false })
	wait.True(t, "all indices are free", func() bool { return next.server.worker.spares.Len() == 4096 })
	check.OK(t, os.RemoveAll(string(pinsOf(t, root, lab))))
}

func TestOrigins(t *testing.T) {
	p := netip.MustParsePrefix
	got := originsOf(
		[]netip.Prefix{p("10.1.0.0/16"), p("fd00:1::/64")},
		[]hostnet.Link{{Range: p("10.0.0.0/8"), Number: 3}, {Range: p("10.1.2.0/24"), Number: 4}, {Range: p("10.1.2.3/32"), Number: 0}, {Range: p("fd00:1::/64"), Number: 5}},
		hostnet.NewAddresses([]netip.Addr{netip.MustParseAddr("10.1.2.1"), netip.MustParseAddr("192.0.2.1")}))
	want := map[string]bpf.KernelOrigin{
		"10.0.0.0/104": {Link: 3}, "10.1.0.0/112": {Link: 3, Pod: 1}, "10.1.2.0/120": {Link: 4, Pod: 1},
		"10.1.2.3/128": {Pod: 1}, "10.1.2.1/128": {Link: 4, Pod: 1, Own: 1}, "192.0.2.1/128": {Own: 1}, "fd00:1::/64": {Link: 5, Pod: 1},
	}
	for k, o := range got {
		name := fmt.Sprintf("%s/%d", k.Addr.Addr(), k.Bits)
		check.Equalf(t, o, want[name], "%s", name)
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("missing: %v", want)
	}
}

// A flood of new flows leaves an eighth of the table to other service ports, and nothing is lost
// track of when userspace cannot be told.
func TestFlowsThatNobodyWasToldOf(t *testing.T) {
	lab := netns.NewLab(t, 1)
	// No session is answered: one that has been quiet for a moment would be replaced.
	server := must.Get(lab.Backends[0].ListenPacket("udp", ":8080"))(t)
	defer server.Close()
	n := newNode(t, lab, func(o *Options) { o.MaxFlows = 64 })
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	var held []net.Conn
	for range 60 {
		c := lab.Client.Connect(t, "udp", vip4+":80")
		must.OK(t, must.Err(c.Write([]byte("who?"))))
		held = append(held, c)
	}
	wait.True(t, "flows", func() bool { return n.server.Stats().Open == 56 })
	answered := make(chan error, 1)
	go func() {
		b := make([]byte, 1<<10)
		for {
			size, from, err := server.ReadFrom(b)
			if err == nil && string(b[:size]) == "one more" {
				_, err = server.WriteTo(b[:size], from)
				answered <- err
				return
			}
			if err != nil {
				answered <- err
				return
			}
		}
	}()
	must.OK(t, must.Err(held[0].Write([]byte("one more"))))
	_ = held[0].SetReadDeadline(time.Now().Add(patience))
	_ = server.SetReadDeadline(time.Now().Add(patience))
	check.OK(t, must.Err(held[0].Read(make([]byte, 1<<10))))
	check.OK(t, <-answered)
}
