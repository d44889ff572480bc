package datagram

import (
	"context"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// An unprivileged process of the same user can join no listening socket (SO_REUSEPORT).
// At a destination, where nothing of ours is bound, and where its reply sockets are, others
// may have sockets, and get nothing.
func TestSocketsCannotBeJoined(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	lab.Backends[0].EchoUDP(t, 5300)
	n.apply(svc("four", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	n.apply(svc("six", vip6, nil, at(lab.Backends[0].IPv6, 5300)))
	var all []netip.AddrPort
	for _, vip := range []string{vip4, vip6} {
		to := netip.MustParseAddr(vip)
		askWho(t, client(t, lab.Client, netip.AddrPortFrom(to, 53).String()))
		for _, a := range []netip.Addr{to, aside(to)} {
			var stranger int
			must.OKf(t, lab.Node.Do(func() error {
				var err error
				stranger, err = sys.BindUDP(netip.AddrPortFrom(a, 53), sys.UDPOptions{ReuseAddr: true, FreeBind: true})
				return err
			}), "another program cannot have %s", a)
			defer sys.Close(stranger)
			for range 20 {
				askWho(t, client(t, lab.Client, netip.AddrPortFrom(to, 53).String()))
			}
			var b [10]byte
			if n, e := sys.Recv(stranger, b[:]); e != sys.EAGAIN {
				t.Errorf("another program at %s got %d bytes, %v", a, n, e)
			}
		}
	}
	for _, a := range []netip.Addr{lab.Node.IPv4, lab.Node.IPv6} { // node ports
		must.OK(t, lab.Node.Do(func() error {
			return n.server.Bind(policy.Opening{Destination: service.Destination{Addr: a, Port: 30053, Protocol: service.UDP}, Action: policy.Accept})
		}))
	}
	for _, l := range n.server.listening {
		all = append(all, l.address)
	}
	for _, address := range all {
		for _, device := range []string{"", "lo", lab.Client.Name()} {
			lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
				var err error
				if e := c.Control(func(fd uintptr) {
					err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
					if err == nil {
						err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
					}
					if err == nil && device != "" {
						err = unix.BindToDevice(int(fd), device)
					}
				}); e != nil {
					return e
				}
				return err
			}}
			err := lab.Node.Do(func() error {
				joined, err := lc.ListenPacket(context.Background(), "udp", address.String())
				if err == nil {
					_ = joined.Close()
				}
				return err
			})
			if err == nil {
				t.Errorf("a stranger shares %s, device %q", address, device)
			}
		}
	}
}
