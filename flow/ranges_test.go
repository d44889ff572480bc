package flow

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// balanced gives a Service a load balancer IP, source ranges and policy Local.
func balanced(ip string, ranges ...string) func(*corev1.Service) {
	return func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		s.Spec.LoadBalancerSourceRanges = ranges
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: ip}}
	}
}

// onNode puts a change's endpoints on a node.
func onNode(name string, c service.Change) service.Change {
	for _, s := range c.EndpointSlices {
		for i := range s.Endpoints {
			s.Endpoints[i].NodeName = &name
		}
	}
	return c
}

const (
	balancer4 = "192.0.2.20"
	balancer6 = "2001:db8::20"
)

// isDropped reports whether a client's SYN to an address gets no answer.
func (n *node) isDropped(to string) bool {
	n.t.Helper()
	d := &net.Dialer{Timeout: 50 * time.Millisecond}
	c, err := n.lab.Client.Dialer(d, "tcp", to)
	if err == nil {
		_ = c.Close()
		return false
	}
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

// TestSourceRangesAreTheTables: the table serves clients that source ranges admit, and drops what
// others send (A3.10), for both families, by each Service's own ranges, and while no process runs. A
// Service that goes leaves shared ranges to others.
func TestSourceRangesAreTheTables(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	outside := []netip.Prefix{netip.MustParsePrefix("10.77.0.0/16"), netip.MustParsePrefix("fd00:77::/48")}
	n := newNode(t, lab, pinned)
	n.config.ClusterCIDRs = outside
	own4, own6 := lab.Client.IPv4.String()+"/32", lab.Client.IPv6.String()+"/128"
	many := []string{"198.51.100.0/24", own4}
	for i := range 300 {
		many = append(many, fmt.Sprintf("203.0.%d.%d/32", i/256, i%256))
	}
	b4, b6 := at(lab.Backends[0].IPv4, 8080), at(lab.Backends[0].IPv6, 8080)
	apply := func(n *node) {
		n.apply(onNode("node", svc(vip4, balanced(balancer4, own4), b4)))
		n.apply(named("six", onNode("node", svc(vip6, balanced(balancer6, own6, own4), b6))))
		n.apply(named("many", onNode("node", svc("10.96.0.91", balanced("192.0.2.91", many...), b4))))
		n.apply(named("twin", onNode("node", svc("10.96.0.92", balanced("192.0.2.92", own4), b4))))
		n.apply(named("others", onNode("node", svc("10.96.0.93", balanced("192.0.2.93", "198.51.100.0/24"), b4))))
		n.apply(named("others6", onNode("node", svc("fd00:96::94", balanced("2001:db8::94", "2001:db8:1::/64"), b6))))
		n.apply(named("hidden", onNode("node", svc("10.96.0.95", func(s *corev1.Service) {
			balanced("192.0.2.95", "198.51.100.0/24")(s)
			s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
		}, b4))))
	}
	admit := []string{balancer4 + ":80", "[" + balancer6 + "]:80", "192.0.2.91:80", "192.0.2.92:80"}
	refuse := []string{"192.0.2.93:80", "[2001:db8::94]:80", "192.0.2.95:80"}
	visit := func(n *node, what string) {
		t.Helper()
		for _, to := range admit {
			if said, err := lab.Client.Ask("tcp", to); err != nil || said != "b1:8080" {
				t.Errorf("%s: %s: %q, %v", what, to, said, err)
			}
		}
		for _, to := range refuse {
			if !n.isDropped(to) {
				t.Errorf("%s: %s answers", what, to)
			}
		}
	}
	apply(n)
	before := n.server.Stats().NotAdmitted
	n.expectDecided("source ranges", uint64(len(admit)), 0, func() { visit(n, "a process") })
	if got := n.server.Stats().NotAdmitted - before; got < uint64(len(refuse)) {
		t.Errorf("%d SYNs were not admitted, want %d", got, len(refuse))
	}
	n.apply(service.Change{Deleted: []service.ObjectKey{{Kind: service.KindService, Name: service.Name{Namespace: "test", Name: "twin"}}}})
	admit = admit[:3]
	n.expectDecided("without the twin", uint64(len(admit)), 0, func() { visit(n, "without the twin") })
	n.leave()
	visit(n, "no process")
	next := newNode(t, lab, func(o *Options) { pinned(o); o.Keep = false })
	next.config.ClusterCIDRs = outside
	apply(next)
	admit = append(admit, "192.0.2.92:80")
	next.expectDecided("the next process", uint64(len(admit)), 0, func() { visit(next, "the next process") })
	next.apply(onNode("node", svc(vip4, balanced(balancer4, "198.51.100.0/24"), b4)))
	wait.True(t, "other ranges", func() bool { return next.isDropped(balancer4 + ":80") })
}

// TestSourceRangesWithoutRoom: where the kernel's map of source ranges is full, userspace is asked.
func TestSourceRangesWithoutRoom(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.config.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.77.0.0/16")} // the client is no pod
	n.apply(svc(vip4, nil))                                                       // the first one removes what nobody uses
	ranges := n.server.kernel.Maps.Ranges
	keys, values := make([]bpf.KernelRange, ranges.MaxEntries()), make([]uint32, ranges.MaxEntries())
	for i := range keys {
		keys[i] = bpf.RangeOf(bpf.KernelSet{Half: [2]uint32{2, uint32(i)}}, netip.MustParsePrefix("198.51.100.0/24"))
	}
	must.OK(t, must.Err(ranges.BatchUpdate(keys, values, nil)))
	b1 := at(lab.Backends[0].IPv4, 8080)
	n.apply(onNode("node", svc(vip4, balanced(balancer4, lab.Client.IPv4.String()+"/32"), b1)))
	n.apply(named("others", onNode("node", svc("10.96.0.93", balanced("192.0.2.93", "198.51.100.0/24"), b1))))
	n.expectDecided("admitted", 0, 1, func() {
		check.Equal(t, must.Get(lab.Client.Ask("tcp", balancer4+":80"))(t), "b1:8080")
	})
	n.expectDecided("not admitted", 0, 1, func() {
		if !n.isDropped("192.0.2.93:80") {
			t.Error("it answers")
		}
	})
}
