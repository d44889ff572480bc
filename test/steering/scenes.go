package steering

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/mode"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// whoReachesWhat: destinations that are served, refuse or drop; ports and
// addresses that the plan does not name; and the host's own servers.
func whoReachesWhat(t *testing.T, m Mode) {
	s := newStage(t, m, 0)
	hostPort := uint16(80)
	if m.Unshielded {
		hostPort = 9999 // its server would keep the service from binding the port
	}
	s.Node.EchoTCP(t, hostPort)
	s.Node.EchoUDP(t, 53)
	web, dns := both(service.TCP, "10.96.0.10", "fd01::10", 80), both(service.UDP, "10.96.0.10", "fd01::10", 5353)
	none, quiet := all("10.96.0.11", "fd01::11", 80), all("10.96.0.12", "fd01::12", 80)
	parts := []func(*redirect.Plan){Steer(s.front, web...), Steer(s.front, dns...), Refuse(none...), Silent(quiet...)}
	other, elsewhere := s.another(t), both(service.TCP, "10.96.0.20", "fd01::20", 80)
	s.apply(t, Plan(append(parts, Steer(other, elsewhere...))...))

	s.fromEverywhere(t, "served", served, web...)
	for _, d := range elsewhere {
		s.fromEverywhere(t, "served by another listener", other.Says(d), d)
	}
	s.fromEverywhere(t, "served", served, dns...)
	s.fromEverywhere(t, "no endpoints (A3.4)", Refused, none...)
	s.fromEverywhere(t, "none on this node (A3.5)", Silence, quiet...)
	s.fromEverywhere(t, "a port that is not in service (A3.12)", Refused, all("10.96.0.10", "fd01::10", 81)...)
	unallocated := Silence
	if m.UnallocatedRefuses {
		unallocated = Refused
	}
	s.fromEverywhere(t, "an address that no service has (A3.12)", unallocated, all("10.96.77.77", "fd01::7777", 80)...)
	if !m.Unshielded {
		s.fromEverywhere(t, "a port of the host's, at a service (F4)", Refused, both(service.UDP, "10.96.0.10", "fd01::10", 53)...)
		s.fromEverywhere(t, "a port of the host's, where nobody is (F4)", Silence, both(service.UDP, "10.96.77.77", "fd01::7777", 53)...)
		s.fromEverywhere(t, "the host's port, refused (F4)", Refused, both(service.TCP, "10.96.0.11", "fd01::11", 80)...)
	}
	s.fromEverywhere(t, "the host's own server", fmt.Sprintf("node:%d", hostPort), both(service.TCP, s.Node.IPv4.String(), s.Node.IPv6.String(), hostPort)...)
	s.fromEverywhere(t, "the host's own server", "node:53", both(service.UDP, s.Node.IPv4.String(), s.Node.IPv6.String(), 53)...)
}

// nonLocal: of a non-local address, only the ports in the plan are steered; other
// ports, and ping, still reach the address's owner (A3.13).
func nonLocal(t *testing.T, m Mode) {
	s := newStage(t, m, 1)
	behind := s.Backends[0]
	for i, a := range []string{"192.0.2.10", "2001:db8::10"} {
		addr := netip.MustParseAddr(a)
		must.OK(t, behind.AddAddr("lo", netip.PrefixFrom(addr, addr.BitLen())))
		via := []netip.Addr{behind.IPv4, behind.IPv6}[i]
		must.OK(t, s.Node.AddRoute(netip.PrefixFrom(addr, addr.BitLen()), via))
	}
	for _, port := range []uint16{80, 81, 82, 83, 84} {
		behind.EchoTCP(t, port)
	}
	for _, a := range []string{"192.0.2.10:54", "[2001:db8::10]:54"} {
		answerUDP(t, behind, a)
	}
	taken, refused := all("192.0.2.10", "2001:db8::10", 80), both(service.TCP, "192.0.2.10", "2001:db8::10", 82)
	quiet, lingering := both(service.TCP, "192.0.2.10", "2001:db8::10", 83), both(service.TCP, "192.0.2.10", "2001:db8::10", 84)
	base := []func(*redirect.Plan){Steer(s.front, taken...), Refuse(refused...), Silent(quiet...)}
	ending := slices.Concat(refused, quiet, lingering)
	s.apply(t, Plan(Steer(s.front, taken...), Steer(s.front, ending...)))
	var held []*Held
	for _, from := range []*netns.Host{s.Client, s.Node} {
		for _, d := range ending {
			held = append(held, Hold(t, from, d))
		}
	}
	s.apply(t, Plan(append(base, Linger(lingering...))...))

	s.fromEverywhere(t, "taken", served, taken...)
	s.fromEverywhere(t, "another port", "b1:81", both(service.TCP, "192.0.2.10", "2001:db8::10", 81)...)
	s.fromEverywhere(t, "another port", "b1:54", both(service.UDP, "192.0.2.10", "2001:db8::10", 54)...)
	s.fromEverywhere(t, "silent", Silence, quiet...)
	refusal4, gone4, gone6 := Refused, "b1:84", "b1:84"
	if m.NonLocalSilent {
		refusal4 = Silence
	}
	if m.LingeringStays {
		gone4, gone6 = refusal4, Refused
	}
	s.fromEverywhere(t, "refused", refusal4, refused[0])
	s.fromEverywhere(t, "refused", Refused, refused[1])
	for i, gone := range []string{gone4, gone6} {
		for _, from := range []*netns.Host{s.Client, s.Node} {
			want := gone
			if m.OwnLingeringRefuses && from == s.Node {
				want = Refused
			}
			Expect(t, from, lingering[i], want, "lingering")
		}
	}
	for _, h := range held {
		h.Works(t, "refused, silent or lingering")
	}
	for _, from := range []*netns.Host{s.Client, s.Node} {
		for _, d := range taken[:2] {
			check.OKf(t, Ping(from, d.Addr), "ping %s from %s", d.Addr, from.Name())
		}
	}
	s.apply(t, Plan())
	s.fromEverywhere(t, "given back", "b1:80", taken[:2]...)
}

// answerUDP answers datagrams at one address with the echo servers' name.
func answerUDP(t *testing.T, at *netns.Host, address string) {
	t.Helper()
	pc := must.Get(at.ListenPacket("udp", address))(t)
	done := make(chan struct{})
	t.Cleanup(func() { _ = pc.Close(); <-done })
	_, port, _ := net.SplitHostPort(address)
	go func() {
		defer close(done)
		buf := make([]byte, 100)
		for {
			_, from, err := pc.ReadFrom(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = pc.WriteTo([]byte(at.Name()+":"+port), from)
			}
		}
	}()
}

// Node ports use the ports between these, and so do Linux clients.
const firstNodePort, lastClientPort = 30000, 60999

// clientAddresses: an endpoint sees the client's own address, its reply reaches
// our socket, and other users of ports in the same range are not affected: clients
// of a service, of the host, or of an endpoint itself (F7, F11).
func clientAddresses(t *testing.T, m Mode) {
	s := newStage(t, m, 1)
	server := s.Backends[0]
	echo := server.EchoTCP(t, 8080)
	s.Node.EchoTCP(t, 2222)
	web := both(service.TCP, "10.96.0.10", "fd01::10", 80)
	s.apply(t, Plan(Steer(s.front, web...), Steer(s.front, both(service.UDP, "10.96.0.10", "fd01::10", 80)...)))
	replies := s.steer.Traits().Replies
	if !replies.Diverted {
		t.Fatalf("no answer comes back: %q", replies.Why)
	}
	if replies.FirstPort == 0 || replies.FirstPort <= lastClientPort && replies.LastPort >= firstNodePort {
		t.Errorf("our sockets have clients' ports, %d to %d: a client's own connection from such a port gets no answer", replies.FirstPort, replies.LastPort)
	}
	for i, v := range []struct{ client, server netip.Addr }{{s.Client.IPv4, server.IPv4}, {s.Client.IPv6, server.IPv6}} {
		first := replies.FirstPort
		if replies.Clients != nil {
			ports := must.Get(replies.Clients.Hold(v.client))(t)
			t.Cleanup(func() { replies.Clients.Release(v.client) })
			first = ports[0]
		}
		as := netip.AddrPortFrom(v.client, first+1000)
		c, err := s.Node.Dialer(DialerFrom("tcp", as), "tcp", netip.AddrPortFrom(v.server, 8080).String())
		must.OKf(t, err, "as %s to %s", as, v.server)
		t.Cleanup(func() { _ = c.Close() })
		check.OKf(t, must.Err(netns.AskOn(c)), "as %s", as)
		if peers := echo.Peers(); len(peers) != i+1 || peers[i] != as {
			t.Errorf("the endpoint sees %v, want %s", peers, as)
		}
	}
	port := replies.FirstPort + 1010
	for _, v := range []struct{ client, server netip.Addr }{{s.Client.IPv4, s.Node.IPv4}, {s.Client.IPv6, s.Node.IPv6}} {
		family := service.FamilyOf(v.client)
		for _, c := range []struct{ name, to, want string }{
			{"a service", netip.AddrPortFrom(web[family].Addr, 80).String(), s.front.Says(web[family])},
			{"the host's own server", netip.AddrPortFrom(v.server, 2222).String(), "node:2222"},
		} {
			port++
			d := &net.Dialer{Timeout: patience, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(v.client, port))}
			conn, err := s.Client.Dialer(d, "tcp", c.to)
			if err != nil {
				t.Errorf("%s, from port %d: %v", c.name, port, err)
				continue
			}
			if got, err := netns.AskOn(conn); got != c.want || err != nil {
				t.Errorf("%s, from port %d: %q, %v", c.name, port, got, err)
			}
			_ = conn.Close()
		}
	}
}

// changes: whatever happens to a destination, its connections continue, and new
// ones follow the new plan at once (A8.1, A8.7).
func changes(t *testing.T, m Mode) {
	s := newStage(t, m, 0)
	web := both(service.TCP, "10.96.0.10", "fd01::10", 80)
	outside := both(service.TCP, "10.98.0.10", "fd02::10", 80) // beside the service ranges
	beside := func(p *redirect.Plan) {
		for _, d := range outside {
			p.Local = redirect.LocalOf(append(redirect.Ranges(p.Local), netip.PrefixFrom(d.Addr, d.Addr.BitLen()))...)
		}
	}
	every := append(web, outside...)
	s.apply(t, Plan(beside, Steer(s.front, every...)))
	var held []*Held
	for _, from := range []*netns.Host{s.Client, s.Node} {
		for _, d := range every {
			held = append(held, Hold(t, from, d))
		}
	}
	unnamed := Silence
	if m.UnallocatedRefuses {
		unnamed = Refused
	}
	s.front = s.another(t)
	for _, step := range []struct {
		name string
		plan redirect.Plan
		want string
	}{
		{"another listener", Plan(beside, Steer(s.front, every...)), served},
		{"no endpoints", Plan(beside, Refuse(every...)), Refused},
		{"silent", Plan(beside, Silent(every...)), Silence},
		{"another port only", Plan(beside, Refuse(both(service.TCP, "10.96.0.10", "fd01::10", 81)...), Refuse(both(service.TCP, "10.98.0.10", "fd02::10", 81)...)), Refused},
		{"service gone", Plan(beside), unnamed},
		{"back again", Plan(beside, Steer(s.front, every...)), served},
	} {
		s.apply(t, step.plan)
		for _, h := range held {
			h.Works(t, step.name)
		}
		s.fromEverywhere(t, step.name, step.want, every...)
	}
	for _, h := range held { // the ends of connections pass too
		_ = h.Conn.(*net.TCPConn).CloseWrite()
		_ = h.SetReadDeadline(time.Now().Add(patience))
		if n, err := h.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("close of the connection from %s: %d bytes, %v", h.from, n, err)
		}
	}
}

// richPlan has destinations of every kind.
func richPlan(f *Front) redirect.Plan {
	return Plan(
		Steer(f, all("10.96.0.10", "fd01::10", 80)...), Refuse(all("10.96.0.11", "fd01::11", 80)...),
		Silent(all("10.96.0.12", "fd01::12", 80)...), Steer(f, all("192.0.2.10", "2001:db8::10", 80)...),
		Linger(both(service.TCP, "192.0.2.10", "2001:db8::10", 84)...),
	)
}

// nothingStays: state that another program removes is restored, and after Close
// the namespace is as before.
func nothingStays(t *testing.T, m Mode) {
	s := newStage(t, m, 0)
	s.Settle(t)
	before := s.Node.Dump(t)
	plan := richPlan(s.front)
	s.apply(t, plan)
	during := s.Node.Dump(t)
	if during == before {
		t.Error("the plan does not show in the kernel")
	}
	if repaired, err := s.steer.Verify(); repaired || err != nil {
		t.Errorf("verify of what is whole: %v, %v", repaired, err)
	}
	must.OK(t, flushRules(s.Node))
	if repaired, err := s.steer.Verify(); !repaired || err != nil {
		t.Errorf("verify of what was flushed: %v, %v", repaired, err)
	}
	s.fromEverywhere(t, "repaired", served, both(service.TCP, "10.96.0.10", "fd01::10", 80)...)
	check.Textf(t, s.Node.Dump(t), during, "repaired")
	must.OK(t, s.steer.Close())
	Same(t, before, s.Node.Dump(t))
}

// flushRules removes our rules and routes as `ip rule flush` and `ip route flush`
// do.
func flushRules(node *netns.Host) error {
	nl := node.Netlink()
	for _, family := range []int{syscall.AF_INET, syscall.AF_INET6} {
		rules, err := nl.RuleList(family)
		if err != nil {
			return err
		}
		for _, r := range rules {
			if r.Protocol == ourProtocol {
				if err := nl.RuleDel(&r); err != nil {
					return err
				}
			}
		}
		routes, err := nl.RouteListFiltered(family, everyTable, filterTable)
		if err != nil {
			return err
		}
		for _, r := range routes {
			if r.Protocol == ourProtocol {
				if err := nl.RouteDel(&r); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// plansThatCannotBe: the error says why, and nothing of such a plan is in the kernel; nor is
// anything applied after Close.
func plansThatCannotBe(t *testing.T, m Mode) {
	s := newStage(t, m, 0)
	s.Settle(t)
	before := s.Node.Dump(t)
	for _, c := range []struct{ local, want string }{
		{"10.0.0.0/8", "this node's own address 10.1.0.1"},
		{"fd00::/16", "this node's own address fd00:1::1"},
		{"0.0.0.0/0", "it holds every address"},
		{"::/0", "it holds every address"},
	} {
		check.Error(t, s.steer.Apply(redirect.Plan{Local: redirect.LocalOf(netip.MustParsePrefix(c.local))}), c.want)
	}
	if !s.steer.Traits().BindEach {
		check.Error(t, s.steer.Apply(Plan(Steer(s.front, SCTP("10.96.0.10:80")))), "carries TCP and UDP only")
	}
	check.Textf(t, s.Node.Dump(t), before, "left in the kernel")
	must.OK(t, s.steer.Close())
	check.ErrorIsf(t, s.steer.Apply(redirect.Plan{}), mode.ErrClosed, "apply after Close")
	check.ErrorIsf(t, must.Err(s.steer.Verify()), mode.ErrClosed, "verify after Close")
}

// killed: the next process takes over the state of a killed one, and Cleanup
// removes it.
func killed(t *testing.T, m Mode) {
	s := newStage(t, m, 0)
	s.Settle(t)
	before := s.Node.Dump(t)
	plan := richPlan(s.front)
	s.apply(t, plan)
	during := s.Node.Dump(t)
	web := both(service.TCP, "10.96.0.10", "fd01::10", 80)
	held := Hold(t, s.Client, web[0])

	m.Kill(t, s.steer)
	s.start(t)
	s.apply(t, plan)
	s.fromEverywhere(t, "taken over", served, web...)
	held.Works(t, "taken over")
	if now := s.Node.Dump(t); now != during && !m.Renumbers {
		t.Errorf("taken over:\n%s\nwant:\n%s", now, during)
	}

	m.Kill(t, s.steer)
	removed, err := m.Cleanup(s.Node)
	if err != nil || len(removed) == 0 {
		t.Errorf("cleanup: %q, %v", removed, err)
	}
	Same(t, before, s.Node.Dump(t))
	if again, err := m.Cleanup(s.Node); err != nil || len(again) != 0 {
		t.Errorf("cleanup once more: %q, %v", again, err)
	}
}
