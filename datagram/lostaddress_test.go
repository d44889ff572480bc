package datagram

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/tproxy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The address that a session has towards its endpoint leaves the node, which gets another
// one. The client's next datagrams are answered: they do not leave from the old address.
func TestSessionsFollowTheNodesAddress(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	b.EchoUDP(t, 5300)
	steer := must.Get(tproxy.New(tproxy.Options{Routes: route.Options{NetNS: lab.Node.FD()}, NoReplies: true}))(t)
	n := newNodeBy(t, lab, steer, nil)
	link := must.Get(lab.Node.Netlink().LinkByName(b.Name()))(t)
	was, is := netip.MustParseAddr("10.2.1.1"), netip.MustParseAddr("10.2.1.9")
	n.host = hostnet.NewAddresses([]netip.Addr{lab.Node.IPv4, was})
	n.apply(svc("four", vip4, nil, at(b.IPv4, 5300)))
	c := client(t, lab.Client, vip4+":53")
	if got, err := ask(c, "before", patience); err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	must.OK(t, lab.Node.Netlink().AddrDel(link, &netlink.Addr{IPNet: &net.IPNet{IP: was.AsSlice(), Mask: net.CIDRMask(24, 32)}}))
	must.OK(t, lab.Node.AddAddr(b.Name(), netip.PrefixFrom(is, 24)))
	n.host = hostnet.NewAddresses([]netip.Addr{lab.Node.IPv4, is})
	n.apply(service.Change{})
	wait.For(t, "the client is answered", wait.Patience, func() error {
		_, err := ask(c, "after", patience/10)
		return err
	})
	n.stop()
	n.records.Ended(t, map[conntrack.End]int{conntrack.EndpointGone: 1})
}
