package e2e

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestDatagramsWhenDescriptorsRunOut takes away all unused descriptors. Each new
// client must be served in place of another one, and none may be refused.
func TestDatagramsWhenDescriptorsRunOut(t *testing.T) {
	const clients = 20
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoUDP(t, 9000)
	p := newProxy(t, lab.Node)
	p.put(&object{
		name: "dns", kind: corev1.ServiceTypeClusterIP, vips: []string{vip4}, port: 53, target: 9000,
		protocol: corev1.ProtocolUDP, endpoints: []endpoint{{host: lab.Backends[0], node: "elsewhere"}},
	})
	p.start()
	ask := func(text string) {
		t.Helper()
		conn := lab.Client.Connect(t, "udp", net.JoinHostPort(vip4, "53"))
		if said, err := exchange(conn, text, startTimeout); err != nil {
			t.Fatalf("client %s: %q, %v", text, said, err)
		}
	}
	for i := range clients {
		ask(fmt.Sprint(i))
	}
	highest := 0
	list := must.Get(os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid)))(t)
	for _, entry := range list {
		fd := must.Get(strconv.Atoi(entry.Name()))(t)
		highest = max(highest, fd)
	}
	var limit unix.Rlimit
	must.OK(t, unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, nil, &limit))
	limit.Cur = uint64(highest) + 1
	must.OK(t, unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, &limit, nil))
	asked := clients
	for ; asked <= highest+clients; asked++ { // there may be gaps
		ask(fmt.Sprint(asked))
	}
	limit.Cur = limit.Max
	must.OK(t, unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, &limit, nil))
	m := must.Get(p.metrics())(t)
	t.Logf("%d clients, %v sessions, %d descriptors", asked, m["sluice_udp_sessions"], highest+1)
	if m["sluice_udp_sessions"] >= float64(highest) {
		t.Error("no descriptor was missing")
	}
	p.stop()
}
