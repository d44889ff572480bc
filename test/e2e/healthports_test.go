package e2e

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// checkedServices returns the manifests of n Services with health check ports of
// both address families and no endpoint, starting at a number. The tenant's
// cluster IPs begin with 10.96.1.
func checkedServices(namespace string, first, n int) string {
	var text strings.Builder
	for i := first; i < first+n; i++ {
		four, six := fmt.Sprintf("10.96.%d.%d", 1+i/250, 1+i%250), fmt.Sprintf("fd00:96::1:%x", 1+i)
		fmt.Fprintf(&text, `---
apiVersion: v1
kind: Service
metadata: {name: checked-%d, namespace: %s}
spec:
  type: LoadBalancer
  clusterIP: %[3]s
  clusterIPs: [%[3]s, "%s"]
  externalTrafficPolicy: Local
  healthCheckNodePort: %d
  ports: [{port: 80}]
`, i, namespace, four, six, 30000+i)
	}
	return text.String()
}

// TestHealthPortsOfOneNamespace has one namespace ask for more health check ports
// than there are descriptors, and open all connections to those that it gets. The
// other namespaces' Services and health check ports must be served, metrics must
// answer, removed kernel state must be repaired, and the namespace can open ports
// again after it has closed some.
func TestHealthPortsOfOneNamespace(t *testing.T) {
	const files, services = 1024, 700
	lab := netns.NewLab(t, 1)
	leanEcho(t, lab.Backends[0], 8080)
	web, own := webOn(lab), webOn(lab)
	own.name, own.namespace, own.vips = "own", tenant, []string{"10.96.0.20", "fd00:96::20"}
	p := prepareProxy(t, lab, []webService{web, own})
	p.files = files
	p.start()
	counts := func() (open, waiting, claims, connections int) {
		t.Helper()
		m := must.Get(p.metrics())(t)
		return int(m["sluice_health_check_ports"]), int(m["sluice_health_check_ports_waiting"]), int(m["sluice_port_claims"]),
			int(sumOf(m, metricOpen, `protocol="TCP"`))
	}
	ask := func(what string) {
		t.Helper()
		for _, address := range addresses(80, web.vips...) {
			check.OKf(t, must.Err(lab.Client.Ask("tcp", address)), "the neighbour's Service %s", what)
		}
	}

	p.settled(func() { p.write(tenantFile, checkedServices(tenant, 0, services)) })
	open, waiting, claims, _ := counts()
	if open < 100 || open > files/4 || open+waiting != 2*services || claims != open {
		t.Errorf("%d health check ports are open, %d wait, %d sockets are counted; want %d ports, of which half of --max-claims are open",
			open, waiting, claims, 2*services)
	}
	ask("beside the health check ports")

	// The remaining descriptors for connections are not the tenant's alone.
	var held []net.Conn
	for len(held) < files {
		c, err := lab.Client.Dial("tcp", addresses(80, own.vips...)[len(held)%2])
		if err == nil {
			held = append(held, c)
			_, err = netns.AskOn(c)
		}
		if err != nil {
			if !isReset(err) {
				t.Errorf("connection %d of the tenant: %v, want a reset", len(held), err)
			}
			break
		}
	}
	ask("beside the health check ports and connections")
	p.settled(func() { p.write("late.yaml", checkedServices("late", services, 1)) })
	if status, _, body, err := checkHealth(lab, fmt.Sprintf("10.1.0.1:%d", 30000+services), "/"); err != nil || status != 503 {
		t.Errorf("the health check port of another namespace: %d %s, %v", status, body, err)
	}
	out, err := lab.Node.Command(t, administration(t, "nft"), "flush", "ruleset").CombinedOutput()
	if err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
	wait.For(t, "the rules are repaired", repairTimeout, func() error {
		m, err := p.metrics()
		if err == nil && m["sluice_steering_repairs_total"] == 0 {
			err = errNotYet
		}
		return err
	})
	ask("after the repair")
	cutAll(held)

	// The waiting ports replace those that are removed.
	p.settled(func() { p.write(tenantFile, checkedServices(tenant, services-open/4, open/4)) })
	wait.For(t, "the ports that waited are open", startTimeout, func() error {
		if now, waits, claims, _ := counts(); waits != 0 || now != 2*(open/4)+2 || claims != now {
			return fmt.Errorf("%d are open, %d wait, %d sockets are counted", now, waits, claims)
		}
		return nil
	})
	p.stop() // now all that it said has come
	named := strings.Count(p.stderr.String(), "FailedToStartServiceHealthcheck")
	if more := strings.Count(p.stderr.String(), "more health check ports cannot be opened for want of room"); named == 0 || named > 32 || more != 1 {
		t.Errorf("the log names %d ports, and %d times how many more", named, more)
	}
}
