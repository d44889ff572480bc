// Package proxy runs sluice on a node, for tests that put other programs behind Services.
package proxy

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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

const metricsAddress = "127.0.0.1:10249"

// startTimeout allows for the kernel's verifier on a busy machine.
const startTimeout = 5 * time.Minute

// Proxy is a `sluice run` on a node.
type Proxy struct {
	Log output.Text
	Cmd *netns.Cmd

	t    *testing.T
	node *netns.Host
	dir  string // of manifests
	http http.Client
}

// New prepares a proxy without manifests.
func New(t *testing.T, node *netns.Host) *Proxy {
	t.Helper()
	p := &Proxy{t: t, node: node, dir: t.TempDir()}
	p.http.Transport = &http.Transport{DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
		return node.Dial(network, address)
	}}
	return p
}

// Program returns the binary that SLUICE_BIN names, or builds one: the test runs in a folder of test.
func Program(t *testing.T) string {
	t.Helper()
	path := os.Getenv("SLUICE_BIN")
	if path == "" {
		path = filepath.Join(t.TempDir(), "sluice")
		build := exec.Command("go", "build", "-buildvcs=false", "-o", path, "./cmd/sluice")
		build.Dir = "../.."
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("go build: %v\n%s", err, out)
		}
	}
	path, err := filepath.Abs(path)
	must.OK(t, err)
	return path
}

// Write replaces the manifests at once.
func (p *Proxy) Write(text string) {
	p.t.Helper()
	path := filepath.Join(p.dir, "all.yaml")
	must.OK(p.t, os.WriteFile(path+".new", []byte(text), 0o600))
	must.OK(p.t, os.Rename(path+".new", path))
}

// Start runs the proxy until the test ends, and returns when it serves. A program with arguments of
// its own may run it.
func (p *Proxy) Start(program []string, flags ...string) {
	p.t.Helper()
	args := slices.Concat(program, []string{Program(p.t), "run", "--manifests", p.dir, "--hostname-override", "node",
		"--service-cidr", "10.96.0.0/16,fd00:96::/112", "--metrics-bind-address", metricsAddress}, flags)
	p.Cmd = p.node.Command(p.t, args[0], args[1:]...)
	p.Cmd.Stdout, p.Cmd.Stderr = &p.Log, &p.Log
	p.t.Cleanup(func() {
		p.http.CloseIdleConnections()
		if p.t.Failed() {
			p.t.Logf("sluice said:\n%s", &p.Log)
		}
	})
	must.OK(p.t, p.Cmd.Start())
	wait.For(p.t, "sluice is ready", startTimeout, func() error {
		if !p.Log.Contains(" ready ") {
			return errors.New(p.Log.String())
		}
		return nil
	})
}

// Stop ends the proxy with SIGTERM.
func (p *Proxy) Stop() {
	p.t.Helper()
	p.http.CloseIdleConnections()
	must.OK(p.t, p.Cmd.Process.Signal(syscall.SIGTERM))
	must.OKf(p.t, p.Cmd.Wait(), "sluice")
}

// Metric returns the sum of a metric's series that have all texts.
func (p *Proxy) Metric(name string, texts ...string) (sum float64, err error) {
	response, err := p.http.Get("http://" + metricsAddress + "/metrics")
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		cut := strings.LastIndexByte(lines.Text(), ' ')
		series, labels, _ := strings.Cut(lines.Text()[:max(cut, 0)], "{")
		if series != name || slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(labels, text) }) {
			continue
		}
		value, err := strconv.ParseFloat(lines.Text()[cut+1:], 64)
		if err != nil {
			return 0, err
		}
		sum += value
	}
	return sum, nil
}
