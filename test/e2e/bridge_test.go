package e2e

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestPodsOnOneBridgeReachEachOtherThroughServices has the node's pods on a
// bridge, as in many networks: packets between them pass the node's stack only if
// they are sent to the node. An endpoint that saw the client's address would
// answer it directly, and the client would reset the connection. So the endpoint
// sees the node's address, while clients on other hosts keep their own.
func TestPodsOnOneBridgeReachEachOtherThroughServices(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 0)
	nl := lab.Node.Netlink()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "cni0"
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	must.OK(t, nl.LinkAdd(bridge))
	must.OK(t, nl.LinkSetUp(bridge))
	must.OK(t, lab.Node.AddAddr("cni0", netip.MustParsePrefix("10.244.1.1/24")))
	must.OK(t, lab.Node.AddAddr("cni0", netip.MustParsePrefix("fd00:244:1::1/64")))
	var pods []*netns.Host
	for _, name := range []string{"one", "two"} {
		n := len(pods) + 2
		pod := &netns.Host{
			Namespace: netns.New(t, name),
			IPv4:      netip.AddrFrom4([4]byte{10, 244, 1, byte(n)}),
			IPv6:      netip.AddrFrom16([16]byte{0xfd, 0, 2, 0x44, 0, 1, 15: byte(n)}),
		}
		netns.Wire(t, lab.Node.Namespace, name, nil, pod.Namespace, "eth0",
			[]netip.Prefix{netip.PrefixFrom(pod.IPv4, 24), netip.PrefixFrom(pod.IPv6, 64)})
		port := must.Get(nl.LinkByName(name))(t)
		must.OK(t, nl.LinkSetMaster(port, bridge))
		must.OK(t, pod.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("10.244.1.1")))
		must.OK(t, pod.AddRoute(netip.MustParsePrefix("::/0"), netip.MustParseAddr("fd00:244:1::1")))
		pods = append(pods, pod)
	}
	client, server := pods[0], pods[1]
	server.WitnessTCP(t, 8080)
	web := webService{name: "web", vips: []string{vip4, vip6}, port: 80, node: "node", endpoints: []netip.AddrPort{
		netip.AddrPortFrom(server.IPv4, 8080), netip.AddrPortFrom(server.IPv6, 8080),
	}}
	p := startProxy(t, lab, []webService{web})
	for i, vip := range web.vips {
		node := []string{"10.244.1.1", "fd00:244:1::1"}[i]
		for _, tt := range []struct {
			from *netns.Host
			want string
		}{
			{client, node},
			{lab.Client, []string{"10.1.0.2", "fd00:1::2"}[i]},
		} {
			said, err := tt.from.Ask("tcp", netip.AddrPortFrom(netip.MustParseAddr(vip), 80).String())
			if err != nil {
				t.Errorf("from %s to %s: %v", tt.from.Name(), vip, err)
				continue
			}
			check.Containsf(t, said, tt.want, "from %s to %s the endpoint saw", tt.from.Name(), vip)
		}
	}
	for _, r := range p.awaitRecords(4) {
		fromPod := r.Client.Addr() == client.IPv4 || r.Client.Addr() == client.IPv6
		if fromPod == (r.Source == "client") {
			t.Errorf("record of %s: source %q", r.Client, r.Source)
		}
	}
}
