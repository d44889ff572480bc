package sockfilter

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// TestKernelAgreesWithTheModel: real sockets, clients with many addresses.
func TestKernelAgreesWithTheModel(t *testing.T) {
	for _, c := range []struct {
		name    string
		server  string
		clients []string
		allowed []netip.Prefix
	}{
		{"IPv4", "127.0.0.1", []string{"127.0.0.1", "127.0.0.2", "127.0.0.3", "127.1.0.0", "127.1.255.255", "127.2.0.0"},
			prefixes("127.0.0.2/32", "127.1.0.0/16")},
		{"IPv4 with 1,500 ranges", "127.0.0.1", []string{"127.0.0.1", "127.0.0.2", "127.3.0.1"},
			append(scattered(1500, false), prefixes("127.0.0.2/31", "200.0.0.0/5")...)},
		{"IPv6", "fd01::1", []string{"fd01::1", "fd01::2", "fd01:0:0:1::1", "fd02::1", "fd03:0:0:5::9"},
			prefixes("fd01::2/128", "fd02::/32", "fd03:0:0:4::/63")},
		{"IPv6 with 500 ranges", "fd01::1", []string{"fd01::1", "fd02::1"},
			append(scattered(500, true), prefixes("fd02::/32")...)},
	} {
		t.Run(c.name, func(t *testing.T) {
			ns := netns.New(t, "node")
			for _, a := range c.clients {
				if ip := netip.MustParseAddr(a); ip.Is6() {
					must.OK(t, ns.AddAddr("lo", netip.PrefixFrom(ip, 128)))
				}
			}
			at := netip.AddrPortFrom(netip.MustParseAddr(c.server), 8080)
			rules := []Rule{{at.Addr(), at.Port(), c.allowed}}
			program := must.Get(Compile(rules))(t)
			t.Logf("%d instructions", len(program))
			var fd int
			must.OK(t, ns.Do(func() (err error) {
				fd, err = sys.ListenTCP(at, sys.ListenOptions{Filter: program})
				return err
			}))
			defer sys.Close(fd)
			for _, a := range c.clients {
				from := netip.MustParseAddr(a)
				want := admits(rules, packet{from, at})
				wait := 300 * time.Millisecond
				if want {
					wait = 10 * time.Second
				}
				conn, err := ns.Dialer(&net.Dialer{Timeout: wait, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}, "tcp", at.String())
				if err == nil {
					_ = conn.Close()
				}
				var timeout net.Error
				if err != nil && !(errors.As(err, &timeout) && timeout.Timeout()) {
					t.Fatal(err)
				}
				if (err == nil) != want {
					t.Errorf("%s: %v, want admitted %t", a, err, want)
				}
			}
			// The same program once more, in its own place: there is room for both.
			check.Equalf(t, sys.AttachFilter(fd, slices.Clone(program)), 0, "replace")
		})
	}
}
