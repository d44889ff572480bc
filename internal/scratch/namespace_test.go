package scratch

import (
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// TestWires connects over both kinds of wires, to an address beside the peer and to
// one behind it.
func TestWires(t *testing.T) {
	netns.Require(t)
	near, far := netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("198.51.100.1")
	for name, wire := range map[string]func(*Namespace, string, *Namespace, string) error{"plain": (*Namespace).Wire, "quiet": (*Namespace).WireQuietly} {
		var spaces [2]*Namespace
		for i, name := range []string{"here", "there"} {
			n := must.Get(New(name))(t)
			defer n.Close()
			spaces[i] = n
		}
		here, there := spaces[0], spaces[1]
		for _, err := range []error{
			wire(here, "cable", there, "eth0"),
			here.AddAddresses("cable", netip.PrefixFrom(near.Prev(), 24)),
			there.AddAddresses("eth0", netip.PrefixFrom(near, 24)),
			there.AddAddresses("lo", netip.PrefixFrom(far, 32)),
			here.AddRoute(netip.PrefixFrom(far, 24).Masked(), near),
			there.AddLinkRoute(netip.MustParsePrefix("203.0.113.0/24"), "eth0"),
		} {
			must.OKf(t, err, "%s", name)
		}
		var l net.Listener
		must.OK(t, there.Do(func() (err error) {
			l, err = net.Listen("tcp4", ":0")
			return err
		}))
		defer l.Close()
		for _, to := range []netip.Addr{near, far} {
			at := netip.AddrPortFrom(to, uint16(l.Addr().(*net.TCPAddr).Port)).String()
			if err := here.Do(func() error {
				c, err := net.DialTimeout("tcp", at, 10*time.Second)
				if err == nil {
					err = c.Close()
				}
				return err
			}); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := here.AddRoute(netip.MustParsePrefix("203.0.113.0/24"), far); err == nil {
			t.Errorf("%s: a route by a router that is not beside", name)
		}
	}
}
