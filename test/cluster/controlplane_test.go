//go:build cluster

package cluster

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

const (
	apiServer = "https://127.0.0.1:6443"
	etcd      = "http://127.0.0.1:2379"
	// patience bounds each wait for a program or a condition.
	patience = 60 * time.Second
)

// users have one token each, named like the user.
var users = []struct{ name, groups string }{
	{"admin", "system:masters"},
	{"system:kube-proxy", ""},
	{"sluice", ""},
}

// controlPlane holds the programs of a control plane, which run on the node.
type controlPlane struct {
	t    *testing.T
	node *netns.Host
	dir  string
	// programs that tests end and start again
	api, store, controllers *netns.Cmd

	admin *api
}

// program returns the path of a program of the control plane.
func program(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("SLUICE_CLUSTER_BIN")
	if dir == "" {
		t.Fatal("SLUICE_CLUSTER_BIN is not set: run make test-cluster")
	}
	return filepath.Join(dir, name)
}

// startControlPlane runs etcd, the API server and the controllers that tests
// need, until the test ends.
func startControlPlane(t *testing.T, node *netns.Host) *controlPlane {
	t.Helper()
	c := &controlPlane{t: t, node: node, dir: t.TempDir()}
	key := must.Get(rsa.GenerateKey(rand.Reader, 2048))(t)
	c.write("sa.key", string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})))
	var tokens strings.Builder
	for _, u := range users {
		fmt.Fprintf(&tokens, "token-%s,%s,%s,%q\n", u.name, u.name, u.name, u.groups)
		c.write(kubeconfigName(u.name), kubeconfig(apiServer, u.name))
	}
	c.write("tokens.csv", tokens.String())

	c.startStore("etcd")
	c.startAPIServer()
	c.admin = newAPI(t, c.config("admin"))
	c.awaitAPIServer()
	c.controllers = c.start("kube-controller-manager", program(t, "kube-controller-manager"),
		"--kubeconfig", c.kubeconfig("admin"), "--leader-elect=false", "--secure-port=0",
		"--controllers=endpointslice-controller,endpointslice-mirroring-controller")
	return c
}

// startStore starts etcd in its own directory.
func (c *controlPlane) startStore(folder string) {
	c.t.Helper()
	c.store = c.start("etcd", program(c.t, "etcd"), "--data-dir", filepath.Join(c.dir, folder), "--unsafe-no-fsync",
		"--listen-client-urls", etcd, "--advertise-client-urls", etcd,
		"--listen-peer-urls", "http://127.0.0.1:2380", "--logger", "zap", "--log-level", "error")
}

func (c *controlPlane) startAPIServer() {
	c.t.Helper()
	// make test-cluster collects garbage less often; benchmarks, as often as others.
	c.api = c.start("kube-apiserver", "env", "GOGC="+os.Getenv("SLUICE_CLUSTER_GOGC"), program(c.t, "kube-apiserver"),
		"--etcd-servers", etcd, "--bind-address", "0.0.0.0", "--secure-port", "6443",
		"--advertise-address", c.node.IPv4.String(), "--cert-dir", filepath.Join(c.dir, "certs"),
		"--service-cluster-ip-range", "10.96.0.0/16,fd00:10:96::/112",
		"--token-auth-file", filepath.Join(c.dir, "tokens.csv"), "--authorization-mode", "RBAC",
		"--service-account-issuer", "https://cluster.test", "--service-account-key-file", filepath.Join(c.dir, "sa.key"),
		"--service-account-signing-key-file", filepath.Join(c.dir, "sa.key"), "--disable-admission-plugins", "ServiceAccount")
}

// kill ends a program like a crash.
func kill(c *netns.Cmd) {
	_ = c.Process.Kill()
	_ = c.Wait()
}

func (c *controlPlane) awaitAPIServer() {
	c.t.Helper()
	c.until("the API server is ready", c.admin.ready)
}

// start runs a program on the node. Its output goes to a file, which is printed if
// the test fails.
func (c *controlPlane) start(name, path string, args ...string) *netns.Cmd {
	c.t.Helper()
	log := must.Get(os.Create(filepath.Join(c.dir, fmt.Sprintf("%s-%d.log", name, time.Now().UnixNano()))))(c.t)
	cmd := c.node.Command(c.t, path, args...)
	cmd.Stdout, cmd.Stderr = log, log
	must.OK(c.t, cmd.Start())
	c.t.Cleanup(func() {
		defer log.Close()
		if !c.t.Failed() {
			return
		}
		text, _ := os.ReadFile(log.Name())
		lines := strings.Split(string(text), "\n")
		c.t.Logf("the end of the output of %s:\n%s", name, strings.Join(lines[max(len(lines)-15, 0):], "\n"))
	})
	return cmd
}

// said returns a program's output.
func (c *controlPlane) said(name string) string {
	files, _ := filepath.Glob(filepath.Join(c.dir, name+"-*.log"))
	var all strings.Builder
	for _, f := range files {
		text, _ := os.ReadFile(f)
		all.Write(text)
	}
	return all.String()
}

func (c *controlPlane) write(name, text string) {
	c.t.Helper()
	must.OK(c.t, os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o600))
}

func kubeconfigName(user string) string { return strings.ReplaceAll(user, ":", "-") + ".conf" }

func (c *controlPlane) kubeconfig(user string) string {
	return filepath.Join(c.dir, kubeconfigName(user))
}

func kubeconfig(server, user string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %q}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, server, "token-"+user)
}

// config connects from the test's own process to the API server.
func (c *controlPlane) config(user string) *rest.Config {
	return &rest.Config{
		Host: apiServer, BearerToken: "token-" + user, TLSClientConfig: rest.TLSClientConfig{Insecure: true}, QPS: 1000, Burst: 1000,
		Dial: func(_ context.Context, network, address string) (net.Conn, error) {
			return c.node.Dial(network, address)
		},
	}
}

// get queries an HTTP server on the node. Its result begins with the status.
func (c *controlPlane) get(url string) (string, error) {
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	return c.do(request)
}

// do is get for any request.
func (c *controlPlane) do(request *http.Request) (string, error) {
	client := http.Client{Timeout: answer, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
			return c.node.Dial(network, address)
		},
	}}
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body := new(strings.Builder)
	if _, err := fmt.Fprintf(body, "%d ", response.StatusCode); err != nil {
		return "", err
	}
	buffer := make([]byte, 64<<10)
	for {
		n, err := response.Body.Read(buffer)
		body.Write(buffer[:n])
		if err != nil {
			return body.String(), nil
		}
	}
}

// until waits for a condition.
func (c *controlPlane) until(what string, condition func() error) {
	c.t.Helper()
	wait.For(c.t, what, patience, condition)
}
