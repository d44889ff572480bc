package iptables

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// newLab has a backend that the node's default routes lead to: what is not
// taken goes there.
func newLab(t *testing.T) *netns.Lab {
	lab := netns.NewLab(t, 1)
	outside := lab.Backends[0]
	for _, r := range []struct{ to, via string }{{"0.0.0.0/0", "10.2.1.2"}, {"::/0", "fd00:2:1::2"}} {
		must.OK(t, lab.Node.AddRoute(netip.MustParsePrefix(r.to), netip.MustParseAddr(r.via)))
	}
	for _, a := range []string{"192.0.2.1/32", "2001:db8::1/128"} {
		must.OK(t, outside.AddAddr("lo", netip.MustParsePrefix(a)))
	}
	outside.EchoTCP(t, 80)
	outside.EchoTCP(t, 81)
	return lab
}

// Fact F7: an endpoint sees the client's own address, its answers come back to
// the proxy's socket, and what the client sends to it directly goes on.
func TestAnswersToClientsAddresses(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		lab := newLab(t)
		echo := lab.Backends[0].EchoTCP(t, 8080)
		lab.Backends[0].EchoUDP(t, 8080)
		r := newOne(t, lab.Node, opts)
		want := redirect.Replies{Diverted: true, FirstPort: redirect.ReplyPorts[0], LastPort: redirect.ReplyPorts[1],
			Untracked: true, Mark: route.DefaultSocketMark, Tracking: r.answers.Tracking}
		check.Equalf(t, r.Traits().Replies, want, "traits say")
		apply(t, r, steering.Plan())
		trackConnections(t, lab.Node, opts)
		for _, pair := range []struct{ client, endpoint netip.Addr }{
			{lab.Client.IPv4, lab.Backends[0].IPv4}, {lab.Client.IPv6, lab.Backends[0].IPv6},
		} {
			to, as := netip.AddrPortFrom(pair.endpoint, 8080), netip.AddrPortFrom(pair.client, want.FirstPort)
			tcpDialer := steering.DialerFrom("tcp", as)
			c := must.Get(lab.Node.Dialer(tcpDialer, "tcp", to.String()))(t)
			defer c.Close()
			if name, err := netns.AskOn(c); err != nil || name != "b1:8080" {
				t.Errorf("tcp as %s: got %q, %v", as, name, err)
			}
			peers := echo.Peers()
			check.Equalf(t, peers[len(peers)-1], as, "the endpoint saw")
			askUDP(t, lab.Node, as, to)
			if list := tracked(t, lab.Node.Namespace); len(list) != 0 {
				t.Errorf("tracked: %q", list)
			}
		}
		for _, endpoint := range []netip.Addr{lab.Backends[0].IPv4, lab.Backends[0].IPv6} {
			steering.Expect(t, lab.Client, service.Destination{Addr: endpoint, Port: 8080, Protocol: service.TCP}, "b1:8080")
		}
	})
}

// Sockets on the node's address pass connection tracking too, by their mark, from
// the next look on after somebody has begun to track; others do not.
func TestMarkedSocketsAreNotTracked(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		opts.Conntrack = redirect.Bypass
		lab := newLab(t)
		lab.Backends[0].EchoTCP(t, 8080)
		r := newOne(t, lab.Node, opts)
		plan := steering.Plan()
		plan.NodeSourceOnly = true
		plan.Node = redirect.SetOf(netip.MustParseAddr("10.2.1.1"), netip.MustParseAddr("fd00:2:1::1"))
		apply(t, r, plan)
		trackConnections(t, lab.Node, opts)
		if repaired, err := r.Verify(); repaired || err != nil || !r.answers.Tracking.InUse() {
			t.Errorf("repaired %v, %v, tracking in use %v", repaired, err, r.answers.Tracking.InUse())
		}
		steering.Untracked(t, lab, r)
	})
}

// askUDP sends a datagram from an address to an echo server, and wants its
// answer.
func askUDP(t *testing.T, from *netns.Host, as, to netip.AddrPort) {
	t.Helper()
	u := must.Get(from.Dialer(steering.DialerFrom("udp", as), "udp", to.String()))(t)
	defer u.Close()
	_, _ = u.Write([]byte("hello"))
	buf := make([]byte, 100)
	_ = u.SetReadDeadline(time.Now().Add(longest))
	if n, err := u.Read(buf); err != nil || !strings.HasPrefix(string(buf[:n]), "b1:8080") {
		t.Errorf("udp from %s as %s: got %q, %v", from.Name(), as, buf[:n], err)
	}
}

// Connection tracking sees nothing of what is steered, refused or dropped.
func TestConntrackSeesNothing(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		lab := newLab(t)
		f := steering.NewFront(t, lab.Node, "front")
		trackConnections(t, lab.Node, opts)
		r := newOne(t, lab.Node, opts)
		own := tcp("10.1.0.1:30080")
		lab.Node.EchoTCP(t, own.Port)
		p := steering.Plan(steering.Steer(f, tcp("10.96.0.10:80"), udp("10.96.0.10:53"), tcp("[fd01::10]:80"), tcp("192.0.2.1:80"), udp("192.0.2.1:54")),
			steering.Refuse(tcp("10.96.0.11:80"), udp("10.96.0.11:53")))
		p.Own = p.Own.With(own, struct{}{})
		apply(t, r, p)
		for _, from := range []*netns.Host{lab.Client, lab.Node} {
			for _, d := range []service.Destination{tcp("10.96.0.10:80"), udp("10.96.0.10:53"), tcp("[fd01::10]:80"), tcp("192.0.2.1:80"),
				udp("192.0.2.1:54"), tcp("10.96.0.11:80"), udp("10.96.0.11:53"), own} {
				steering.Reach(t, from, d, "")
			}
			// Once: the kernel looks through all namespaces' connections.
			if list := tracked(t, lab.Node.Namespace); len(list) != 0 {
				t.Fatalf("from %s: tracked %q", from.Name(), list)
			}
		}
		steering.Expect(t, lab.Client, tcp("10.2.1.2:80"), "b1:80")
		if list := tracked(t, lab.Node.Namespace); len(list) != 1 {
			t.Errorf("a connection that is not ours: tracked %q, want one", list)
		}
	})
}

// trackConnections switches connection tracking on, as any rule does that asks
// for a connection's state.
func trackConnections(t *testing.T, n *netns.Host, opts Options) {
	t.Helper()
	for _, family := range []string{"iptables", "ip6tables"} {
		program(t, n.Namespace, family+"-"+string(opts.Variant), "-A", "INPUT", "-m", "conntrack", "--ctstate", "INVALID", "-j", "RETURN")
	}
}

// tracked lists the connections that are tracked, but for what Redirectors send to
// themselves to learn whether any is.
func tracked(t *testing.T, n *netns.Namespace) (list []string) {
	t.Helper()
	for _, family := range []netlink.InetFamily{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		flows := must.Get(n.Netlink().ConntrackTableList(netlink.ConntrackTable, family))(t)
		for _, flow := range flows {
			if flow.Forward.SrcIP.IsLoopback() {
				continue
			}
			if flow.Forward.Protocol == unix.IPPROTO_TCP || flow.Forward.Protocol == unix.IPPROTO_UDP {
				list = append(list, flow.String())
			}
		}
	}
	return list
}
