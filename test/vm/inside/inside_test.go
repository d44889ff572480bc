// Package inside holds the tests that package vm runs in guests: the real binary,
// in network namespaces of the guest. Elsewhere it does nothing.
package inside

import (
	"errors"
	"fmt"

	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/proxy"
)

// The environment of the tests in a guest.
const (
	wantEnv = "SLUICE_VM_WANT" // the steering mode that the proxy must choose
	capsEnv = "SLUICE_VM_CAPS" // its capabilities, for setpriv; "" for all
)

func TestMain(m *testing.M) {
	if os.Getenv(wantEnv) == "" {
		return // not in a guest
	}
	os.Exit(m.Run())
}

const manifests = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  clusterIP: 10.96.0.10
  clusterIPs: ["10.96.0.10", "fd00:96::10"]
  ipFamilies: [IPv4, IPv6]
  externalIPs: ["203.0.113.10"]
  ports: [{name: http, port: 80, protocol: TCP}, {name: dns, port: 5300, protocol: UDP}]
---
apiVersion: v1
kind: Service
metadata: {name: empty, namespace: default}
spec:
  clusterIP: 10.96.0.11
  ports: [{name: http, port: 80, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-4, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080, protocol: TCP}, {name: dns, port: 5353, protocol: UDP}]
endpoints: [{addresses: ["10.244.2.2"], nodeName: node2, conditions: {ready: true}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-6, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv6
ports: [{name: http, port: 8080, protocol: TCP}, {name: dns, port: 5353, protocol: UDP}]
endpoints: [{addresses: ["fd00:244:2::2"], nodeName: node2, conditions: {ready: true}}]
`

// The chosen steering mode serves TCP and UDP over both families, refuses where
// there are no endpoints, keeps clients' addresses, and leaves nothing behind.
func TestServes(t *testing.T) {
	c := netns.NewCluster(t)
	for _, r := range c.Remote {
		r.WitnessTCP(t, 8080)
		r.WitnessUDP(t, 5353)
	}
	c.Settle(t)
	before := c.Node.Dump(t)
	p := start(t, c.Node)
	for _, q := range []struct {
		from     *netns.Host
		to, want string // want is what the endpoint sees
	}{
		{c.Pods[0], "tcp 10.96.0.10:80", "10.244.1.2"}, // A3.8
		{c.Pods[0], "tcp [fd00:96::10]:80", "fd00:244:1::2"},
		{c.Pods[0], "udp 10.96.0.10:5300", "10.244.1.2"},
		{c.Pods[0], "udp [fd00:96::10]:5300", "fd00:244:1::2"},
		{c.Node, "tcp 10.96.0.10:80", "10.9.0.1"},      // the default route's source
		{c.Outside, "tcp 203.0.113.10:80", "10.1.1.1"}, // A3.9, A3.13
		{c.Pods[0], "tcp 10.96.0.11:80", "refused"},    // A3.4
		{c.Outside, "tcp 10.96.0.11:80", "refused"},
		{c.Pods[0], "tcp 10.244.2.2:8080", "10.244.1.2"}, // without the proxy
	} {
		check.Equalf(t, ask(q.from, q.to), q.want, "from %s to %s: the endpoint saw", q.from.Name(), q.to)
	}
	p.Stop()
	check.Textf(t, c.Node.Dump(t), before, "left behind")
}

// start runs the proxy.
func start(t *testing.T, node *netns.Host) *proxy.Proxy {
	t.Helper()
	p := proxy.New(t, node)
	p.Write(manifests)
	var under []string
	if caps := os.Getenv(capsEnv); caps != "" {
		under = []string{"/usr/bin/setpriv", "--bounding-set=" + caps}
	}
	p.Start(under, "--access-log", "off", "--dial-timeouts", "20s", "--datapath", "relay")
	if want := "steering by " + os.Getenv(wantEnv); !p.Log.Contains(want) {
		t.Errorf("want %s in:\n%s", want, &p.Log)
	}
	return p
}

// ask returns the address that a witness sees, or "refused", or another error.
func ask(from *netns.Host, to string) string {
	network, address, _ := strings.Cut(to, " ")
	c, err := from.Dial(network, address)
	if err == nil {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		_, _ = c.Write([]byte("hello\n"))
		buf := make([]byte, 200)
		var n int
		if n, err = c.Read(buf); err == nil {
			line, _, _ := strings.Cut(string(buf[:n]), "\n")
			_, saw, _ := strings.Cut(line, " ")
			a, err := netip.ParseAddrPort(saw)
			if err != nil {
				return fmt.Sprintf("answer %q", buf[:n])
			}
			return a.Addr().String()
		}
	}
	if errors.Is(err, syscall.ECONNREFUSED) {
		return "refused"
	}
	return err.Error()
}
