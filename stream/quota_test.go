package stream

import (
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
	"github.com/sluice-proxy/sluice/test/wait"
)

// twoPorts gives a service of web with another port, 81.
func twoPorts(name, clusterIP string, endpoints ...netip.AddrPort) service.Change {
	c := web(name, clusterIP, endpoints...)
	ports := &c.Services[0].Spec.Ports
	(*ports)[0].Name = "a"
	*ports = append(*ports, corev1.ServicePort{Name: "b", Port: 81, Protocol: corev1.ProtocolTCP})
	for _, s := range c.EndpointSlices {
		a, b := "a", "b"
		second := s.Ports[0]
		s.Ports[0].Name, second.Name = &a, &b
		s.Ports = append(s.Ports, second)
	}
	return c
}

// in puts a change of web into another namespace.
func in(namespace string, c service.Change) service.Change {
	c.Services[0].Namespace = namespace
	for _, s := range c.EndpointSlices {
		s.Namespace = namespace
	}
	return c
}

// rush connects n times at once and counts the connections that ended.
func (n *node) rush(count int, addresses ...string) (ended *atomic.Int64) {
	ended = new(atomic.Int64)
	for i := range count {
		c, err := n.lab.Client.Dial("tcp", addresses[i%len(addresses)])
		if err != nil {
			ended.Add(1) // it was reset at once
			continue
		}
		n.t.Cleanup(func() { _ = c.Close() })
		go func() {
			_, _ = c.Read(make([]byte, 1))
			ended.Add(1)
		}()
	}
	return ended
}

// A Service has never more connections that wait for an endpoint than the limit
// says, whatever its ports.
func TestDialingLimitIsExact(t *testing.T) {
	netns.Require(t)
	const limit = 10
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) {
		o.MaxServiceDialing = limit
		o.Balancer.Plan = balancer.Plan{Timeouts: []time.Duration{time.Second}, Total: time.Second}
	})
	n.apply(twoPorts("dead", "10.96.0.1", n.silent()))
	n.apply(web("well", "10.96.0.2", n.echo(0, 8080)))
	ended := n.rush(120, "10.96.0.1:80", "10.96.0.1:81")
	most := int64(0)
	wait.True(t, "as many wait for an endpoint as may, and some were given up", func() bool {
		most = max(most, n.server.Stats().Dialing)
		return ended.Load() > limit && most >= limit
	})
	if most > limit {
		t.Errorf("%d connections wait for an endpoint, want %d", most, limit)
	}
	name(t, n.dial("10.96.0.2:80"))
}

// Where Services share a listening socket, one that is at its limit does not
// stop the others: its connections beyond the limit are reset.
func TestDialingLimitStopsNoOtherServiceOfTheSocket(t *testing.T) {
	netns.Require(t)
	const limit, all = 4, 40
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) {
		o.MaxServiceDialing, o.MaxListeners = limit, 1
	})
	n.apply(web("dead", "10.96.0.1", n.silent()))
	n.apply(web("well", "10.96.0.2", n.echo(0, 8080)))
	ended := n.rush(all, "10.96.0.1:80")
	name(t, n.dial("10.96.0.2:80"))
	wait.True(t, "all but those that wait are reset", func() bool { return ended.Load() == all-limit })
	check.Equalf(t, n.server.Stats().Dialing, limit, "connections wait for an endpoint")
	n.stop()
	check.Equalf(t, n.records.Ends()[conntrack.LimitReached], all-limit, "records end with limit")
}

// The limit of a Service counts all its ports, and those that were deleted and
// made anew.
func TestServiceLimitCountsAllPorts(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) { o.MaxServiceConnections = 4 })
	ep := n.echo(0, 8080)
	n.apply(twoPorts("web", "10.96.0.1", ep))
	n.apply(web("other", "10.96.0.2", ep))
	var held []*net.TCPConn
	for _, address := range []string{"10.96.0.1:80", "10.96.0.1:81", "10.96.0.1:81", "10.96.0.1:80"} {
		c := n.dial(address)
		name(t, c)
		held = append(held, c)
	}
	wantReset(t, n.lab.Client, "10.96.0.1:80")
	wantReset(t, n.lab.Client, "10.96.0.1:81")
	n.apply(objects.Gone("web", 1))
	n.apply(twoPorts("web", "10.96.0.1", ep))
	wantReset(t, n.lab.Client, "10.96.0.1:80")
	name(t, n.dial("10.96.0.2:80"))
	for _, c := range held {
		_ = c.Close()
	}
	wait.True(t, "the places are free", func() bool { return n.server.Stats().Open == 1 })
	name(t, n.dial("10.96.0.1:81"))
	n.apply(objects.Gone("web", 1))
	n.apply(objects.Gone("other", 1))
	n.stop()
	n.server.quotas.sweep()
	if q := &n.server.quotas; len(q.services)+len(q.namespaces)+len(q.removed) > 0 {
		t.Errorf("%d Services and %d namespaces are still counted", len(q.services), len(q.namespaces))
	}
}

// The limit of a namespace counts all its Services, and no other namespace's.
func TestNamespaceLimitResetsAndIsRecorded(t *testing.T) {
	netns.Require(t)
	for _, family := range []struct{ a, b, other string }{
		{"10.96.0.1", "10.96.0.2", "10.96.0.3"},
		{"fd00:96::1", "fd00:96::2", "fd00:96::3"},
	} {
		n := newNode(t, netns.NewLab(t, 1), func(o *setup) { o.MaxNamespaceConnections = 4 })
		ep := n.echo(0, 8080)
		if netip.MustParseAddr(family.a).Is6() {
			ep = netip.AddrPortFrom(n.lab.Backends[0].IPv6, 8080)
		}
		n.apply(web("a", family.a, ep))
		n.apply(web("b", family.b, ep))
		n.apply(in("neighbours", web("a", family.other, ep)))
		at := func(address string) string { return net.JoinHostPort(address, "80") }
		for range 2 {
			name(t, n.dial(at(family.a)))
			name(t, n.dial(at(family.b)))
		}
		wantReset(t, n.lab.Client, at(family.a))
		wantReset(t, n.lab.Client, at(family.b))
		for range 4 {
			name(t, n.dial(at(family.other)))
		}
		n.stop()
		n.records.Ended(t, map[conntrack.End]int{conntrack.NamespaceLimit: 2, conntrack.LimitReached: 0})
	}
}

// A Service that goes while its connections wait for a place takes nothing with
// it: they end, and other Services are served.
func TestServiceGoesWhileItsConnectionsWait(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) {
		o.MaxServiceDialing = 2
	})
	n.apply(web("well", "10.96.0.2", n.echo(0, 8080)))
	backend, dead := n.lab.Backends[0], netip.PrefixFrom(n.silent().Addr(), 32)
	for range 3 {
		n.apply(web("dead", "10.96.0.1", n.silent()))
		ended := n.rush(8, "10.96.0.1:80")
		wait.True(t, "as many as may wait for the endpoint", func() bool { return n.server.Stats().Dialing == 2 })
		n.apply(objects.Gone("dead", 1))
		n.pass()
		// The endpoint refuses now: what waits for it would go on.
		must.OK(t, backend.AddAddr("eth0", dead))
		wait.True(t, "all have ended", func() bool { return ended.Load() == 8 && n.server.Stats().Open == 0 })
		c := n.dial("10.96.0.2:80")
		name(t, c)
		_ = c.Close()
		wait.True(t, "nothing is open", func() bool { return n.server.Stats().Open == 0 })
		link, err := backend.Netlink().LinkByName("eth0")
		if err == nil {
			err = backend.Netlink().AddrDel(link, &netlink.Addr{IPNet: &net.IPNet{IP: dead.Addr().AsSlice(), Mask: net.CIDRMask(32, 32)}})
		}
		must.OK(t, err)
	}
}
