package steering

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Kept plays what has to hold where connections to endpoints are kept in connection
// tracking: an endpoint that may only answer does so, to a client's address (F7) and to
// the node's, over TCP and UDP; the same where another program translates the source; and
// an error about a packet finds the socket. open opens a Redirector in the node's network
// namespace that keeps them.
func Kept(t *testing.T, open func(t testing.TB, node *netns.Host) redirect.Redirector) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	echo, echoUDP := b.EchoTCP(t, 8080), b.EchoUDP(t, 8080)
	nft(t, lab.Node, fmt.Sprintf(`table inet policies {
		chain incoming {
			type filter hook input priority 0
			ct state established,related accept
			ip saddr %s drop
			ip6 saddr %s meta l4proto { tcp, udp } drop
		}
	}`, b.IPv4, b.IPv6))
	r := open(t, lab.Node)
	p := Plan()
	p.Node = redirect.SetOf(netip.MustParseAddr("10.2.1.1"), netip.MustParseAddr("fd00:2:1::1"))
	must.OK(t, r.Apply(p))
	must.OK(t, must.Err(r.Verify()))
	HoldClients(t, r, lab.Client.IPv4, lab.Client.IPv6)
	replies := r.Traits().Replies
	if why, kept := replies.Tracking.Kept(); !kept || replies.Tracking.Bypassed() {
		t.Fatalf("connections are not kept in connection tracking: %q", why)
	}
	port := replies.FirstPort
	for _, masqueraded := range []bool{false, true} {
		if masqueraded {
			nft(t, lab.Node, `table inet translation {
				chain post {
					type nat hook postrouting priority srcnat
					oifname != lo masquerade fully-random
				}
			}`)
		}
		for _, pair := range []struct{ client, endpoint, node netip.Addr }{
			{lab.Client.IPv4, b.IPv4, netip.MustParseAddr("10.2.1.1")}, {lab.Client.IPv6, b.IPv6, netip.MustParseAddr("fd00:2:1::1")},
		} {
			seen := pair.client
			if masqueraded {
				seen = pair.node
			}
			to := netip.AddrPortFrom(pair.endpoint, 8080)
			for network, at := range map[string]*netns.Echo{"tcp": echo, "udp": echoUDP} {
				port++
				as := netip.AddrPortFrom(pair.client, port)
				if got := exchange(lab.Node, network, as, to.String()); !strings.HasPrefix(got, "b1:8080") {
					t.Errorf("%s as %s, masqueraded %v: %s", network, as, masqueraded, got)
					continue
				}
				if peers := at.Peers(); peers[len(peers)-1].Addr() != seen {
					t.Errorf("%s as %s, masqueraded %v: the endpoint saw %s", network, as, masqueraded, peers[len(peers)-1])
				}
			}
			port++
			as := netip.AddrPortFrom(pair.client, port)
			if got := exchange(lab.Node, "tcp", as, netip.AddrPortFrom(pair.endpoint, 8081).String()); !strings.Contains(got, "refused") {
				t.Errorf("a closed port as %s, masqueraded %v: %s", as, masqueraded, got)
			}
			connectMarked(t, lab.Node, to, replies.Mark)
		}
	}
}

// exchange sends a word from an address, and returns the answer, or an error's text.
func exchange(from *netns.Host, network string, as netip.AddrPort, to string) string {
	c, err := from.Dialer(DialerFrom(network, as), network, to)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	return say(c)
}

func say(c net.Conn) string {
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte("hello")); err != nil {
		return err.Error()
	}
	answer := make([]byte, 100)
	n, err := c.Read(answer)
	if err != nil {
		return err.Error()
	}
	return string(answer[:n])
}

// Untracked opens sockets on the node's address to its endpoint at port 8080. Connection
// tracking knows those with the mark of the Redirector's sockets not, and the others.
func Untracked(t *testing.T, lab *netns.Lab, r redirect.Redirector) {
	t.Helper()
	for _, host := range []netip.Addr{lab.Backends[0].IPv4, lab.Backends[0].IPv6} {
		for _, mark := range []uint32{r.Traits().Replies.Mark, 0} {
			before := lab.Node.Tracked(t)
			connectMarked(t, lab.Node, netip.AddrPortFrom(host, 8080), mark)
			if more := lab.Node.Tracked(t) - before; more > 0 != (mark == 0) {
				t.Errorf("a socket with the mark %#x to %s: %d more connections are tracked", mark, host, more)
			}
		}
	}
}

// connectMarked connects a socket on the node's address that has a mark, until the test
// ends.
func connectMarked(t *testing.T, node *netns.Host, to netip.AddrPort, mark uint32) {
	t.Helper()
	must.OK(t, sys.InNetNS(node.FD(), func() error {
		fd, e := sys.ConnectTCP(to, netip.AddrPort{}, sys.ConnectOptions{Transparent: true, Mark: mark})
		if e != 0 && e != sys.EINPROGRESS {
			return e
		}
		t.Cleanup(func() { sys.Close(fd) })
		return wait.Poll(patience, func() error {
			if e := sys.ConnectResult(fd); e != 0 {
				return e
			}
			return nil
		})
	}))
}

// nft gives nft a text.
func nft(t *testing.T, n *netns.Host, text string) {
	t.Helper()
	cmd := n.Command(t, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s\n%s", err, out, text)
	}
}
