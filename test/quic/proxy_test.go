package quic

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// server counts the connections that it accepted.
type server struct{ accepted atomic.Int64 }

const metricsAddress = "127.0.0.1:10249"

// proxy is a `sluice run` on a node, with one Service.
type proxy struct {
	t         *testing.T
	node      *netns.Host
	manifests string
	cmd       *netns.Cmd
	log       output.Text
	http      http.Client
}

// program returns the binary that SLUICE_BIN names, or builds one.
func program(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("SLUICE_BIN"); path != "" {
		return path
	}
	path := filepath.Join(t.TempDir(), "sluice")
	build := exec.Command("go", "build", "-buildvcs=false", "-o", path, "./cmd/sluice")
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return path
}

// start runs the proxy until the test ends, and waits until it serves.
func start(t *testing.T, node *netns.Host, endpoints ...netip.Addr) *proxy {
	t.Helper()
	p := &proxy{t: t, node: node, manifests: t.TempDir()}
	p.http.Transport = &http.Transport{DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
		return node.Dial(network, address)
	}}
	p.write(endpoints)
	args := []string{"run", "--manifests", p.manifests, "--hostname-override", "node",
		"--service-cidr", "10.96.0.0/16", "--access-log", "off", "--metrics-bind-address", metricsAddress, "--datapath=relay"} // the last one counts
	p.cmd = node.Command(t, program(t), append(args, strings.Fields(os.Getenv("SLUICE_TEST_FLAGS"))...)...)
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must.OK(t, p.cmd.Start())
	wait.For(t, "the configuration is in force, with its data path", 5*time.Minute, func() error { // the kernel's verifier takes long on a busy machine
		if log := p.log.String(); !strings.Contains(log, " ready ") {
			return errors.New(log)
		}
		return nil
	})
	return p
}

// kernelFlows reports whether the tests run with them.
func kernelFlows() bool {
	return strings.Contains(os.Getenv("SLUICE_TEST_FLAGS"), "--datapath=kernel")
}

// put changes the endpoints and waits until the change is in force. What comes with no
// change, such as the start of kernel flows, puts the old endpoints in force once more: so
// the change has to have been read first.
func (p *proxy) put(endpoints ...netip.Addr) {
	p.t.Helper()
	began := time.Now()
	p.write(endpoints)
	wait.For(p.t, "the change is in force", time.Minute, func() error {
		read, err := p.metric(`kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"}`)
		if err != nil {
			return err
		}
		applied, err := p.metric("sluice_config_applied_timestamp_seconds")
		if err == nil && (read < float64(began.UnixNano())/1e9 || applied < read) {
			err = fmt.Errorf("read at %f, applied at %f\n%s", read, applied, p.log.String())
		}
		return err
	})
}

// metric returns the value of a metric without labels; 0 if there is none.
func (p *proxy) metric(name string) (float64, error) {
	response, err := p.http.Get("http://" + metricsAddress + "/metrics")
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, nil
}

// stop ends the proxy with SIGTERM.
func (p *proxy) stop() {
	p.t.Helper()
	decided, err := p.metric("sluice_flows_decided_total")
	if err != nil || kernelFlows() != (decided > 0) {
		p.t.Errorf("the kernel forwards %v sessions, %v", decided, err)
	}
	p.http.CloseIdleConnections()
	must.OK(p.t, p.cmd.Process.Signal(syscall.SIGTERM))
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("sluice: %v\n%s", err, p.log.String())
	}
}

// write replaces the Service's manifest atomically.
func (p *proxy) write(endpoints []netip.Addr) {
	p.t.Helper()
	var list strings.Builder
	for _, e := range endpoints {
		fmt.Fprintf(&list, "- {addresses: [%q], nodeName: elsewhere}\n", e)
	}
	text := fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {name: quic, namespace: default}
spec:
  clusterIP: %[1]s
  clusterIPs: [%[1]s]
  ipFamilies: [IPv4]
  ports: [{name: quic, port: %[2]d, targetPort: %[3]d, protocol: UDP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: quic-4, namespace: default, labels: {kubernetes.io/service-name: quic}}
addressType: IPv4
ports: [{name: quic, port: %[3]d, protocol: UDP}]
endpoints:
%[4]s`, vip, port, target, list.String())
	temporary := filepath.Join(p.manifests, ".new")
	err := os.WriteFile(temporary, []byte(text), 0o600)
	if err == nil {
		err = os.Rename(temporary, filepath.Join(p.manifests, "quic.yaml"))
	}
	must.OK(p.t, err)
}
