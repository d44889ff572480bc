package e2e

import (
	"fmt"
	"net"
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestFullTableOfFlows has more UDP clients than the kernel may forward. Every datagram is
// answered at once, by a flow in place of another one or by the relay, of the clients that
// came first and of those that came later.
func TestFullTableOfFlows(t *testing.T) {
	t.Parallel()
	const flows, clients = 64, 200
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoUDP(t, 9000)
	p := newProxy(t, lab.Node)
	p.put(&object{
		name: "dns", kind: corev1.ServiceTypeClusterIP, vips: []string{vip4}, port: 53, target: 9000,
		protocol: corev1.ProtocolUDP, endpoints: []endpoint{{host: lab.Backends[0], node: "elsewhere"}},
	})
	p.start("--datapath", "kernel", "--max-flows", strconv.Itoa(flows))
	var conns []net.Conn
	ask := func(i int, when string) {
		t.Helper()
		if said, err := exchange(conns[i], fmt.Sprint(i), startTimeout); err != nil {
			t.Fatalf("client %d, %s: %q, %v", i, when, said, err)
		}
	}
	for i := range clients {
		conn := must.Get(lab.Client.Dial("udp", net.JoinHostPort(vip4, "53")))(t)
		t.Cleanup(func() { _ = conn.Close() })
		conns = append(conns, conn)
		ask(i, "at first")
	}
	for i := range clients {
		ask(i, "later")
	}
	p.stop()
}

// TestServiceHasWhatOthersDoNotNeed has one client open more connections to one Service than half of
// the kernel's table, and more than the process has descriptors for: none is reset.
func TestServiceHasWhatOthersDoNotNeed(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := prepareProxy(t, lab, []webService{webOn(lab)})
	p.files = 1024 // some 260 relayed connections
	p.start("--datapath", "kernel", "--max-flows", "1024")
	alive(t, hold(t, lab.Client, addresses(80, vip4)[0], 890))
	p.stop()
}
