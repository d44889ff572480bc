package stream

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The endpoint gets the DSCP that the client set, without the bits of ECN.
func TestEndpointGetsTheClientsDSCP(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	for _, family := range []struct {
		vip           string
		endpoint      netip.Addr
		level, option int
	}{
		{"10.96.0.1", lab.Backends[0].IPv4, syscall.IPPROTO_IP, syscall.IP_TOS},
		{"fd00:96::1", lab.Backends[0].IPv6, syscall.IPPROTO_IPV6, syscall.IPV6_TCLASS},
	} {
		at := netip.AddrPortFrom(family.endpoint, 8080)
		var server int
		must.OK(t, lab.Backends[0].Do(func() (err error) {
			server, err = sys.ListenTCP(at, sys.ListenOptions{})
			return err
		}))
		defer sys.Close(server)
		n.apply(web("web", family.vip, at))
		for sent, want := range map[int]uint8{0: 0, 0xb8: 0xb8, 0x28: 0x28} {
			d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
				var err error
				if e := c.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), family.level, family.option, sent) }); e != nil {
					return e
				}
				return err
			}}
			c := must.Get(lab.Client.Dialer(&d, "tcp", net.JoinHostPort(family.vip, "80")))(t)
			must.OK(t, must.Err(c.Write([]byte{byte(sent)})))
			fd := -1
			wait.True(t, "the connection reaches the endpoint", func() bool {
				var e sys.Errno
				if fd < 0 {
					if fd, _, e = sys.Accept(server); e != 0 {
						fd = -1
						return false
					}
				}
				var b [1]byte
				n, err := syscall.Read(fd, b[:])
				if n != 1 && !errors.Is(err, syscall.EAGAIN) || n == 1 && b[0] != byte(sent) {
					sys.Close(fd) // an attempt that was given up, perhaps for the connection before
					fd = -1
				}
				return fd >= 0 && n == 1
			})
			check.Equalf(t, sys.ClientClass(fd, family.endpoint.Is6()), want, "%s: sent with traffic class %#x, the endpoint sees", family.vip, sent)
			sys.Close(fd)
			_ = c.Close()
		}
	}
}
