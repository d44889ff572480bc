package tproxy

import (
	"net"
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// With the table of connection tracking full, everything that is ours goes on:
// cluster IPs, addresses that are not ours, node ports, clients' own addresses,
// what refuses, and connections that outlived their service; from other hosts
// and from the node itself. What is not ours does not, which shows that the
// table is full.
func TestFullConntrackTable(t *testing.T) {
	lab := netns.NewLab(t, 1)
	elsewhere(t, lab, "192.0.2.10")
	b := lab.Backends[0]
	b.EchoTCP(t, 8080)
	b.EchoUDP(t, 53)
	lab.Node.EchoTCPAt(t, "10.1.0.1:30080") // stands for a socket of ours
	lab.Node.TrackConnections(t)
	f := steering.NewFront(t, lab.Node, "front")
	web, gone, out, own, own6 := tcp("10.96.0.10:80"), tcp("10.96.0.20:80"), tcp("192.0.2.10:80"), tcp("10.1.0.1:30080"), tcp("[fd00:1::1]:30080")
	lab.Node.EchoTCPAt(t, "[fd00:1::1]:30080")
	r := newRedirector(t, lab.Node, Options{})
	with := func(parts ...func(*redirect.Plan)) redirect.Plan {
		p := steering.Plan(append(parts, steering.Steer(f, web, tcp("[fd01::10]:80"), out), steering.Refuse(tcp("10.96.0.11:80"), tcp("192.0.2.10:81"), udp("10.96.0.11:53")))...)
		for _, d := range []service.Destination{own, own6} {
			p.Own = p.Own.With(d, struct{}{})
		}
		return p
	}
	apply(t, r, with(steering.Steer(f, gone)))
	var conns []*steering.Held
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		conns = append(conns, steering.Hold(t, from, gone))
	}
	apply(t, r, with())
	lab.Node.FillConntrack(t)

	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		for _, c := range []struct {
			to   service.Destination
			want string
		}{
			{web, f.Says(web)},
			{tcp("[fd01::10]:80"), "front for [fd01::10]:80"},
			{out, f.Says(out)},
			{own, "node:30080"},
			{own6, "node:30080"},
			{tcp("10.96.0.11:80"), "refused"},
			{tcp("10.96.0.10:81"), "refused"},
			{tcp("192.0.2.10:81"), "refused"},
		} {
			steering.Expect(t, from, c.to, c.want)
		}
	}
	for _, o := range conns {
		o.Works(t, "the table is full")
	}
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		check.Equalf(t, askUDP(t, from, "10.96.0.11:53"), "refused", "UDP from %s", from.Name())
	}
	for _, ip := range [][2]netip.Addr{{lab.Client.IPv4, b.IPv4}, {lab.Client.IPv6, b.IPv6}} {
		c, err := dialAs(lab.Node, "tcp", netip.AddrPortFrom(ip[0], 10001), netip.AddrPortFrom(ip[1], 8080).String())
		if err != nil {
			t.Errorf("as %s: %v", ip[0], err)
			continue
		}
		steering.Keep(t, c, ip[0].String(), tcp(netip.AddrPortFrom(ip[1], 8080).String())).Works(t, "connected")
		_ = c.Close()
		u := must.Get(dialAs(lab.Node, "udp", netip.AddrPortFrom(ip[0], 10002), netip.AddrPortFrom(ip[1], 53).String()))(t)
		check.Equalf(t, exchangeUDP(u), "an answer", "UDP as %s", ip[0])
		_ = u.Close()
	}
	if c, err := lab.Client.Dialer(&net.Dialer{Timeout: 5 * silence}, "tcp", "10.2.1.2:8080"); err == nil {
		_ = c.Close()
		t.Error("a connection past us is tracked: the table is not full")
	}
}

// Sockets on the node's address that have the mark are not tracked, whatever port
// the kernel gave them; transparent sockets of other programs are.
func TestMarkedSocketsAreNotTracked(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	r := newRedirector(t, lab.Node, Options{})
	plan := steering.Plan()
	plan.Node = redirect.SetOf(netip.MustParseAddr("10.2.1.1"), netip.MustParseAddr("fd00:2:1::1"))
	apply(t, r, plan)
	lab.Node.TrackConnections(t)
	steering.Untracked(t, lab, r)
}
