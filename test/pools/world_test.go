package pools

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// nobody is the user that runs the servers.
const nobody = 65534

const metricsAddress = "127.0.0.1:10249"

// world is a lab with a proxy and a Service for each kind of server.
type world struct {
	t *testing.T
	*netns.Lab
	manifests string
	log       output.Text
	http      http.Client
}

// start runs the proxy, with a number of the backends as endpoints.
func start(t *testing.T, lab *netns.Lab, endpoints int) *world {
	t.Helper()
	w := &world{t: t, Lab: lab, manifests: t.TempDir()}
	w.http.Transport = &http.Transport{DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
		return lab.Node.Dial(network, address)
	}}
	binary := os.Getenv("SLUICE_BIN")
	if binary == "" {
		binary = filepath.Join(t.TempDir(), "sluice")
		build := exec.Command("go", "build", "-buildvcs=false", "-o", binary, "./cmd/sluice")
		build.Dir = "../.."
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("go build: %v\n%s", err, out)
		}
	}
	w.put(endpoints)
	cmd := lab.Node.Command(t, binary, "run", "--manifests", w.manifests, "--hostname-override", "node", "--service-cidr", "10.96.0.0/16",
		"--access-log", "off", "--metrics-bind-address", metricsAddress, "--bpf-root", "", "--dial-timeouts", "10s,10s")
	cmd.Stdout, cmd.Stderr = &w.log, &w.log
	must.OK(t, cmd.Start())
	wait.For(t, "sluice is ready", 5*time.Minute, func() error { // the kernel's verifier takes long on a busy machine
		if !strings.Contains(w.log.String(), " ready ") {
			return errors.New(w.log.String())
		}
		return nil
	})
	t.Cleanup(func() {
		w.http.CloseIdleConnections()
		if t.Failed() {
			t.Logf("sluice said:\n%s", &w.log)
		}
	})
	return w
}

// put writes the Services with the first backends as endpoints.
func (w *world) put(endpoints int) {
	w.t.Helper()
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
	path := filepath.Join(w.manifests, "services.yaml")
	err := os.WriteFile(path+".new", []byte(b.String()), 0o600)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	must.OK(w.t, err)
}

// metric returns the sum of a metric's series that have all texts.
func (w *world) metric(name string, texts ...string) (sum float64, err error) {
	response, err := w.http.Get("http://" + metricsAddress + "/metrics")
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
lines:
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		line := lines.Text()
		if !strings.HasPrefix(line, name+"{") {
			continue
		}
		for _, text := range texts {
			if !strings.Contains(line, text) {
				continue lines
			}
		}
		value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
		if err != nil {
			return 0, err
		}
		sum += value
	}
	return sum, nil
}

// find returns the path of a program of Debian.
func find(t *testing.T, name string) string {
	t.Helper()
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	for _, pattern := range []string{"/usr/sbin/" + name, "/usr/lib/postgresql/*/bin/" + name} {
		if list, _ := filepath.Glob(pattern); len(list) > 0 {
			return list[len(list)-1]
		}
	}
	t.Fatalf("%s is missing: test/programs/install-deps.sh installs it", name)
	return ""
}

// directory makes a directory that belongs to nobody.
func directory(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must.OK(t, errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chown(dir, nobody, nobody), os.Chmod(dir, 0o700)))
	return dir
}

// serve runs a program on a host as nobody, until the test ends.
func serve(t *testing.T, h *netns.Host, dir, name string, args ...string) {
	t.Helper()
	cmd := as(h.Command(t, find(t, name), args...), dir)
	log := &output.Text{}
	cmd.Stdout, cmd.Stderr = log, log
	must.OK(t, cmd.Start())
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s on %s said:\n%s", name, h.Name(), log)
		}
	})
}

func as(c *netns.Cmd, dir string) *netns.Cmd {
	c.Dir, c.WaitDelay = dir, wait.Patience
	c.Env = append(os.Environ(), "HOME="+dir, "LC_ALL=C")
	c.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	return c
}
