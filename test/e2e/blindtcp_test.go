package e2e

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// forge sends segments from a host, whatever their source addresses are.
func forge(t *testing.T, h *netns.Host, segments ...segment) {
	t.Helper()
	must.OK(t, h.Do(func() error {
		fd, err := sys.RawSender(false)
		if err != nil {
			return err
		}
		defer sys.Close(fd)
		for i := range segments {
			if errno := sys.SendRaw(fd, segments[i].to.Addr(), segments[i].packet()); errno != 0 {
				return errno
			}
		}
		return nil
	}))
}

// nextSequence is the sequence number of the next byte that a connection sends.
func nextSequence(t *testing.T, c net.Conn) (next uint32) {
	t.Helper()
	raw := must.Get(c.(*net.TCPConn).SyscallConn())(t)
	var failed error
	if err := raw.Control(func(fd uintptr) {
		set := func(option, value int) {
			if failed == nil {
				failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, option, value)
			}
		}
		const sendQueue, endWithoutProbe = 2, -1
		set(unix.TCP_REPAIR, 1)
		set(unix.TCP_REPAIR_QUEUE, sendQueue)
		if failed == nil {
			var n int
			n, failed = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_QUEUE_SEQ)
			next = uint32(n)
		}
		set(unix.TCP_REPAIR, endWithoutProbe)
	}); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	return next
}

// TestSegmentOutsideOfTheWindow sends one segment outside of the window, and closes the connection.
// The record comes long before the idle timeout, with the real duration and bytes.
func TestSegmentOutsideOfTheWindow(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"relay", "kernel"} {
		t.Run(path, func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			p := startProxy(t, lab, []webService{webOn(lab)}, "--datapath", path)
			began := time.Now()
			c := hold(t, lab.Client, addresses(80, vip4)[0], 1)[0]
			from, to := netip.MustParseAddrPort(c.LocalAddr().String()), netip.MustParseAddrPort(c.RemoteAddr().String())
			forge(t, lab.Client, segment{from: from, to: to, sequence: nextSequence(t, c) + 1<<28, ack: 1, flags: flagACK, data: []byte("x")})
			alive(t, []net.Conn{c}) // it has gone ahead of this
			c.Close()
			r := p.awaitRecords(1)[0]
			if took := time.Since(began); r.End != "client_fin" || r.Path != path || r.DurationUS > took.Microseconds() || r.BytesUp > 100 {
				t.Errorf("after %v: %+v", took, r)
			}
			p.stop()
		})
	}
}

// TestForgedSYNsTakeNoConnection sends SYNs from a host with a client's address: to the host's own
// Service, to the client's Service, and to the endpoint of both. The node drops them. The client
// connects to the endpoint and to its Service from the same ports. Its connections go on, and the
// host's Service never answers it.
func TestForgedSYNsTakeNoConnection(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"relay", "kernel"} {
		t.Run(path, func(t *testing.T) {
			lab := netns.NewLab(t, 2)
			victim, attacker, server := lab.Client, lab.Backends[1], lab.Backends[0]
			server.EchoTCP(t, 8080)
			lab.Node.NFT(t, fmt.Sprintf("table ip guard {\nchain raw {\ntype filter hook prerouting priority raw\niifname %q ip saddr != %s drop\n}\n}\n", attacker.Name(), attacker.IPv4))
			victim.NFT(t, "table ip seen {\ncounter wrong { }\nchain raw {\ntype filter hook prerouting priority raw\nip saddr 10.96.0.11 counter name wrong\n}\n}\n")
			web := webService{name: "web", vips: []string{vip4}, port: 80, endpoints: []netip.AddrPort{netip.AddrPortFrom(server.IPv4, 8080)}}
			other := web
			other.name, other.vips = "other", []string{"10.96.0.11"}
			p := startProxy(t, lab, []webService{web, other}, "--datapath", path)
			endpoint, service, attackers := web.endpoints[0], netip.MustParseAddrPort(vip4+":80"), netip.MustParseAddrPort("10.96.0.11:80")
			own := netip.AddrPortFrom(victim.IPv4, 41000)
			for range 20 {
				for _, to := range []netip.AddrPort{endpoint, service} {
					own = netip.AddrPortFrom(own.Addr(), own.Port()+1)
					forged := func() (list []segment) {
						for _, at := range []netip.AddrPort{attackers, endpoint, service} {
							list = append(list, segment{from: own, to: at, sequence: rand.Uint32(), flags: flagSYN})
						}
						return list
					}
					forge(t, attacker, forged()...)
					c, err := victim.Dialer(&net.Dialer{Timeout: wait.Patience, LocalAddr: net.TCPAddrFromAddrPort(own)}, "tcp", to.String())
					must.OKf(t, err, "from %s to %s", own, to)
					t.Cleanup(func() { c.Close() })
					must.OKf(t, must.Err(netns.AskOn(c)), "from %s to %s", own, to)
					forge(t, attacker, forged()...)
					alive(t, []net.Conn{c})
				}
			}
			out, err := victim.Command(t, "nft", "list", "counter", "ip", "seen", "wrong").CombinedOutput()
			if err != nil || !strings.Contains(string(out), "packets 0 ") {
				t.Errorf("the client was answered from a Service that it has not asked: %s, %v", out, err)
			}
			p.stop()
		})
	}
}
