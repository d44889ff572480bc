package peer

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/world"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

func TestManifestsParse(t *testing.T) {
	for _, w := range []*world.World{
		{VIP: netip.MustParseAddr("10.96.0.10"), NodeAddr: netip.MustParseAddr("10.1.0.1"), Endpoints: []netip.Addr{netip.MustParseAddr("10.2.0.2"), netip.MustParseAddr("10.2.0.3")}},
		{IPv6: true, VIP: netip.MustParseAddr("fd00::10"), NodeAddr: netip.MustParseAddr("fd01::1"), Endpoints: []netip.Addr{netip.MustParseAddr("fd02::2")}},
	} {
		node, svc, slice, err := objects(w)
		must.OK(t, err)
		if node.Status.Addresses[0].Address != w.NodeAddr.String() {
			t.Errorf("node has %v", node.Status.Addresses)
		}
		if svc.Spec.ClusterIP != w.VIP.String() || len(svc.Spec.Ports) != len(load.Ports)+len(load.UDPPorts) {
			t.Errorf("service has %s and %d ports", svc.Spec.ClusterIP, len(svc.Spec.Ports))
		}
		if len(slice.Endpoints) != len(w.Endpoints) || slice.Endpoints[0].Addresses[0] != w.Endpoints[0].String() {
			t.Errorf("slice has %v", slice.Endpoints)
		}
	}
}

func TestConfigs(t *testing.T) {
	values := map[string]any{
		"Threads": 2, "MaxConn": 7800, "MaxPipes": 1950, "MaxFiles": 20000,
		"Bind": "[::1]", "Splice": []string{"auto"}, "Dir": "/d", "Modules": "/m",
		"Ports": []uint16{80, 81}, "UDPPorts": []uint16{53}, "Endpoints": []string{"[fd02::2]", "[fd02::3]"},
	}
	for name, lines := range map[string][]string{
		"haproxy.cfg": {"nbthread 2", "bind [::1]:81 transparent", "server endpoint1 [fd02::3]:80", "option splice-auto"},
		"nginx.conf":  {"worker_processes 2;", "listen [::1]:80 backlog=4096;", "listen [::1]:53 udp reuseport;", "server [fd02::3]:81;", "load_module /m/ngx_stream_module.so;"},
	} {
		text := must.Get(render(name, values))(t)
		for _, line := range lines {
			check.Contains(t, string(text), line)
		}
	}
}

func TestFindNamesThePackage(t *testing.T) {
	p := Peer{Name: "nginx", Package: "nginx and libnginx-mod-stream", program: "no-such-program"}
	err := p.Find()
	check.Errorf(t, err, "apt-get install nginx libnginx-mod-stream", "a missing program")
	for _, p := range All(Builds{Sluice: "no/such/sluice", Base: "sluice-base-that-is-not-there"}) {
		if strings.HasPrefix(p.Name, "sluice") {
			check.Errorf(t, p.Find(), "make build", "%s is found where it is not", p.Name)
		}
		if p.program == "" && p.Find() != nil {
			t.Errorf("%s needs no program", p.Name)
		}
	}
}
