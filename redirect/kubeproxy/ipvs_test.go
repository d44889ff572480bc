package kubeproxy

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestRemoveIPVS removes the interface that has the Services' addresses.
func TestRemoveIPVS(t *testing.T) {
	node := netns.New(t, "node")
	netns.Wire(t, node, ipvsInterface, []netip.Prefix{netip.MustParsePrefix("10.96.0.1/32")}, netns.New(t, "peer"), "eth0", nil)
	for _, want := range [][]string{{"interface kube-ipvs0"}, nil} {
		if removed, err := Remove(node.FD()); err != nil || !slices.Equal(removed, want) {
			t.Errorf("removed %q, %v; want %q", removed, err, want)
		}
	}
}

func TestVirtualServers(t *testing.T) {
	const table = `IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A600001:01BB rr 
  -> 0A600001:192B      Masq    1      0          0         
UDP  [fd00:0096:0000:0000:0000:0000:0000:000a]:0035 rr 
TCP  C0A80001:0050 rr 
FWM  00000001 rr 
`
	for want, addresses := range map[int][]string{0: {"10.96.0.2"}, 1: {"fd00:96::a"}, 2: {"10.96.0.1", "fd00:96::a", "0.0.0.1"}} {
		var list []netip.Addr
		for _, a := range addresses {
			list = append(list, netip.MustParseAddr(a))
		}
		check.Equalf(t, virtualServers(table, list), want, "%q: virtual servers", addresses)
	}
}
