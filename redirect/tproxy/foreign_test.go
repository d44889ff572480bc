package tproxy

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// elsewhere gives a backend addresses that are routed by the node like any
// others: they stand for load balancers' addresses.
func elsewhere(t *testing.T, lab *netns.Lab, addrs ...string) {
	t.Helper()
	b := lab.Backends[0]
	for _, a := range addrs {
		ip := netip.MustParseAddr(a)
		via := b.IPv4
		if ip.Is6() {
			via = b.IPv6
		}
		p := netip.PrefixFrom(ip, ip.BitLen())
		must.OK(t, errors.Join(b.AddAddr("lo", p), lab.Node.AddRoute(p, via)))
	}
}

// Rule A3.13: of an address that is not ours, the listed ports are taken, from
// other hosts and from the node itself, and everything else goes on as if we
// were not there.
func TestTakesOnlyTheListedPortsOfForeignAddresses(t *testing.T) {
	lab := netns.NewLab(t, 1)
	elsewhere(t, lab, "192.0.2.10", "2001:db8::10")
	for _, port := range []uint16{80, 81, 82, 83} {
		lab.Backends[0].EchoTCP(t, port)
	}
	for _, a := range []string{"192.0.2.10:53", "[2001:db8::10]:53"} {
		echoUDPAt(t, lab.Backends[0], a)
	}
	f := steering.NewFront(t, lab.Node, "front")
	lab.Node.EchoTCP(t, 83) // a wildcard server of the host
	r := newRedirector(t, lab.Node, Options{})
	var conns []*steering.Held
	var parts []func(*redirect.Plan)
	for _, a := range []string{"192.0.2.10", "[2001:db8::10]"} {
		conns = append(conns, steering.Hold(t, lab.Client, tcp(a+":80"))) // a connection past us
		parts = append(parts,
			steering.Steer(f, tcp(a+":80")),
			steering.Refuse(tcp(a+":81"), udp(a+":54")),
			steering.Silent(tcp(a+":82")),
		)
	}
	plan := steering.Plan(parts...)
	apply(t, r, plan)
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		for _, a := range []string{"192.0.2.10", "[2001:db8::10]"} {
			for _, c := range []struct{ port, want string }{
				{":80", f.Says(tcp(a + ":80"))},
				{":81", "refused"},
				{":83", "b1:83"},
			} {
				steering.Expect(t, from, tcp(a+c.port), c.want)
			}
			steering.Expect(t, from, tcp(a+":82"), steering.Silence)
			check.Equalf(t, askUDP(t, from, a+":53"), "an answer", "from %s to UDP %s:53", from.Name(), a)
			if got := askUDP(t, from, a+":54"); got != "refused" && (from != lab.Node || !strings.HasSuffix(got, "operation not permitted")) {
				t.Errorf("from %s to UDP %s:54: got %q, want a refusal", from.Name(), a, got)
			}
			ours := steering.Hold(t, from, tcp(a+":80"))
			ours.Works(t, "taken")
			conns = append(conns, ours)
		}
	}
	for _, step := range []struct {
		name string
		plan redirect.Plan
	}{
		{"no endpoints", steering.Plan(steering.Refuse(tcp("192.0.2.10:80"), tcp("[2001:db8::10]:80")))},
		{"service gone", steering.Plan(steering.Linger(tcp("192.0.2.10:80"), tcp("[2001:db8::10]:80")))},
		{"back again", plan},
	} {
		apply(t, r, step.plan)
		for _, o := range conns {
			o.Works(t, step.name)
		}
		if step.name == "service gone" {
			for _, from := range []*netns.Host{lab.Client, lab.Node} {
				for _, d := range []string{"192.0.2.10:80", "[2001:db8::10]:80"} {
					steering.Expect(t, from, tcp(d), "b1:80", step.name)
				}
			}
		}
	}
}

func echoUDPAt(t *testing.T, h *netns.Host, address string) {
	t.Helper()
	pc := must.Get(h.ListenPacket("udp", address))(t)
	done := make(chan struct{})
	t.Cleanup(func() {
		_ = pc.Close()
		<-done
	})
	go func() {
		defer close(done)
		buf := make([]byte, 100)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = pc.WriteTo(buf[:n], from)
		}
	}()
}

// dialAs connects from the node with a client's address.
func dialAs(node *netns.Host, network string, client netip.AddrPort, to string) (net.Conn, error) {
	return node.Dialer(steering.DialerFrom(network, client), network, to)
}

// Fact F7: an endpoint sees the client's own address and its answers come back
// to our socket, TCP, UDP and ICMP errors, IPv4 and IPv6; whatever others send
// directly between the two passes, also where a transparent wildcard listener
// of somebody else's has the port.
func TestAnswersToClientsAddresses(t *testing.T) {
	for _, strict := range []string{"", "before", "after"} {
		t.Run("src_valid_mark="+strict, func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			b := lab.Backends[0]
			echo := b.EchoTCP(t, 8080)
			b.EchoUDP(t, 53)
			lab.Client.EchoTCP(t, 15001)
			verify := func() {
				must.OK(t, lab.Node.SetSysctl("net/ipv4/conf/all/src_valid_mark", "1"))
			}
			if strict == "before" {
				verify()
			}
			r := newRedirector(t, lab.Node, Options{})
			apply(t, r, steering.Plan())
			if strict == "after" {
				verify()
				if repaired, err := r.Verify(); repaired || err != nil {
					t.Errorf("verify: %v, %v", repaired, err)
				}
			}
			replies := r.Traits().Replies
			if !replies.Diverted || replies.FirstPort != redirect.ReplyPorts[0] || replies.LastPort != redirect.ReplyPorts[1] {
				t.Fatalf("replies: %+v", replies)
			}
			lc := net.ListenConfig{Control: steering.DialerFrom("tcp", netip.AddrPort{}).Control}
			lc.SetMultipathTCP(false)
			wildcard := must.Get(lab.Node.ListenConfig(&lc, "tcp4", "0.0.0.0:15001"))(t)
			t.Cleanup(func() { _ = wildcard.Close() })
			for _, ip := range [][2]netip.Addr{{lab.Client.IPv4, b.IPv4}, {lab.Client.IPv6, b.IPv6}} {
				for _, port := range []uint16{replies.FirstPort, replies.LastPort} {
					local := netip.AddrPortFrom(ip[0], port)
					c, err := dialAs(lab.Node, "tcp", local, netip.AddrPortFrom(ip[1], 8080).String())
					if err != nil {
						t.Errorf("as %s: %v", local, err)
						continue
					}
					steering.Keep(t, c, local.String(), tcp(netip.AddrPortFrom(ip[1], 8080).String())).Works(t, "connected")
					if peers := echo.Peers(); peers[len(peers)-1] != local {
						t.Errorf("the endpoint saw %v, want %s", peers, local)
					}
					_ = c.Close()
				}
				c := must.Get(dialAs(lab.Node, "udp", netip.AddrPortFrom(ip[0], 12000), netip.AddrPortFrom(ip[1], 53).String()))(t)
				check.Equalf(t, exchangeUDP(c), "an answer", "UDP as %s", ip[0])
				_ = c.Close()
				if strict == "" || ip[0].Is6() { // the check of sources does not let errors through
					c = must.Get(dialAs(lab.Node, "udp", netip.AddrPortFrom(ip[0], 12001), netip.AddrPortFrom(ip[1], 54).String()))(t)
					check.Equalf(t, exchangeUDP(c), "refused", "UDP as %s to a closed port", ip[0])
					_ = c.Close()
				}
				// Directly: by ports that the kernel gives, which never are ours,
				// and from and to ports of ours.
				c = must.Get(lab.Client.Dial("tcp", netip.AddrPortFrom(ip[1], 8080).String()))(t)
				if port := netip.MustParseAddrPort(c.LocalAddr().String()).Port(); port >= replies.FirstPort && port <= replies.LastPort {
					t.Errorf("the kernel gave a client port %d, which is of our range", port)
				}
				steering.Keep(t, c, "client", tcp(netip.AddrPortFrom(ip[1], 8080).String())).Works(t, "connected")
				_ = c.Close()
				if got, err := b.Ask("tcp", netip.AddrPortFrom(ip[0], 15001).String()); got != "client:15001" {
					t.Errorf("directly to %s: %q, %v", ip[0], got, err)
				}
				d := &net.Dialer{Timeout: patience, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(ip[0], 20000))}
				direct, err := lab.Client.Dialer(d, "tcp", netip.AddrPortFrom(ip[1], 8080).String())
				if err != nil {
					t.Errorf("directly from %s: %v", ip[0], err)
					continue
				}
				_ = direct.Close()
			}
		})
	}
}

// exchangeUDP sends a datagram on a connected socket and tells what comes.
func exchangeUDP(c net.Conn) string {
	if _, err := c.Write([]byte("hello")); err != nil {
		return err.Error()
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	_, err := c.Read(make([]byte, 100))
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case err != nil:
		return err.Error()
	}
	return "an answer"
}

// A mark that somebody else uses is left to him: the addresses that are not
// ours stay alone, everything else is in force, and the error says why.
func TestMarkOfSomebodyElse(t *testing.T) {
	lab := netns.NewLab(t, 1)
	elsewhere(t, lab, "192.0.2.10")
	lab.Backends[0].EchoTCP(t, 80)
	rule := netlink.NewRule()
	rule.Mark, rule.Table, rule.Priority = 0x1000, 100, 50
	must.OK(t, lab.Node.Netlink().RuleAdd(rule))
	f := steering.NewFront(t, lab.Node, "front")
	r := newRedirector(t, lab.Node, Options{})
	plan := steering.Plan(steering.Steer(f, tcp("192.0.2.10:80"), tcp("10.96.0.10:80")))
	var clash *redirect.ClashError
	if err := r.Apply(plan); !errors.As(err, &clash) {
		t.Errorf("got %v, want a clash", err)
	}
	for to, want := range map[string]string{"192.0.2.10:80": "b1:80", "10.96.0.10:80": "front for 10.96.0.10:80"} {
		steering.Expect(t, lab.Client, tcp(to), want)
	}
	must.OK(t, lab.Node.Netlink().RuleDel(rule))
	apply(t, r, plan)
	steering.Expect(t, lab.Client, tcp("192.0.2.10:80"), "front for 192.0.2.10:80")
}

// An address that turns from a cluster IP to a foreign one, and back.
func TestAddressThatChangesSides(t *testing.T) {
	lab := netns.NewLab(t, 1)
	elsewhere(t, lab, "10.97.0.10")
	lab.Backends[0].EchoTCP(t, 81)
	f := steering.NewFront(t, lab.Node, "front")
	web, other := tcp("10.97.0.10:80"), tcp("10.97.0.10:81")
	inside := steering.Plan(steering.Steer(f, web))
	inside.Local = redirect.LocalOf(append(redirect.Ranges(inside.Local), netip.MustParsePrefix("10.97.0.10/32"))...)
	outside := steering.Plan(steering.Steer(f, web))
	outside.NonLocal, outside.ClusterIPs = outside.ClusterIPs, outside.NonLocal
	r := newRedirector(t, lab.Node, Options{})
	for _, step := range []struct {
		plan  redirect.Plan
		other string
	}{{inside, "refused"}, {outside, "b1:81"}, {inside, "refused"}} {
		apply(t, r, step.plan)
		for _, from := range []*netns.Host{lab.Client, lab.Node} {
			steering.Expect(t, from, web, f.Says(web))
			steering.Expect(t, from, other, step.other)
		}
		if repaired, err := r.Verify(); repaired || err != nil {
			t.Errorf("verify: %v, %v", repaired, err)
		}
	}
}
