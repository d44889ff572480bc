package drops

import (
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestDropped: a handshake that a rule of the node drops, on its way or on the way back, is told from
// one with a host that is silent, and from one of another namespace.
func TestDropped(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIP-NEEDS: root, to make network namespaces")
	}
	lab := netns.NewLab(t, 1)
	silent := lab.Backends[0]
	silent.NFT(t, "table inet rules {\n chain in { type filter hook input priority 0; tcp dport 7000 drop; }\n}")
	silent.EchoTCP(t, 7002)
	lab.Node.NFT(t, "table inet rules {\n chain out { type filter hook output priority 0; tcp dport 7001 drop; }\n"+
		" chain in { type filter hook input priority 0; tcp sport 7002 drop; }\n chain forward { type filter hook forward priority 0; tcp dport 7003 drop; }\n}")
	var w *Watch
	must.OK(t, lab.Node.Do(func() error {
		w = New(func(err error) { t.Error(err) })
		return nil
	}))
	t.Cleanup(w.Close)

	for _, c := range []struct {
		name string
		from *netns.Host
		ip   netip.Addr
		port uint16
		want bool
	}{
		{"out", lab.Node, silent.IPv4, 7001, true},
		{"out, IPv6", lab.Node, silent.IPv6, 7001, true},
		{"answer", lab.Node, silent.IPv4, 7002, true},
		{"forwarded", lab.Client, silent.IPv4, 7003, true},
		{"silent", lab.Node, silent.IPv4, 7000, false},
	} {
		to := netip.AddrPortFrom(c.ip, c.port)
		try := func() error {
			return c.from.Do(func() error {
				conn, err := net.DialTimeout("tcp", to.String(), 100*time.Millisecond)
				if err == nil {
					_ = conn.Close()
				}
				return nil
			})
		}
		// The first question begins the Watch.
		if c.want {
			wait.True(t, c.name+": the drop is known", func() bool {
				must.OK(t, try())
				return w.Dropped(to, 0)
			})
		} else if must.OK(t, try()); w.Dropped(to, 0) {
			t.Errorf("%s: a rule is said to drop it", c.name)
		}
		if w.Dropped(to, sys.Monotonic()) {
			t.Errorf("%s: said of an attempt that begins later", c.name)
		}
	}
}
