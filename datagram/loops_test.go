package datagram

import (
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The TTL towards an endpoint whose port is a node port is high enough for the next
// proxy. From the first datagram on that arrived from another proxy, no proxy accepts
// it, whichever client began the session. Sessions to other endpoints have the system's
// TTL, and their sockets do not report the TTL.
func TestDatagramsThatPassedAProxyPassOneMore(t *testing.T) {
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, nil)
	const first, last, most = redirect.FirstReturnTTL, redirect.ReturnTTL, 64
	port := svc("port", "10.96.0.99", nil)
	port.Services[0].Spec.Type, port.Services[0].Spec.Ports[0].NodePort = "NodePort", 30053
	n.apply(port)
	for _, family := range []struct {
		vip                 string
		endpoints           [2]netip.Addr
		level, ttl, learned int
	}{
		{vip4, [2]netip.Addr{lab.Backends[0].IPv4, lab.Backends[1].IPv4}, syscall.IPPROTO_IP, syscall.IP_TTL, syscall.IP_RECVTTL},
		{vip6, [2]netip.Addr{lab.Backends[0].IPv6, lab.Backends[1].IPv6}, syscall.IPPROTO_IPV6, syscall.IPV6_UNICAST_HOPS, syscall.IPV6_RECVHOPLIMIT},
	} {
		learn := true // listening sockets learn from the first datagram of each client socket
		open := func(i int, port uint16) (server int) {
			must.OK(t, lab.Backends[i].Do(func() (err error) {
				if server, err = sys.BindUDP(at(family.endpoints[i], port), sys.UDPOptions{}); err == nil {
					sys.ReceiveTTL(server, family.endpoints[i].Is6())
				}
				return err
			}))
			t.Cleanup(func() { sys.Close(server) })
			return server
		}
		inbox := sys.NewInbox(1)
		visit := func(server int, rows [][2]int) {
			t.Helper()
			c := client(t, lab.Client, netip.AddrPortFrom(netip.MustParseAddr(family.vip), 53).String()).(*net.UDPConn)
			raw, err := c.SyscallConn()
			must.OK(t, err)
			for i, row := range rows {
				if e := raw.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), family.level, family.ttl, row[0]) }); e != nil || err != nil {
					t.Fatal(e, err)
				}
				must.OK(t, must.Err(c.Write([]byte("q"))))
				wait.True(t, "the datagram reaches the endpoint", func() bool {
					got, e := inbox.Receive(server, 0, 1)
					return e == 0 && got == 1
				})
				if _, _, _, got := inbox.Details(0); got != row[1] && (!learn || i > 0 || row[1] != last || got != first) {
					t.Errorf("%s, datagram %d: sent with TTL %d, the endpoint sees %d, want %d", family.vip, i, row[0], got, row[1])
				}
			}
		}
		server := open(0, 5300)
		n.apply(svc("dns", family.vip, nil, at(family.endpoints[0], 5300)))
		visit(server, [][2]int{{64, most}, {first, most}, {9, most}})
		at53, err := n.server.Listen(policy.Opening{
			Destination: service.Destination{Addr: family.endpoints[0]},
			Name:        service.PortName{Name: service.Name{Namespace: "test", Name: "dns"}, Protocol: service.UDP},
		})
		must.OK(t, err)
		if on, err := syscall.GetsockoptInt(at53.FD, family.level, family.learned); on != 0 || err != nil {
			t.Errorf("%s: the listening socket tells TTLs with no need: %d, %v", family.vip, on, err)
		}
		server = open(0, 30053)
		n.apply(svc("dns", family.vip, nil, at(family.endpoints[0], 30053)))
		for range 16 {
			visit(server, [][2]int{{64, first}, {first + 1, first}, {first, last}, {64, last}})
			visit(server, [][2]int{{first, last}, {first, last}, {64, last}})
		}
		learn = false
		// One endpoint is closed: the session that moves keeps its TTL.
		server = open(1, 30053)
		n.apply(svc("dns", family.vip, nil, at(family.endpoints[0], 30054), at(family.endpoints[1], 30053)))
		for range 4 {
			visit(server, [][2]int{{first, last}, {64, last}})
		}
	}
}
