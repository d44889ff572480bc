package stream

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect/bind"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
	"github.com/sluice-proxy/sluice/test/steering"
)

// byRoutes has a node steer by routes alone, and bring answers to clients'
// addresses back.
func byRoutes(t *testing.T, lab *netns.Lab, o *setup) *steering.Counted {
	t.Helper()
	r, err := bind.New(bind.Options{
		Routes:     route.Options{NetNS: lab.Node.FD(), NodeIPs: []netip.Addr{lab.Node.IPv4, lab.Node.IPv6}},
		ReplyPorts: [2]uint16{61000, 65534},
	})
	must.OK(t, err)
	s := o.Redirector.(*spy)
	_ = s.Close()
	counted := &steering.Counted{Redirector: r}
	s.Redirector = counted
	return counted
}

// Where steering binds each destination, all outcomes are those of sockets.
func TestBindEachDestination(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 2)
	options, _ := onAddresses(lab)
	n := newNode(t, lab, func(o *setup) { options(o); byRoutes(t, lab, o) })
	ep, ep6 := n.echo(0, 8080), netip.AddrPortFrom(lab.Backends[0].IPv6, 8080)
	n.apply(web("web", "10.96.0.1", ep))
	n.apply(web("six", "fd00:96::1", ep6))
	n.apply(web("empty", "10.96.0.2"))
	silent := web("silent", "10.96.0.3", ep)
	local := corev1.ServiceInternalTrafficPolicyLocal
	silent.Services[0].Spec.InternalTrafficPolicy = &local
	n.apply(silent)
	n.apply(balanced(web("balanced", "10.96.0.4", ep), "192.0.2.4", "10.1.0.0/24"))
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		n.want(from, "10.96.0.1:80", "b1:8080")
		n.want(from, "[fd00:96::1]:80", "b1:8080")
		n.want(from, "10.96.0.2:80", "refused") // A3.4
		n.want(from, "10.96.0.3:80", "silence") // A3.5
		n.want(from, "10.96.0.1:81", "refused") // A3.12
	}
	n.want(lab.Client, "192.0.2.4:80", "b1:8080")
	n.want(lab.Backends[1], "192.0.2.4:80", "silence") // A3.10
	if got := n.manager.Stats(); got.Claims != 6 || got.Conflicts != 0 {
		t.Errorf("%d claims, %d conflicts", got.Claims, got.Conflicts)
	}

	// Through refusing and back, the port stays ours.
	for range 2 {
		n.apply(service.Change{Deleted: objects.Gone("web", 1).Deleted[1:]})
		n.want(lab.Client, "10.96.0.1:80", "refused")
		if l, err := lab.Node.Listen("tcp", ":80"); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("another program listens on *:80: %v", err)
			if err == nil {
				_ = l.Close()
			}
		}
		n.apply(web("web", "10.96.0.1", ep))
		n.want(lab.Client, "10.96.0.1:80", "b1:8080")
	}
}

// An external IP that is this node's moves to another host. Connections to it that come by
// this node are served as before, and those that are open go on.
func TestExternalIPThatLeavesTheNodeIsServed(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	external := []netip.Addr{netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7")}
	own := external
	n := newNode(t, lab, func(o *setup) {
		byRoutes(t, lab, o)
		o.HostAddresses = func() []netip.Addr { return append([]netip.Addr{lab.Node.IPv4, lab.Node.IPv6}, own...) }
	})
	four, six := web("four", "10.96.0.1", n.echo(0, 8080)), web("six", "fd00:96::1", netip.AddrPortFrom(lab.Backends[0].IPv6, 8080))
	var held []net.Conn
	for i, change := range []service.Change{four, six} {
		whole := netip.PrefixFrom(external[i], external[i].BitLen())
		must.OK(t, lab.Node.AddAddr("client", whole))
		change.Services[0].Spec.ExternalIPs = []string{external[i].String()}
		n.apply(change)
		c := n.dial(netip.AddrPortFrom(external[i], 80).String())
		name(t, c)
		held = append(held, c)
	}
	link := must.Get(lab.Node.Netlink().LinkByName("client"))(t)
	for _, a := range external {
		bits := a.BitLen()
		must.OK(t, lab.Node.Netlink().AddrDel(link, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, bits)}}))
	}
	own = nil
	n.maintain()
	for i, a := range external {
		c := must.Get(lab.Client.Dialer(&net.Dialer{Timeout: patience}, "tcp", netip.AddrPortFrom(a, 80).String()))(t)
		_ = c.SetDeadline(time.Now().Add(patience))
		name(t, c)
		_ = c.Close()
		check.OK(t, must.Err(held[i].Write([]byte("x"))))
		check.OKf(t, must.Err(io.ReadFull(held[i], make([]byte, 1))), "the open connection to %s", a)
	}
}

// Fact F4: a server of the host's on all addresses keeps services from their
// port. It is said, and over when the server ends.
func TestF4_WildcardServerIsReported(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	options, log := onAddresses(lab)
	n := newNode(t, lab, func(o *setup) { options(o); byRoutes(t, lab, o) })
	server := lab.Node.EchoTCP(t, 80)
	n.apply(web("web", "10.96.0.1", n.echo(0, 8080)))
	n.maintain()
	lines := log.lines("answers in the Service's place")
	if len(lines) != 1 || !strings.Contains(lines[0], "ClusterIP port 80/TCP on 10.96.0.1") || n.manager.Stats().Conflicts != 1 {
		t.Errorf("log %q, %d conflicts", lines, n.manager.Stats().Conflicts)
	}
	server.Close()
	n.maintain()
	n.want(lab.Client, "10.96.0.1:80", "b1:8080")
	check.Equalf(t, n.manager.Stats().Conflicts, 0, "conflicts when the server has ended")
}

// Rules A3.8 and A3.9: the endpoint sees the client's address where the verdict
// says so, and the record says what it saw.
func TestA39_EndpointSeesTheClient(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	options, log := onAddresses(lab)
	var counted *steering.Counted
	n := newNode(t, lab, func(o *setup) { options(o); counted = byRoutes(t, lab, o) })
	n.policy.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/16")}
	pod, client, node := lab.Backends[0], lab.Client, lab.Node
	pod.WitnessTCP(t, 8080)
	node.WitnessTCPAt(t, "10.1.0.1:8081")
	n.apply(web("web", "10.96.0.1", netip.AddrPortFrom(pod.IPv4, 8080)))
	n.apply(web("six", "fd00:96::1", netip.AddrPortFrom(pod.IPv6, 8080)))
	n.apply(web("host", "10.96.0.2", netip.AddrPortFrom(node.IPv4, 8081)))
	n.apply(nodePort(web("out", "10.96.0.3", netip.AddrPortFrom(pod.IPv4, 8080)), 30080))
	want := map[policy.Source]int{}
	for _, c := range []struct {
		what   string
		from   *netns.Host
		to     string
		sees   string
		source policy.Source
	}{
		{"A3.9 a pod", client, "10.96.0.1:80", "10.1.0.2", policy.SourceClient},
		{"A3.9 a pod over IPv6", client, "[fd00:96::1]:80", "fd00:1::2", policy.SourceClient},
		{"A3.8 hairpin", pod, "10.96.0.1:80", "10.2.1.1", policy.SourceNode},
		{"an endpoint on the node's own network", client, "10.96.0.2:80", "10.1.0.1", policy.SourceNode},
		{"A3.8 policy Cluster from outside", client, "10.1.0.1:30080", "10.2.1.1", policy.SourceNode},
	} {
		want[c.source]++
		for range 3 {
			got := n.outcome(c.from, c.to, "an answer")
			_, peer, _ := strings.Cut(got, " ")
			if at, err := netip.ParseAddrPort(peer); err != nil || at.Addr().String() != c.sees {
				t.Errorf("%s: %q, want it to see %s", c.what, got, c.sees)
			} else if c.source == policy.SourceClient && at.Port() < 61000 {
				t.Errorf("%s: it sees port %d, and answers come back to 61000 and more", c.what, at.Port())
			}
		}
	}
	n.stop()
	if held, open := counted.Held.Load(), counted.Open.Load(); held != int64(3*want[policy.SourceClient]) || open != 0 {
		t.Errorf("clients were held for %d connections, and are for %d that have ended", held, open)
	}
	got := map[policy.Source]int{}
	for _, r := range n.records.All() {
		got[r.Source]++
	}
	for s, count := range want {
		check.Equalf(t, got[s], 3*count, "records with source %s", s)
	}
	if lines := log.lines("clients' addresses"); len(lines) != 0 {
		t.Errorf("log: %q", lines)
	}
}

// Where no answer comes back to a client's address, the endpoint sees the
// node's, and the log says so once.
func TestA39_NodesAddressWhereAnswersDoNotComeBack(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	options, log := onAddresses(lab)
	n := newNode(t, lab, func(o *setup) {
		options(o)
		o.Redirector.(*spy).mute = true
	})
	lab.Backends[0].WitnessTCP(t, 8080)
	ep := netip.AddrPortFrom(lab.Backends[0].IPv4, 8080)
	n.apply(web("web", "10.96.0.1", ep))
	n.apply(web("other", "10.96.0.2", ep))
	if got := n.outcome(lab.Client, "10.96.0.1:80", "an answer"); !strings.HasPrefix(got, "b1:8080 10.2.1.1:") {
		t.Error(got)
	}
	n.stop()
	for _, r := range n.records.All() {
		check.Equalf(t, r.Source, policy.SourceNode, "the record says")
	}
	if lines := log.lines("brings no replies"); len(lines) != 1 {
		t.Errorf("log: %q", lines)
	}
}
