package flow

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestPacketsThatComeInAgain reach their endpoint by the Service's flow, and are no connection of the client's
// own: what leaves a macvlan for another one comes in at the interface below.
func TestPacketsThatComeInAgain(t *testing.T) {
	t.Parallel()
	for _, vip := range []string{vip4, vip6} {
		t.Run(vip, func(t *testing.T) {
			t.Parallel()
			lab := localNode(t, 1)
			h := onMacvlan(t, lab)
			h.EchoTCP(t, 8080)
			h.EchoUDP(t, 8080)
			endpoint, own := at(h.IPv4, 8080), lab.Node.IPv4
			if vip == vip6 {
				endpoint, own = at(h.IPv6, 8080), lab.Node.IPv6
			}
			wait.For(t, "the link forwards", patience, func() error { return must.Err(lab.Node.Ask("tcp", endpoint.String())) })
			n := newNode(t, lab, nil)
			n.apply(svc(vip, nil, endpoint))
			n.servesNode()
			to := at(netip.MustParseAddr(vip), 80)
			for _, network := range []string{"tcp", "udp"} {
				for range 3 {
					conn := must.Get(lab.Client.Dial(network, to.String()))(t)
					defer conn.Close()
					check.Equalf(t, n.say(conn), h.Name()+":8080", "who answers the client by %s", network)
					if network == "udp" {
						check.Equalf(t, n.say(conn), h.Name()+":8080", "who answers it again")
						if vip == vip6 {
							continue // the relay's
						}
					}
					check.Equalf(t, n.say(n.dialFrom(network, own, to)), h.Name()+":8080", "who answers the node by %s", network)
				}
			}
			n.finish()
			for _, r := range n.taken() {
				if r.Attempts != 1 || r.BytesFromEndpoint == 0 {
					t.Errorf("%+v", r)
				}
			}
		})
	}
}

// onMacvlan gives the node a macvlan in place of its interface b1, and returns a host by another one.
func onMacvlan(t *testing.T, lab *netns.Lab) *netns.Host {
	t.Helper()
	below := lab.Node.Link(t, "b1")
	h := &netns.Host{Namespace: netns.New(t, "pod"), IPv4: netip.MustParseAddr("10.2.1.3"), IPv6: netip.MustParseAddr("fd00:2:1::3")}
	for name, to := range map[string]*netns.Host{"eth0": h, "shim": lab.Node} {
		must.OK(t, lab.Node.Netlink().LinkAdd(&netlink.Macvlan{
			LinkAttrs: netlink.LinkAttrs{Name: name, ParentIndex: below.Attrs().Index, Namespace: netlink.NsFd(to.FD())}, Mode: netlink.MACVLAN_MODE_BRIDGE,
		}))
		must.OK(t, to.Netlink().LinkSetUp(to.Link(t, name)))
	}
	moveAddresses(t, lab.Node, "b1", "shim")
	for _, a := range []string{"10.2.1.3/24", "fd00:2:1::3/64"} {
		must.OK(t, h.AddAddr("eth0", netip.MustParsePrefix(a)))
	}
	must.OK(t, errors.Join(h.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("10.2.1.1")),
		h.AddRoute(netip.MustParsePrefix("::/0"), netip.MustParseAddr("fd00:2:1::1"))))
	return h
}
