package flow

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// set writes a setting of a host's network.
func set(t *testing.T, h *netns.Host, name, value string) {
	t.Helper()
	must.OK(t, h.SetSysctl("net/"+name, value))
}

// serves reports whether the kernel forwards what is for port 80 of an address.
func (n *node) serves(vip string) bool {
	d := bpf.DestinationOf(service.Destination{Addr: netip.MustParseAddr(vip), Port: 80, Protocol: service.UDP})
	var served bpf.KernelServed
	return n.server.kernel.Maps.Destinations.Lookup(&d, &served) == nil
}

// awaitForwarding applies the configuration anew when the node forwards other packets than
// before, as the proxy's loop does, until the kernel serves an address, or serves it no more.
func (n *node) awaitForwarding(vip string, want bool) {
	n.t.Helper()
	wait.For(n.t, "the node notices that", patience, func() error {
		select {
		case <-n.server.Changed():
			n.apply(service.Change{})
		default:
		}
		if n.serves(vip) != want {
			return fmt.Errorf("the kernel serves %s: %t", vip, !want)
		}
		return nil
	})
}

// A family is relayed while the node, or one interface, does not forward it, at the start or later.
// The other family is not affected.
func TestForwardingIsFollowed(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoUDP(t, 8080)
	for _, c := range []struct {
		setting    string
		vip, other string
		endpoint   netip.Addr
	}{
		{"ipv4/ip_forward", vip4, vip6, lab.Backends[0].IPv4},
		{"ipv4/conf/client/forwarding", vip4, vip6, lab.Backends[0].IPv4},
		{"ipv4/conf/b1/forwarding", vip4, vip6, lab.Backends[0].IPv4},
		{"ipv6/conf/all/forwarding", vip6, vip4, lab.Backends[0].IPv6},
	} {
		t.Run(c.setting, func(t *testing.T) {
			set(t, lab.Node, c.setting, "0")
			n := newNode(t, lab, nil)
			n.apply(svc(c.other, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[0].IPv6, 8080)))
			if !n.serves(c.other) {
				t.Error("the other family is not forwarded")
			}
			n.apply(svc(c.vip, nil, at(c.endpoint, 8080)))
			if n.serves(c.vip) {
				t.Error("it is forwarded at the start")
			}
			set(t, lab.Node, c.setting, "1")
			n.awaitForwarding(c.vip, true)
			conn := lab.Client.Connect(t, "udp", net.JoinHostPort(c.vip, "80"))
			must.OK(t, must.Err(question(conn)))
			set(t, lab.Node, c.setting, "0")
			n.awaitForwarding(c.vip, false)
			wait.True(t, "the session ends, so that it is relayed", func() bool { return n.endedBy(conntrack.EndpointGone) == 1 })
			set(t, lab.Node, c.setting, "1")
		})
	}
}

// On a node that forwards nothing, New fails, unless the Server waits until the node forwards.
func TestNothingIsForwardedAtTheStart(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoUDP(t, 8080)
	set(t, lab.Node, "ipv4/ip_forward", "0")
	set(t, lab.Node, "ipv6/conf/all/forwarding", "0")
	if err := lab.Node.Do(func() error {
		_, err := New(Options{MaxFlows: 64, Namespace: lab.Node.FD()})
		return err
	}); !errors.Is(err, errForwarding) {
		t.Errorf("%v, want %v", err, errForwarding)
	}
	n := newNode(t, lab, func(o *Options) { o.Waits = true })
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	if n.serves(vip4) {
		t.Error("it is forwarded")
	}
	set(t, lab.Node, "ipv4/ip_forward", "1")
	n.awaitForwarding(vip4, true)
}
