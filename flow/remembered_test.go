package flow

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// sticky gives a Service session affinity.
func sticky(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP }

// TestAffinityIsTheTables: the table decides about a client's connections (A5.1), and records say which
// was the first. A client follows its endpoint until that leaves the
// list (A5.3). Of TCP, no client is remembered whose endpoint has not answered (A5.7).
func TestAffinityIsTheTables(t *testing.T) {
	lab := netns.NewLab(t, 3)
	var list []netip.AddrPort
	for i, b := range lab.Backends {
		if i > 0 {
			b.EchoTCP(t, 8080)
		}
		list = append(list, at(b.IPv4, 8080))
	}
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, sticky, list[1:]...))
	first := ""
	same := func(times int) {
		t.Helper()
		for range times {
			if said, err := lab.Client.Ask("tcp", vip4+":80"); err != nil || first != "" && said != first {
				t.Fatalf("%q after %q, %v", said, first, err)
			} else {
				first = said
			}
		}
	}
	n.expectDecided("a new client", 1, 0, func() { same(1) })
	n.awaitClients(1) // userspace hears of the answer some milliseconds later
	n.expectDecided("a remembered client", 20, 0, func() { same(20) })
	for _, r := range n.wait(t, 21) {
		if want := map[bool]balancer.Affinity{true: balancer.AffinityNew, false: balancer.AffinityHit}[r.Start == n.taken()[0].Start]; r.Affinity != want || r.End != conntrack.ClientFin {
			t.Errorf("%s instead of %s: %+v", r.Affinity, want, r)
		}
	}
	n.apply(svc(vip4, sticky, list[2], list[1])) // in another order
	n.expectDecided("another list that has the endpoint", 3, 0, func() { same(3) })
	gone := map[string]int{"b2:8080": 1, "b3:8080": 2}[first]
	n.apply(svc(vip4, sticky, list[3-gone]))
	first = ""
	n.expectDecided("a list without the endpoint", 1, 0, func() { same(1) })
	n.awaitClients(1)
	n.expectDecided("the next endpoint", 3, 0, func() { same(3) })
	n.apply(svc(vip4, nil, list[1:]...))
	n.apply(svc(vip4, sticky, list[0]))
	n.isDropped(vip4 + ":80") // it is asked until the client gives up
	check.Equalf(t, n.clients(), 0, "clients are remembered, whose endpoint is closed")
}

// TestAffinityOfOtherAlgorithms: an algorithm that the table lacks chooses for new clients, and the table
// decides about remembered ones.
func TestAffinityOfOtherAlgorithms(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, func(s *corev1.Service) {
		sticky(s)
		s.Annotations["sluice.dev/balancer"] = "least-connections"
	}, at(lab.Backends[0].IPv4, 8080)))
	n.expectDecided("a new client", 0, 1, func() { n.ask(1) })
	n.awaitClients(1)
	n.expectDecided("a remembered client", 1, 0, func() { n.ask(1) })
}

// clients counts those that the table remembers.
func (n *node) clients() (count int) {
	var c bpf.KernelClient
	var pin bpf.KernelPin
	for all := n.server.kernel.Maps.Clients.Iterate(); all.Next(&c, &pin); {
		count++
	}
	return count
}

func (n *node) awaitClients(count int) {
	n.t.Helper()
	wait.True(n.t, "remembered clients", func() bool { return n.clients() == count })
}

// exchange sends a datagram from a new port and returns the server's name.
func (n *node) exchange(patience time.Duration) (string, error) {
	n.t.Helper()
	c := must.Get(n.lab.Client.Dial("udp", vip4+":80"))(n.t)
	defer c.Close()
	b := make([]byte, 100)
	_ = c.SetDeadline(time.Now().Add(patience))
	_, _ = c.Write([]byte("hello"))
	size, err := c.Read(b)
	name, _, _ := strings.Cut(string(b[:size]), "\n")
	return name, err
}

// TestAffinityWhileNobodyRuns: remembered clients reach their endpoint while no process runs, others
// one endpoint each, and the next process leaves all of them where they are. TCP and UDP.
func TestAffinityWhileNobodyRuns(t *testing.T) {
	lab := netns.NewLab(t, 4)
	var list []netip.AddrPort
	for _, b := range lab.Backends {
		b.EchoTCP(t, 8080)
		b.EchoUDP(t, 8080)
		list = append(list, at(b.IPv4, 8080))
	}
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	services := svc(vip4, sticky, list...)
	where := make(map[string]string)
	n := newNode(t, lab, pinned)
	visit := func(what string, networks ...string) {
		t.Helper()
		for _, network := range networks {
			for range 5 {
				ask := func() (string, error) { return lab.Client.Ask(network, vip4+":80") }
				if network == "udp" {
					ask = func() (string, error) { return n.exchange(patience) }
				}
				said, err := ask()
				if err != nil || where[network] != "" && said != where[network] {
					t.Fatalf("%s: %s: %q after %q, %v", what, network, said, where[network], err)
				}
				where[network] = said
			}
		}
	}
	n.apply(services)
	visit("the first process", "tcp")
	n.awaitClients(1)
	n.leave()
	left := uint64(sys.Monotonic())
	visit("no process", "tcp", "udp")
	next := newNode(t, lab, pinned)
	if _, pin := next.remembered(); pin.Used < left {
		t.Error("connections while nobody runs do not renew what is remembered")
	}
	next.apply(services)
	visit("the next process", "tcp", "udp")
	next.awaitClients(2)
	next.expectDecided("the next process", 10, 0, func() { visit("the table", "tcp", "udp") })
	next.leave()
	visit("no process again", "tcp", "udp")
	last := newNode(t, lab, func(o *Options) { pinned(o); o.Keep = false })
	last.apply(services)
	visit("the last process", "tcp", "udp")
}

// TestAffinityEnds: a client is forgotten after the window. Connections that the table decides about
// renew it (A5.2).
func TestAffinityEnds(t *testing.T) {
	lab := netns.NewLab(t, 2)
	var list []netip.AddrPort
	for _, b := range lab.Backends {
		b.EchoTCP(t, 8080)
		list = append(list, at(b.IPv4, 8080))
	}
	n := newNode(t, lab, nil)
	const window = 2
	n.apply(svc(vip4, func(s *corev1.Service) {
		sticky(s)
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32)}}
		*s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds = window
	}, list...))
	ask := func() string {
		return must.Get(lab.Client.Ask("tcp", vip4+":80"))(t)
	}
	home := ask() // where clients go that are not remembered
	n.awaitClients(1)
	other := map[string]int{"b1:8080": 1, "b2:8080": 0}[home]
	n.rememberAt(list[other], 0)
	began, last := time.Now(), time.Now()
	wait.True(t, "twice the window", func() bool {
		if ask() == home {
			if time.Since(last) < time.Second*window/2 { // else this thread was stopped
				t.Fatal(fmt.Sprint("the client is forgotten after ", time.Since(began)))
			}
			n.rememberAt(list[other], 0)
		}
		last = time.Now()
		return time.Since(began) > 2*window*time.Second
	})
	wait.True(t, "another endpoint after the window", func() bool {
		n.rememberAt(list[1-other], 2*window*time.Second)
		return ask() != home
	})
}

// rememberAt has the table remember its client at another endpoint, since some time ago.
func (n *node) rememberAt(endpoint netip.AddrPort, ago time.Duration) {
	n.t.Helper()
	c, _ := n.remembered()
	pin := bpf.KernelPin{Addr: bpf.AddressOf(endpoint.Addr()), Port: bpf.Wire(endpoint.Port()), Used: uint64(sys.Monotonic() - int64(ago))}
	must.OK(n.t, n.server.kernel.Maps.Clients.Put(&c, &pin))
}

// remembered returns the only client that the table remembers.
func (n *node) remembered() (c bpf.KernelClient, pin bpf.KernelPin) {
	n.t.Helper()
	if all := n.server.kernel.Maps.Clients.Iterate(); !all.Next(&c, &pin) {
		n.t.Fatal("nobody is remembered")
	}
	return c, pin
}

// TestClientsOfAnEarlierProcess: userspace remembers clients of an earlier process too.
func TestClientsOfAnEarlierProcess(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	services := svc(vip4, sticky, at(lab.Backends[0].IPv4, 8080))
	n := newNode(t, lab, pinned)
	n.apply(services)
	n.ask(1)
	n.wait(t, 1)
	n.awaitClients(1)
	n.leave()
	next := newNode(t, lab, func(o *Options) { pinned(o); o.Keep, o.ask = false, true })
	next.apply(services)
	next.ask(1)
	if r := next.wait(t, 1)[0]; r.Affinity != balancer.AffinityHit {
		t.Errorf("affinity %s: %+v", r.Affinity, r)
	}
}
