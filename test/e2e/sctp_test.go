package e2e

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/usrsctp"
)

const sctpManifest = `
apiVersion: v1
kind: Service
metadata: {name: hss}
spec:
  clusterIP: 10.96.0.20
  clusterIPs: [10.96.0.20, "fd00:96::20"]
  ipFamilies: [IPv4, IPv6]
  ports: [{name: diameter, port: 3868, targetPort: 13868, protocol: SCTP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: hss-4, labels: {kubernetes.io/service-name: hss}}
addressType: IPv4
ports: [{name: diameter, port: 13868, protocol: SCTP}]
endpoints: [{addresses: [10.2.1.2]}, {addresses: [10.2.2.2]}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: hss-6, labels: {kubernetes.io/service-name: hss}}
addressType: IPv6
ports: [{name: diameter, port: 13868, protocol: SCTP}]
endpoints: [{addresses: ["fd00:2:1::2"]}, {addresses: ["fd00:2:2::2"]}]
`

// With kernel flows, a node whose kernel has no SCTP serves it: endpoints see the client,
// a dead one costs a moment. The log and a metric say what is not served.
func TestSCTPWithoutAKernelThatHasIt(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	b := lab.Backends[0] // the other one has no server
	usrsctp.Serve(t, b, usrsctp.Listener{Port: 13868, At: []netip.Addr{b.IPv4}}, usrsctp.Listener{Port: 13868, At: []netip.Addr{b.IPv6}})
	p := newProxy(t, lab.Node)
	p.write("hss.yaml", sctpManifest)
	p.start("--datapath", "kernel")
	seen, failed := 0, 0
	for _, c := range []struct{ vip, client netip.Addr }{
		{netip.MustParseAddr("10.96.0.20"), lab.Client.IPv4},
		{netip.MustParseAddr("fd00:96::20"), lab.Client.IPv6},
	} {
		for range 3 {
			a, err := usrsctp.Call{To: netip.AddrPortFrom(c.vip, 3868), Messages: 5, Size: 3000}.Do(t, lab.Client)
			must.OKf(t, err, "to %s", c.vip)
			if a.Server != "b1" || a.Client.Addr() != c.client {
				t.Errorf("to %s: %+v", c.vip, a)
			}
			seen++
			r := p.awaitRecords(seen)[seen-1]
			if r.Protocol != "SCTP" || r.Path != "kernel" || r.Source != "client" || r.End != "client_shutdown" || r.Attempts != len(r.Failed)+1 {
				t.Errorf("to %s: %+v", c.vip, r)
			}
			failed += len(r.Failed)
		}
	}
	if failed == 0 {
		t.Error("no association met the endpoint without a server")
	}
	const says = "SCTP ports refuse: clients on this node itself"
	p.awaitLog(says)
	check.Equalf(t, strings.Count(p.stderr.String(), says), 1, "how often the log says %q", says)
	check.Equalf(t, must.Get(p.metrics())(t)["sluice_sctp_ports_missing"], 2, "sluice_sctp_ports_missing is")
}
