package sklookup

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
	"github.com/sluice-proxy/sluice/test/wait"
)

// asClient connects from the node to a server with a client's address, as the
// proxy does, and has its answer come back.
func asClient(t *testing.T, lab *netns.Lab, network string, as, to netip.AddrPort) (net.Conn, error) {
	t.Helper()
	c, err := lab.Node.Dialer(steering.DialerFrom(network, as), network, to.String())
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(wait.Patience))
	if _, err := fmt.Fprintln(c, "hello"); err != nil {
		return nil, err
	}
	_, err = c.Read(make([]byte, 100))
	return c, err
}

// TestAnswersAreFoundByTheSocket: F7: where there is tcx, an answer comes back to
// the socket that it is for, and no other packet to the same client and port does:
// neither one of the client's own connections, nor one of another node's proxy.
func TestAnswersAreFoundByTheSocket(t *testing.T) {
	lab := netns.NewLab(t, 1)
	server := lab.Backends[0]
	server.EchoTCP(t, 8080)
	server.EchoUDP(t, 8080)
	r := newRedirector(t, lab.Node)
	t.Cleanup(func() { _ = r.Close() })
	if r.ingress == nil {
		t.Fatal("this kernel has no tcx")
	}
	must.OK(t, r.Apply(steering.Plan()))
	replies := r.Traits().Replies
	if !replies.Diverted {
		t.Errorf("no answer comes back: %+v", replies)
	}
	steering.HoldClients(t, r, lab.Client.IPv4, lab.Client.IPv6)
	// Servers of the node on the ports that the clients use themselves.
	for i := range uint16(2) {
		lab.Node.EchoTCP(t, replies.FirstPort+10*i+1)
		lab.Node.EchoUDP(t, replies.FirstPort+10*i+1)
	}
	for _, network := range []string{"tcp", "udp"} {
		for i, v := range []struct{ client, server netip.Addr }{{lab.Client.IPv4, server.IPv4}, {lab.Client.IPv6, server.IPv6}} {
			to, port := netip.AddrPortFrom(v.server, 8080), replies.FirstPort+uint16(10*i)
			if _, err := asClient(t, lab, network, netip.AddrPortFrom(v.client, port), to); err != nil {
				t.Errorf("%s as %s: %v", network, v.client, err)
			}
			// The client itself has the next port.
			var local net.Addr = &net.TCPAddr{Port: int(port) + 1}
			if network == "udp" {
				local = &net.UDPAddr{Port: int(port) + 1}
			}
			c, err := lab.Client.Dialer(&net.Dialer{Timeout: wait.Patience, LocalAddr: local}, network, to.String())
			if err == nil {
				_ = c.SetDeadline(time.Now().Add(wait.Patience))
				_, _ = fmt.Fprintln(c, "hello")
				var said string
				if said, err = bufio.NewReader(c).ReadString('\n'); said != server.Name()+":8080\n" {
					err = fmt.Errorf("%q, %w", said, err)
				}
				_ = c.Close()
			}
			if err != nil {
				t.Errorf("%s from %s itself: %v", network, v.client, err)
			}
		}
	}
}

// TestIngressFollowsInterfaces: an interface that is new, and one that somebody
// took the program from, gets it at once; a plan that shows endpoints the node's
// address has it nowhere.
func TestIngressFollowsInterfaces(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Settle(t)
	r := newRedirector(t, lab.Node)
	t.Cleanup(func() { _ = r.Close() })
	must.OK(t, r.Apply(steering.Plan()))
	steering.HoldClients(t, r, lab.Client.IPv4)
	check.Equalf(t, len(r.ingress.links), 2, "the program is at interfaces")
	for _, l := range r.ingress.links {
		must.OK(t, l.(interface{ Detach() error }).Detach())
		break
	}
	server := lab.AddBackend(t)
	server.EchoTCP(t, 8080)
	select {
	case <-r.Changed():
	case <-time.After(wait.Patience):
		t.Fatal("a new interface is not told of")
	}
	if repaired, err := r.Verify(); !repaired || err != nil {
		t.Fatalf("verify: repaired %v, %v", repaired, err)
	}
	if repaired, err := r.Verify(); repaired || err != nil {
		t.Fatalf("verify again: repaired %v, %v", repaired, err)
	}
	check.Equalf(t, len(r.ingress.links), 3, "the program is at interfaces")
	for index := range r.ingress.links {
		if !r.ingress.attachedTo(index) {
			t.Errorf("the program is not at interface %d", index)
		}
	}
	if _, err := asClient(t, lab, "tcp", netip.AddrPortFrom(lab.Client.IPv4, 62000), netip.AddrPortFrom(server.IPv4, 8080)); err != nil {
		t.Errorf("by a new interface: %v", err)
	}

	nodeOnly := steering.Plan()
	nodeOnly.NodeSourceOnly = true
	must.OK(t, r.Apply(nodeOnly))
	if n := len(r.ingress.links); n != 0 {
		t.Errorf("nobody needs the program, and it is at %d interfaces", n)
	}
}

// Without tcx, before Linux 6.6, answers come back by their ports, for the clients
// that are told.
func TestSteeringWithoutTCX(t *testing.T) {
	t.Parallel()
	noIngress := func(t testing.TB, node *netns.Host) redirect.Redirector {
		r := newRedirector(t, node)
		r.ingress.close()
		r.ingress, r.Demand = nil, nil
		r.answers = r.Router.RepliesByPort(r.opts.ReplyPorts)
		return r
	}
	steering.Run(t, steering.Mode{
		New: noIngress,
		Kill: func(_ testing.TB, r redirect.Redirector) {
			r.(*Redirector).Touched = false
			_ = r.Close()
		},
		Cleanup: func(node *netns.Host) ([]string, error) {
			return route.Cleanup(optionsOf(node).Routes)
		},
		NonLocalSilent: true,
		LingeringStays: true,
	})
}

// The program leaves what others have at an interface to them.
func TestIngressStandsBesideOthers(t *testing.T) {
	lab := netns.NewLab(t, 1)
	server := lab.Backends[0]
	server.EchoTCP(t, 8080)
	r := newRedirector(t, lab.Node)
	t.Cleanup(func() { _ = r.Close() })
	other := must.Get(openIngress(lab.Node.FD(), 0x4000, [2]uint16{1, 2}))(t)
	t.Cleanup(other.close)
	var before []link.Link
	for _, h := range []string{"client", "b1"} {
		k := must.Get(lab.Node.Netlink().LinkByName(h))(t)
		l := must.Get(other.attach(k.Attrs().Index))(t)
		before = append(before, l)
	}
	must.OK(t, r.Apply(steering.Plan()))
	steering.HoldClients(t, r, lab.Client.IPv4)
	if _, err := asClient(t, lab, "tcp", netip.AddrPortFrom(lab.Client.IPv4, 62000), netip.AddrPortFrom(server.IPv4, 8080)); err != nil {
		t.Error(err)
	}
	for _, l := range before {
		if info, err := l.Info(); err != nil || info.TCX().Ifindex == 0 {
			t.Errorf("somebody else's program was taken away: %v", err)
		}
		_ = l.Close()
	}
}
