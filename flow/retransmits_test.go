package flow

import (
	"context"
	"io"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// inspected returns what packets have said of all connections together, and how many attempts these took.
func (n *node) inspected() (all conntrack.Transport, attempts int) {
	n.t.Helper()
	must.OK(n.t, n.table.Inspect(context.Background(), n.post, func(r *conntrack.Record) error {
		attempts += int(r.Attempts)
		if t := r.Transport(); t != nil {
			for _, s := range [][2]*conntrack.Side{{&all.Client, &t.Client}, {&all.Endpoint, &t.Endpoint}} {
				s[0].RTT = s[1].RTT
				s[0].Retransmits += s[1].Retransmits
				s[0].Lost += s[1].Lost
			}
		}
		return nil
	}))
	return all, attempts
}

// Segments that are sent again count, and those that were lost on their way to the node, for each side.
// That others do not count is shown by the model in package bpf: on a busy machine, packets overtake others.
func TestSegmentsThatAreSentAgain(t *testing.T) {
	// lose has a host lose data that comes to it: the node has seen that.
	lose := func(t *testing.T, h *netns.Host) {
		h.NFT(t, "add table inet loss; add chain inet loss in { type filter hook input priority 0; }; "+
			"add rule inet loss in meta l4proto tcp meta length > 200 numgen inc mod 8 5 drop")
	}
	for _, c := range []struct {
		name  string
		lose  func(*testing.T, *netns.Lab)
		again func(*conntrack.Transport) uint32
	}{
		{"to the endpoint", func(t *testing.T, l *netns.Lab) { lose(t, l.Backends[0]) }, func(s *conntrack.Transport) uint32 { return s.Endpoint.Retransmits }},
		{"to the client", func(t *testing.T, l *netns.Lab) { lose(t, l.Client) }, func(s *conntrack.Transport) uint32 { return s.Client.Retransmits }},
		{"of the client", func(t *testing.T, l *netns.Lab) { l.Client.Lose(t, "eth0", 200, 8) }, func(s *conntrack.Transport) uint32 { return s.Client.Lost }},
		{"of the endpoint", func(t *testing.T, l *netns.Lab) { l.Backends[0].Lose(t, "eth0", 200, 8) }, func(s *conntrack.Transport) uint32 { return s.Endpoint.Lost }},
	} {
		t.Run(c.name, func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			n := newNode(t, lab, nil)
			n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
			conn := lab.Client.Connect(t, "tcp", vip4+":80")
			must.OK(t, must.Err(netns.AskOn(conn)))
			talk := func() {
				const size = 256 << 10
				failed := make(chan error, 1)
				go func() { failed <- must.Err(conn.Write(make([]byte, size))) }()
				must.OK(t, must.Err(io.ReadFull(conn, make([]byte, size))))
				must.OK(t, <-failed)
			}
			wait.True(t, "the connection is known", func() bool { return n.server.Stats().Open == 1 })
			talk()
			s, _ := n.inspected()
			if s.Client.RTT <= 0 || s.Endpoint.RTT <= 0 {
				t.Errorf("the handshakes took %d and %d ns", s.Client.RTT, s.Endpoint.RTT)
			}
			c.lose(t, lab)
			wait.True(t, "segments are seen again", func() bool {
				talk()
				s, _ = n.inspected()
				return c.again(&s) >= 3
			})
		})
	}
}

// A client's SYN that comes again counts, the one that userspace puts back for another endpoint does not.
func TestSYNsThatAreSentAgain(t *testing.T) {
	lab := netns.NewLab(t, 1)
	echo := lab.Backends[0]
	echo.EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(echo.IPv4, 8081), at(echo.IPv4, 8080))) // nobody is at the first one
	const connections = 4
	var again uint32 // as the client's kernel says: a busy machine's repeats SYNs, too
	ask := func(count int) {
		for range count {
			conn := lab.Client.Connect(t, "tcp", vip4+":80").(*net.TCPConn)
			must.OK(t, must.Err(netns.AskOn(conn)))
			raw := must.Get(conn.SyscallConn())(t)
			must.OK(t, raw.Control(func(fd uintptr) {
				info := must.Get(unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO))(t)
				again += info.Total_retrans
			}))
		}
	}
	ask(connections)
	if s, attempts := n.inspected(); attempts <= connections || s.Endpoint.Retransmits != again {
		t.Errorf("%d attempts, %d segments sent again: %+v", attempts, again, s)
	}
	n.apply(svc(vip4, nil, at(echo.IPv4, 8080)))
	echo.NFT(t, "add table inet loss; add chain inet loss in { type filter hook input priority 0; }; "+
		"add rule inet loss in tcp flags & (syn|ack) == syn numgen inc mod 1000 < 1 drop")
	before := again
	ask(1)
	if s, _ := n.inspected(); again == before || s.Endpoint.Retransmits != again || s.Client.Retransmits != 0 {
		t.Errorf("%d segments sent again: %+v", again, s)
	}
}
