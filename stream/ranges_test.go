package stream

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
)

// balanced gives a service of web a load balancer IP with source ranges.
func balanced(c service.Change, ip string, ranges ...string) service.Change {
	s := c.Services[0]
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	s.Spec.LoadBalancerSourceRanges = ranges
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: ip}}
	return c
}

// Rule A3.10: who is not in the source ranges meets silence, on steered sockets and on
// bound ports, with connections going on through each change of the ranges.
func TestA310_SourceRangesSilenceOthers(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 2)
	onNode := netip.MustParseAddr("192.0.2.1")
	must.OK(t, lab.Node.AddAddr("lo", netip.PrefixFrom(onNode, 32)))
	options, log := onAddresses(lab, onNode)
	n := newNode(t, lab, func(o *setup) {
		options(o)
		o.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
		o.MaxListeners = 1 // both services share their listening socket
	})
	ep := n.echo(0, 8080)
	client, other := lab.Client, lab.Backends[1]
	for _, c := range []struct{ what, vip string }{{"a steered socket", "10.96.200.1"}, {"a bound port", "192.0.2.1"}} {
		t.Run(c.what, func(t *testing.T) {
			n.t = t
			at := c.vip + ":80"
			n.apply(web("free", "10.96.0.2", ep))
			n.apply(balanced(web("web", "10.96.0.1", ep), c.vip, "10.1.0.0/24"))
			open := n.dial(at)
			name(t, open)
			n.want(client, at, "b1:8080")
			n.want(other, at, "silence")
			n.want(other, "10.96.0.1:80", "b1:8080")
			n.want(other, "10.96.0.2:80", "b1:8080")

			n.apply(balanced(web("web", "10.96.0.1", ep), c.vip, "10.2.2.0/24"))
			n.want(client, at, "silence")
			n.want(other, at, "b1:8080")
			check.OK(t, must.Err(open.Write([]byte("x"))))
			check.OKf(t, must.Err(open.Read(make([]byte, 1))), "the connection from before")

			n.apply(balanced(web("web", "10.96.0.1", ep), c.vip))
			n.want(client, at, "b1:8080")
			n.want(other, at, "b1:8080")
			n.apply(objects.Gone("web", 1))
		})
	}
	n.t = t
	_, all := n.table.Totals()
	if got := n.server.Stats(); all.Ended[conntrack.NotAdmitted] != 0 || got.Unguarded != 0 {
		t.Errorf("%d not admitted after accept, %d without a filter", all.Ended[conntrack.NotAdmitted], got.Unguarded)
	}
	if lines := log.lines("source ranges"); len(lines) != 0 {
		t.Errorf("log: %q", lines)
	}
}

// With more ranges than the kernel takes, who may not come in is reset and
// recorded.
func TestA310_TooManySourceRangesReset(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	options, log := onAddresses(lab)
	n := newNode(t, lab, func(o *setup) {
		options(o)
		o.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	})
	ranges := []string{"10.1.0.0/24"}
	for i := range 3000 {
		ranges = append(ranges, fmt.Sprintf("20.%d.%d.1/32", i/256, i%256))
	}
	n.apply(balanced(web("web", "10.96.0.1", n.echo(0, 8080)), "10.96.200.1", ranges...))
	n.apply(balanced(web("few", "10.96.0.3", n.echo(0, 8081)), "10.96.200.3", ranges[:100]...))
	n.want(lab.Client, "10.96.200.1:80", "b1:8080")
	n.want(lab.Backends[0], "10.96.200.1:80", "reset")
	n.want(lab.Backends[0], "10.96.200.3:80", "silence")
	lines := log.lines("source ranges")
	if len(lines) != 1 || !strings.Contains(lines[0], "Service test/web") {
		t.Errorf("log: %q", lines)
	}
	check.Equalf(t, n.server.Stats().Unguarded, 1, "how many without a filter")
	n.apply(objects.Gone("web", 1))
	check.Equalf(t, n.server.Stats().Unguarded, 0, "how many without a filter when the service is gone")
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.NotAdmitted: 1})
}
