package flow

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
	"github.com/sluice-proxy/sluice/test/usrsctp"
	"github.com/sluice-proxy/sluice/test/wait"
)

// diameter is a Service's SCTP port.
const diameter = 3868

// sctpService gives a Service with an SCTP port.
func sctpService(clusterIP string, endpoints ...netip.AddrPort) service.Change {
	return objects.Service("aaa", clusterIP, []corev1.ServicePort{{Name: "sctp", Port: diameter, Protocol: corev1.ProtocolSCTP}}, 4, endpoints...)
}

func call(vip string) usrsctp.Call {
	return usrsctp.Call{To: netip.AddrPortFrom(netip.MustParseAddr(vip), diameter), Messages: 10, Size: 5000}
}

// serveSCTP starts a server at ports of both addresses of a host.
func serveSCTP(t *testing.T, h *netns.Host, ports ...uint16) *usrsctp.Peer {
	t.Helper()
	var all []usrsctp.Listener
	for _, p := range ports {
		all = append(all, usrsctp.Listener{Port: p, At: []netip.Addr{h.IPv4}}, usrsctp.Listener{Port: p, At: []netip.Addr{h.IPv6}})
	}
	return usrsctp.Serve(t, h, all...)
}

// wait waits for so many records of a node, in the order of their end.
func (n *node) wait(t *testing.T, count int) []conntrack.Record {
	t.Helper()
	wait.Equal(t, "records", patience, count, func() int { return len(n.taken()) })
	return n.taken()
}

// An association passes the kernel: messages of several packets arrive whole, on their
// streams, and the endpoint sees the client. Target ports are the Service's, or others, so
// that the CRC has to change.
func TestAssociationPassesTheKernel(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	b := lab.Backends[0]
	count := 0
	serveSCTP(t, b, diameter, 13868)
	for _, c := range []struct {
		vip      string
		client   netip.Addr
		endpoint netip.AddrPort
	}{
		{vip4, lab.Client.IPv4, at(b.IPv4, diameter)},
		{vip4, lab.Client.IPv4, at(b.IPv4, 13868)},
		{vip6, lab.Client.IPv6, at(b.IPv6, diameter)},
		{vip6, lab.Client.IPv6, at(b.IPv6, 13868)},
	} {
		t.Run(c.endpoint.String(), func(t *testing.T) {
			n.apply(sctpService(c.vip, c.endpoint))
			who := call(c.vip)
			who.From = []netip.Addr{c.client}
			a := must.Get(who.Do(t, lab.Client))(t)
			if a.Server != "b1" || a.Client.Addr() != c.client {
				t.Errorf("%+v", a)
			}
			count++
			r := n.wait(t, count)[count-1]
			if r.Protocol != service.SCTP || r.Path != conntrack.Kernel || r.End != conntrack.ClientShutdown || !r.Connected || r.Attempts != 1 ||
				r.Source != policy.SourceClient || r.Endpoint.Addr != c.endpoint || r.ConnectTime <= 0 || r.FirstByte < r.ConnectTime || r.StreamsFromClient != 10 || r.StreamsToClient != 10 {
				t.Errorf("%+v", r)
			}
			// "who?" and ten messages; loss is not to be expected here.
			if r.DatagramsFromClient != 11 || r.BytesFromClient != 4+10*5000 || r.DatagramsFromEndpoint != 11 || r.BytesFromEndpoint < 10*5000 {
				t.Errorf("%d messages, %d bytes from the client, %d, %d from the endpoint", r.DatagramsFromClient, r.BytesFromClient, r.DatagramsFromEndpoint, r.BytesFromEndpoint)
			}
		})
	}
}

// An endpoint that answers with an ABORT, with an ICMP error, or not at all, costs a moment.
func TestDeadEndpointOfAnAssociationIsRetried(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 3)
	aborts, icmp, serves := lab.Backends[0], lab.Backends[1], lab.Backends[2]
	serveSCTP(t, aborts, 1) // another port
	serveSCTP(t, serves, 13868)
	silent := nobodyAt(t, lab, aborts)
	for _, c := range []struct {
		name   string
		vip    string
		dead   netip.Addr
		reason conntrack.DialError
	}{
		{"ABORT", vip4, aborts.IPv4, conntrack.DialRefused},
		{"ICMP", vip4, icmp.IPv4, conntrack.DialUnreachable}, // its kernel has no SCTP
		{"silence", vip4, silent, conntrack.DialTimeout},
		{"ABORT, IPv6", vip6, aborts.IPv6, conntrack.DialRefused},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t, lab, nil)
			if c.reason == conntrack.DialTimeout {
				n.relay.options.Plan = hasty
			}
			serving := serves.IPv4
			if c.vip == vip6 {
				serving = serves.IPv6
			}
			n.apply(sctpService(c.vip, at(c.dead, 13868), at(serving, 13868)))
			for i := range 3 {
				began := time.Now()
				a, err := call(c.vip).Do(t, lab.Client)
				if err != nil || a.Server != "b3" {
					t.Fatalf("%+v, %v", a, err)
				}
				t.Logf("association %d took %s", i, time.Since(began))
			}
			retried := 0
			for _, r := range n.wait(t, 3) {
				for _, f := range r.Failed {
					retried++
					if f.Error != c.reason || f.Endpoint.Addr.Addr() != c.dead {
						t.Errorf("%+v", f)
					}
				}
			}
			if retried == 0 {
				t.Error("no association met the dead endpoint")
			}
			n.finish()
		})
	}
}

// If no endpoint is left, the client gets an ABORT.
func TestAllEndpointsOfAnAssociationDead(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	serveSCTP(t, lab.Backends[0], 1)
	n := newNode(t, lab, nil)
	const total = 8 * time.Second // less than the client waits
	n.relay.options.Plan = balancer.Plan{Timeouts: []time.Duration{total}, After: total, Total: total}
	n.apply(sctpService(vip4, at(lab.Backends[0].IPv4, 13868)))
	_, err := call(vip4).Do(t, lab.Client)
	if err == nil || errors.Is(err, usrsctp.ErrSilent) {
		t.Errorf("the client was not told that no endpoint is left: %v", err)
	}
	t.Log(err)
	if r := n.wait(t, 1)[0]; r.End != conntrack.ConnectFailed || len(r.Failed) < 2 {
		t.Errorf("%+v", r)
	}
}

// Hidden clients have the node's address and another port, also those that are their own
// endpoint's host.
func TestHiddenClientOfAnAssociation(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	serveSCTP(t, b, 13868)
	n := newNode(t, lab, nil)
	n.config.MasqueradeAll = true
	for _, c := range []struct {
		vip            string
		endpoint, node netip.Addr
	}{{vip4, b.IPv4, netip.MustParseAddr("10.2.1.1")}, {vip6, b.IPv6, netip.MustParseAddr("fd00:2:1::1")}} {
		n.apply(sctpService(c.vip, at(c.endpoint, 13868)))
		a := must.Get(call(c.vip).Do(t, lab.Client))(t)
		if a.Client.Addr() != c.node || a.Client.Port() < bpf.FirstPort || a.Client.Port() > bpf.LastPort {
			t.Errorf("the endpoint saw %s", a.Client)
		}
	}
}

// One port towards two Services of one endpoint: one of them gets another port between the
// hooks.
func TestOnePortOfTwoAssociations(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	serveSCTP(t, b, 13868)
	n := newNode(t, lab, nil)
	n.apply(sctpService(vip4, at(b.IPv4, 13868)))
	first := call(vip4)
	first.Port, first.How, first.From = 45678, "wait", []netip.Addr{lab.Client.IPv4}
	p := first.Connect(t, lab.Client)
	one := must.Get(p.Answered())(t)
	// The flow of another Service has the way back. A host has one peer, so that the
	// second association is not the client's own: a process that ended has left it.
	p.Kill()
	n.apply(named("other", sctpService("10.96.0.11", at(b.IPv4, 13868))))
	second := call("10.96.0.11")
	second.Port, second.From = first.Port, first.From
	two := must.Get(second.Do(t, lab.Client))(t)
	if one.Client.Port() != 45678 || two.Client.Port() == 45678 {
		t.Errorf("the endpoint saw %s and %s", one.Client, two.Client)
	}
}

// A client that comes back with its port, and whose endpoint has left the Service, reaches another
// one by its second INIT.
func TestClientOfAnAssociationComesBack(t *testing.T) {
	t.Parallel()
	for _, hidden := range []bool{false, true} {
		lab := netns.NewLab(t, 2)
		for _, b := range lab.Backends {
			serveSCTP(t, b, 13868)
		}
		n := newNode(t, lab, nil)
		n.config.MasqueradeAll = hidden
		n.apply(sctpService(vip4, at(lab.Backends[0].IPv4, 13868)))
		c := call(vip4)
		c.Port, c.How, c.From = 45678, "wait", []netip.Addr{lab.Client.IPv4}
		p := c.Connect(t, lab.Client)
		must.OK(t, must.Err(p.Answered()))
		p.Kill()
		n.silence(0)
		n.apply(sctpService(vip4, at(lab.Backends[1].IPv4, 13868)))
		c.How = "close"
		a, err := c.Do(t, lab.Client)
		if err != nil || a.Server != "b2" {
			t.Fatalf("hidden %v: %+v, %v", hidden, a, err)
		}
		if r := n.wait(t, 2); r[0].End != conntrack.ClientAbort || r[1].End != conntrack.ClientShutdown {
			t.Errorf("hidden %v: %+v", hidden, r)
		}
		n.finish()
	}
}

// A host with several addresses lists them. The endpoint would use them past the node, so
// that it must not learn them.
func TestClientWithSeveralAddresses(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	second := netip.MustParseAddr("10.1.0.77")
	must.OK(t, lab.Client.AddAddr("eth0", netip.PrefixFrom(second, 24)))
	serveSCTP(t, b, diameter, 13868)
	for _, port := range []uint16{diameter, 13868} {
		n := newNode(t, lab, nil)
		n.apply(sctpService(vip4, at(b.IPv4, port)))
		c := call(vip4)
		c.How, c.From = "wait", []netip.Addr{lab.Client.IPv4, second}
		p := c.Connect(t, lab.Client)
		a := must.Get(p.Answered())(t)
		if a.ClientAddresses != 1 || a.Client.Addr() != lab.Client.IPv4 && a.Client.Addr() != second {
			t.Errorf("port %d: the endpoint knows %d addresses of its client, and saw %s", port, a.ClientAddresses, a.Client)
		}
		check.OK(t, p.Again())
		if r := n.wait(t, 1)[0]; r.End != conntrack.ClientShutdown {
			t.Errorf("%+v", r)
		}
		n.finish()
	}
}

// An ABORT ends an association for both sides, and so does a stop.
func TestEndsOfAssociations(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	server := serveSCTP(t, b, 13868)
	n := newNode(t, lab, nil)
	n.apply(sctpService(vip4, at(b.IPv4, 13868)))
	c := call(vip4)
	c.How = "abort"
	must.OK(t, must.Err(c.Do(t, lab.Client)))
	if r := n.wait(t, 1)[0]; r.End != conntrack.ClientAbort {
		t.Errorf("%+v", r)
	}
	// A server that is there again knows nothing of the association, and says so.
	c.How = "wait"
	p := c.Connect(t, lab.Client)
	must.OK(t, must.Err(p.Answered()))
	server.Kill()
	serveSCTP(t, b, 13868)
	if err := p.Again(); err == nil {
		t.Error("messages of an association that has ended came back")
	}
	if r := n.wait(t, 2)[1]; r.End != conntrack.EndpointAbort {
		t.Errorf("%+v", r)
	}
	p = c.Connect(t, lab.Client)
	must.OK(t, must.Err(p.Answered()))
	n.stop()
	if err := p.Again(); err == nil {
		t.Error("a stop has aborted nothing")
	}
	if r := n.wait(t, 3)[2]; r.End != conntrack.Shutdown {
		t.Errorf("%+v", r)
	}
	n.left = true
	n.end()
}

// The associations of a process that ended go on, and the next one adopts them.
func TestAssociationsAreAdopted(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	serveSCTP(t, b, 13868)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	first := newNode(t, lab, pinned)
	services := sctpService(vip4, at(b.IPv4, 13868))
	first.apply(services)
	c := call(vip4)
	c.How = "wait"
	p := c.Connect(t, lab.Client)
	must.OK(t, must.Err(p.Answered()))
	first.leave()
	next := newNode(t, lab, func(o *Options) { pinned(o); o.Keep = false })
	next.apply(services)
	check.Equalf(t, next.server.Stats().Open, 1, "associations were adopted")
	must.OK(t, p.Again())
	if r := next.wait(t, 1)[0]; r.Protocol != service.SCTP || r.End != conntrack.ClientShutdown || r.DatagramsFromClient != 21 || !r.Connected {
		t.Errorf("%+v", r)
	}
}
