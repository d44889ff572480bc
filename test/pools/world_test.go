package pools

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/debian"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/proxy"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// world is a lab with a proxy and a Service for each kind of server.
type world struct {
	*netns.Lab
	proxy *proxy.Proxy
}

// start runs the proxy, with a number of the backends as endpoints.
func start(t *testing.T, lab *netns.Lab, endpoints int) *world {
	t.Helper()
	w := &world{Lab: lab, proxy: proxy.New(t, lab.Node)}
	w.put(endpoints)
	w.proxy.Start(nil, "--access-log", "off", "--bpf-root", "", "--dial-timeouts", "10s,10s")
	return w
}

// put writes the Services with the first backends as endpoints.
func (w *world) put(endpoints int) {
	var b strings.Builder
	for _, k := range kinds {
		fmt.Fprintf(&b, `---
apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: default, annotations: {sluice.dev/rebalance: 10s}}
spec: {clusterIP: %[2]s, ports: [{name: main, port: %[3]d, protocol: TCP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s, namespace: default, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
ports: [{name: main, port: %[3]d, protocol: TCP}]
endpoints:
`, k.name, k.vip, k.port)
		for _, h := range w.Backends[:endpoints] {
			fmt.Fprintf(&b, "- {addresses: [%q], nodeName: elsewhere}\n", h.IPv4)
		}
	}
	w.proxy.Write(b.String())
}

// serve runs a program on a host as nobody, until the test ends.
func serve(t *testing.T, h *netns.Host, dir, name string, args ...string) {
	t.Helper()
	cmd := debian.As(h.Command(t, debian.Find(t, name), args...), dir)
	log := &output.Text{}
	cmd.Stdout, cmd.Stderr = log, log
	must.OK(t, cmd.Start())
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s on %s said:\n%s", name, h.Name(), log)
		}
	})
}
