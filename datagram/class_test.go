package datagram

import (
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The endpoint receives the DSCP of each client datagram, even if it changes within a
// session.
func TestEndpointGetsTheClientsDSCP(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	for _, family := range []struct {
		vip           string
		endpoint      netip.Addr
		level, option int
	}{
		{vip4, lab.Backends[0].IPv4, syscall.IPPROTO_IP, syscall.IP_TOS},
		{vip6, lab.Backends[0].IPv6, syscall.IPPROTO_IPV6, syscall.IPV6_TCLASS},
	} {
		to := at(family.endpoint, 5300)
		var server int
		must.OK(t, lab.Backends[0].Do(func() (err error) {
			server, err = sys.BindUDP(to, sys.UDPOptions{Class: true})
			return err
		}))
		defer sys.Close(server)
		n.apply(svc("dns", family.vip, nil, to))
		inbox := sys.NewInbox(1)
		for range 2 { // the second client may get a reused socket to the endpoint
			c := client(t, lab.Client, netip.AddrPortFrom(netip.MustParseAddr(family.vip), 53).String()).(*net.UDPConn)
			raw, err := c.SyscallConn()
			must.OK(t, err)
			for _, sent := range []int{0, 0xb8, 0xb8, 0x28, 0} {
				if e := raw.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), family.level, family.option, sent) }); e != nil || err != nil {
					t.Fatal(e, err)
				}
				must.OK(t, must.Err(c.Write([]byte("q"))))
				wait.True(t, "the datagram reaches the endpoint", func() bool {
					got, e := inbox.Receive(server, 0, 1)
					return e == 0 && got == 1
				})
				if _, _, got, _ := inbox.Details(0); int(got) != sent {
					t.Errorf("%s: sent with traffic class %#x, the endpoint sees %#x", family.vip, sent, got)
				}
			}
		}
	}
}
