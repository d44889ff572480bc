package tproxy

import (
	"net/netip"
	"os"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

func tcp(s string) service.Destination  { return destination(s, service.TCP) }
func udp(s string) service.Destination  { return destination(s, service.UDP) }
func sctp(s string) service.Destination { return destination(s, service.SCTP) }

func destination(s string, p service.Protocol) service.Destination {
	ap := netip.MustParseAddrPort(s)
	return service.Destination{Addr: ap.Addr(), Port: ap.Port(), Protocol: p}
}

// planOf makes a plan with the usual service ranges.
func planOf(parts ...any) redirect.Plan {
	p := redirect.Plan{
		Local: redirect.LocalOf(netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd01::/112")),
	}
	for _, part := range parts {
		part.(func(*redirect.Plan))(&p)
	}
	return p
}

// steerTo adds destinations to a plan and makes their addresses cluster IPs.
func steerTo(f *steering.Front, ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Steer = p.Steer.With(d, f.Target(d))
			p.ClusterIPs = p.ClusterIPs.With(d.Addr, struct{}{})
		}
	}
}

func refusing(ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Refuse = p.Refuse.With(d, struct{}{})
			p.ClusterIPs = p.ClusterIPs.With(d.Addr, struct{}{})
		}
	}
}

func silencing(ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Silent = p.Silent.With(d, struct{}{})
			p.ClusterIPs = p.ClusterIPs.With(d.Addr, struct{}{})
		}
	}
}

// newRedirector makes one inside the node, closed at the end of the test.
func newRedirector(t testing.TB, node *netns.Host, opts Options) *Redirector {
	t.Helper()
	opts.Routes.NetNS = node.FD()
	r, err := New(opts)
	must.OK(t, err)
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
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
