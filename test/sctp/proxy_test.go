package sctp

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// record is what the tests read of a line of the access log.
type record struct {
	Protocol     string `json:"protocol"`
	Client       string `json:"client"`
	VIP          string `json:"vip"`
	Endpoint     string `json:"endpoint"`
	Source       string `json:"source"`
	Attempts     int    `json:"attempts"`
	FromClient   uint64 `json:"messages_from_client"`
	FromEndpoint uint64 `json:"messages_from_endpoint"`
	BytesUp      uint64 `json:"bytes_from_client"`
	BytesDown    uint64 `json:"bytes_from_endpoint"`
	StreamsIn    int    `json:"streams_from_client"`
	StreamsOut   int    `json:"streams_to_client"`
	FirstByte    int64  `json:"first_byte_us"`
	End          string `json:"end"`
}

// proxy is a running sluice.
type proxy struct {
	t      testing.TB
	dir    string
	cmd    *exec.Cmd
	exited chan error

	mu      sync.Mutex
	records []record     // guarded by mu
	log     bytes.Buffer // guarded by mu
}

// node is where the proxy runs.
func startProxy(t testing.TB, node *netns.Namespace, manifest string, flags ...string) *proxy {
	t.Helper()
	p := &proxy{t: t, dir: t.TempDir(), exited: make(chan error, 1)}
	p.write(manifest)
	p.run(node, flags...)
	p.await("ready", `"message":"ready"`)
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("sluice said:\n%s", p.said())
		}
	})
	return p
}

// run starts the proxy. It waits long for an endpoint, unless flags say otherwise: in a guest on a
// busy machine, one that is up may need more than 250 ms.
func (p *proxy) run(node *netns.Namespace, flags ...string) {
	p.t.Helper()
	p.cmd = exec.Command(os.Getenv(programEnv), append([]string{"run", "--manifests", p.dir, "--hostname-override", "node", "--workers", "2",
		"--service-cidr", "10.96.0.0/16,fd00:96::/112", "--logging-format", "json", "--access-log", "-", "--dial-timeouts", "20s", "--datapath", "relay"}, flags...)...)
	out := must.Get(p.cmd.StdoutPipe())(p.t)
	p.cmd.Stderr = p
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must.OK(p.t, node.Do(p.cmd.Start))
	cmd := p.cmd
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			var r record
			if json.Unmarshal(s.Bytes(), &r) == nil {
				p.mu.Lock()
				p.records = append(p.records, r)
				p.mu.Unlock()
			}
		}
		p.exited <- cmd.Wait()
	}()
}

// Write takes the log.
func (p *proxy) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(b)
}

func (p *proxy) said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

// await waits until the log has a text.
func (p *proxy) await(what, text string) {
	p.t.Helper()
	wait.For(p.t, what, 3*patience, func() error {
		if !strings.Contains(p.said(), text) {
			return errors.New(p.said())
		}
		return nil
	})
}

// kill ends the proxy at once.
func (p *proxy) kill() {
	if p.cmd != nil {
		_ = p.cmd.Process.Kill()
		<-p.exited
		p.cmd = nil
	}
}

// stop ends the proxy in order.
func (p *proxy) stop() {
	p.t.Helper()
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	if err := <-p.exited; err != nil {
		p.t.Errorf("sluice ended: %v", err)
	}
	p.cmd = nil
}

func (p *proxy) write(manifest string) {
	p.t.Helper()
	tmp := filepath.Join(p.dir, ".all.tmp")
	err := os.WriteFile(tmp, []byte(manifest), 0o644)
	if err == nil {
		err = os.Rename(tmp, filepath.Join(p.dir, "all.yaml"))
	}
	must.OK(p.t, err)
}

// ended waits for so many records since the last call, and returns them.
func (p *proxy) ended(n int) (got []record) {
	p.t.Helper()
	wait.For(p.t, fmt.Sprintf("%d records", n), patience, func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.records) < n {
			return fmt.Errorf("%d records", len(p.records))
		}
		got, p.records = p.records, nil
		return nil
	})
	if len(got) != n {
		p.t.Errorf("%d records, want %d: %+v", len(got), n, got)
	}
	return got
}

// svc is a Service with an SCTP port 3868, and its endpoints.
type svc struct {
	name, ip  string
	spec      string // more of its spec, in lines
	meta      string // annotations, in braces
	endpoints []string
}

const (
	port       = 3868
	targetPort = 13868
)

// manifest writes Services and their EndpointSlices.
func manifest(services ...svc) string {
	var b strings.Builder
	for _, s := range services {
		if s.meta == "" {
			s.meta = "{}"
		}
		family := "IPv4"
		if strings.Contains(s.ip, ":") {
			family = "IPv6"
		}
		fmt.Fprintf(&b, `---
apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: default, annotations: %[4]s}
spec:
  clusterIP: "%[2]s"
  clusterIPs: ["%[2]s"]
  ipFamilies: [%[5]s]
  ports: [{name: s, port: %[6]d, targetPort: %[7]d, protocol: SCTP, nodePort: %[8]s}, {name: t, port: 80, targetPort: 8080, protocol: TCP}]
%[3]s---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s, namespace: default, labels: {kubernetes.io/service-name: %[1]s}}
addressType: %[5]s
ports: [{name: s, port: %[7]d, protocol: SCTP}, {name: t, port: 8080, protocol: TCP}]
endpoints:
`, s.name, s.ip, indent(s.spec), s.meta, family, port, targetPort, nodePort(s.spec))
		for _, e := range s.endpoints {
			address, node, _ := strings.Cut(e, " ")
			if node == "" {
				node = "other"
			}
			fmt.Fprintf(&b, "- {addresses: [\"%s\"], nodeName: %s, conditions: {ready: true}}\n", address, node)
		}
		if len(s.endpoints) == 0 {
			b.WriteString("  []\n")
		}
	}
	return b.String()
}

func indent(lines string) string {
	var b strings.Builder
	for l := range strings.Lines(lines) {
		if !strings.HasPrefix(l, "#") {
			b.WriteString("  " + strings.TrimSpace(l) + "\n")
		}
	}
	return b.String()
}

// nodePort returns the number in a line "# nodePort 30000" of the spec, or 0.
func nodePort(spec string) string {
	if _, n, is := strings.Cut(spec, "# nodePort "); is {
		n, _, _ = strings.Cut(n, "\n")
		return n
	}
	return "0"
}
