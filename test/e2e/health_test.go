package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// checkedService is a Service with a health check port, and one endpoint on
// the node.
func checkedService(port int, ready bool) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {name: checked, namespace: shop}
spec:
  type: LoadBalancer
  clusterIP: %s
  clusterIPs: [%s, "%s"]
  externalTrafficPolicy: Local
  healthCheckNodePort: %d
  ports: [{port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: checked-4, namespace: shop, labels: {kubernetes.io/service-name: checked}}
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- {addresses: [10.2.1.2], nodeName: node, conditions: {ready: %v, serving: true, terminating: %v}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: checked-6, namespace: shop, labels: {kubernetes.io/service-name: checked}}
addressType: IPv6
ports: [{port: 8080}]
endpoints:
- {addresses: ["fd00:2:1::2"], nodeName: node}
- {addresses: ["fd00:2:1::3"], nodeName: node}
`, vip4, vip4, vip6, port, ready, !ready)
}

const nodeManifest = `apiVersion: v1
kind: Node
metadata: {name: node}
`

// checkHealth queries a health check of the node from the client's host.
func checkHealth(lab *netns.Lab, address, path string) (status int, weight, body string, err error) {
	client := &http.Client{Timeout: stopTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, network, _ string) (net.Conn, error) {
			return lab.Client.Dial(network, address)
		},
	}}
	resp, err := client.Get("http://node" + path)
	if err != nil {
		return 0, "", "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header.Get("X-Load-Balancing-Endpoint-Weight"), string(text), err
}

// TestHealthCheckPort tests A6.1 to A6.7 on the real program, from another host:
// the answers follow the endpoints of each family, and the port moves with the
// Service. A port that another program holds is logged, counted, and opened when
// it is free.
func TestHealthCheckPort(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	taken := must.Get(lab.Node.Listen("tcp4", "0.0.0.0:32000"))(t)
	p := prepareProxy(t, lab, nil)
	p.write("checked.yaml", checkedService(32000, true))
	p.start()
	want := func(what, address string, status int, weight string) {
		t.Helper()
		wait.For(t, what, startTimeout, func() error {
			gotStatus, gotWeight, body, err := checkHealth(lab, address, "/any")
			if err != nil {
				return err
			}
			if gotStatus != status || gotWeight != weight || !strings.Contains(body, "\"localEndpoints\": "+weight+",\n") {
				return fmt.Errorf("%d, weight %s, %s", gotStatus, gotWeight, body)
			}
			return nil
		})
	}
	want("A6.3 the family whose port is free", "[fd00:1::1]:32000", 200, "2")
	p.awaitLog("FailedToStartServiceHealthcheck") // A6.6: the log tells that the port is taken
	p.awaitMetrics("A6.6 the metrics tell", func(m map[string]float64) bool {
		return m["sluice_health_check_port_failures_total"] >= 1 && m["sluice_health_check_ports"] == 1
	})
	must.OK(t, taken.Close())
	want("A6.6 the port is free at last", "10.1.0.1:32000", 200, "1")
	p.write("checked.yaml", checkedService(32000, false))
	want("A6.3 only a terminating endpoint", "10.1.0.1:32000", 503, "0")
	want("the other family", "[fd00:1::1]:32000", 200, "2")
	p.write("checked.yaml", checkedService(32001, true))
	want("A6.7 another port", "10.1.0.1:32001", 200, "1")
	wait.For(t, "A6.7 the old port is closed", startTimeout, func() error { return refused(lab.Client, "10.1.0.1:32000") })
	p.remove("checked")
	wait.For(t, "A6.1 no port without the Service", startTimeout, func() error { return refused(lab.Client, "10.1.0.1:32001") })
	p.stop()
}

// TestHealthz tests A7.2 and A7.3 on the real program.
func TestHealthz(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	p := startProxy(t, lab, []webService{webOn(lab)}, "--healthz-bind-address", "0.0.0.0:10256")
	want := func(what, path string, status int, part string) {
		t.Helper()
		wait.For(t, what, startTimeout, func() error {
			got, _, body, err := checkHealth(lab, "10.1.0.1:10256", path)
			if err == nil && (got != status || !strings.Contains(body, part)) {
				err = errors.New(body)
			}
			return err
		})
	}
	want("A7.2 alive", "/livez", 200, `"healthy":true`)
	want("A7.3 the node is not known", "/healthz", 503, `"nodeEligible":false`)
	p.write("node.yaml", nodeManifest)
	want("A7.3 the node is known", "/healthz", 200, `"nodeEligible":true`)
	p.write("node.yaml", nodeManifest+"spec: {taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]}\n")
	want("A7.3 the node is to be deleted", "/healthz", 503, `"nodeEligible":false`)
	want("A7.2 it is alive all the same", "/livez", 200, `"healthy":true`)
	wait.For(t, "A7.5 the metrics count", startTimeout, func() error {
		m, err := p.metrics()
		if healthy, alive := m[`kubeproxy_proxy_healthz_total{code="200"}`], m[`kubeproxy_proxy_livez_total{code="200"}`]; err == nil && (healthy < 1 || alive < 2) {
			err = fmt.Errorf("%v and %v", healthy, alive)
		}
		return err
	})
	p.stop()
}

// TestIdleHealthClientsTakeNothingFromServices opens more keep-alive connections
// to each HTTP port than the process may have files. Services must keep working,
// and each HTTP port must answer new clients.
func TestIdleHealthClientsTakeNothingFromServices(t *testing.T) {
	t.Parallel()
	const files, each = 1024, 1200
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := prepareProxy(t, lab, nil)
	p.write("checked.yaml", checkedService(32000, true))
	web := webOn(lab)
	web.vips = []string{"10.96.0.11", "fd00:96::11"}
	p.apply(web)
	p.start("--healthz-bind-address", "[::]:10256")
	var was unix.Rlimit
	must.OK(t, unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, nil, &was))
	was.Cur = files
	must.OK(t, unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, &was, nil))
	before := p.descriptors()

	ports := []struct {
		name, address, path string
		from                *netns.Host
	}{
		{"health of the proxy", "10.1.0.1:10256", "/healthz", lab.Client},
		{"the same, IPv6", "[fd00:1::1]:10256", "/livez", lab.Client},
		{"health check port", "10.1.0.1:32000", "/", lab.Client},
		{"the same, IPv6", "[fd00:1::1]:32000", "/", lab.Client},
		{"metrics", metricsAddress, "/proxyMode", lab.Node},
	}
	for _, port := range ports {
		for i := range each {
			c, err := port.from.Dial("tcp", port.address)
			must.OKf(t, err, "%s: connection %d", port.name, i)
			t.Cleanup(func() { _ = c.Close() })
			if i%2 == 0 { // the others send nothing
				_, _ = io.WriteString(c, "GET "+port.path+" HTTP/1.1\r\nHost: node\r\n\r\n")
			}
		}
	}
	for _, target := range addresses(80, web.vips...) {
		check.OKf(t, must.Err(lab.Client.Ask("tcp", target)), "Service %s", target)
	}
	for _, port := range ports {
		client := &http.Client{Timeout: stopTimeout, Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(_ context.Context, network, _ string) (net.Conn, error) {
				return port.from.Dial(network, port.address)
			},
		}}
		resp, err := client.Get("http://node" + port.path)
		if err != nil {
			t.Errorf("%s at %s: %v", port.name, port.address, err)
			continue
		}
		_ = resp.Body.Close()
	}
	const most = 2*32 + 8 // connections of all HTTP ports together
	wait.For(t, "the flood is cut down", startTimeout, func() error {
		m, err := p.metrics()
		if now := p.descriptors(); now > before+most+16 {
			return fmt.Errorf("%d descriptors, %d before the flood: HTTP clients may have %d", now, before, most)
		}
		if n := m["sluice_http_connections_evicted_total"]; err == nil && n < files {
			err = fmt.Errorf("%v were evicted", n)
		}
		return err
	})
	p.stop()
}
