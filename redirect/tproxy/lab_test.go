package tproxy

import (
	"os"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

var tcp, udp, sctp = steering.TCP, steering.UDP, steering.SCTP

// newRedirector makes one inside the node, closed at the end of the test.
func newRedirector(t testing.TB, node *netns.Host, opts Options) *Redirector {
	t.Helper()
	opts.Routes.NetNS = node.FD()
	r := must.Get(New(opts))(t)
	t.Cleanup(func() { check.OKf(t, r.Close(), "close") })
	return r
}

func apply(t testing.TB, r *Redirector, p redirect.Plan) {
	t.Helper()
	must.OK(t, r.Apply(p))
}

// askUDP sends a datagram and gives "refused" or what else came.
func askUDP(t testing.TB, from *netns.Host, to string) string {
	t.Helper()
	c, err := from.Dial("udp", to)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	return exchangeUDP(c)
}
