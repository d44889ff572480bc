package node

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/internal/scratch"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect/choose"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/manifests"
	"github.com/sluice-proxy/sluice/stream"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// webManifest is a Service with an endpoint at the address of the test's host.
const webManifest = `apiVersion: v1
kind: Service
metadata: {namespace: shop, name: web}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [192.0.2.1], nodeName: node}]
`

// config returns that of a Proxy for this manifest.
func config(t *testing.T, manifest string) Config {
	t.Helper()
	dir := t.TempDir()
	must.OK(t, os.WriteFile(filepath.Join(dir, "web.yaml"), []byte(manifest), 0o600))
	return Config{
		Version: "test", Workers: 1, AdminSocket: Off,
		Source:    Source{Manifests: dir, MaxManifestSize: manifests.DefaultMaxFileSize},
		Store:     service.StoreOptions{NodeName: "node"},
		Policy:    policy.Config{NodeName: "node", NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}},
		Steering:  choose.Options{Mode: choose.Auto, Backend: choose.Auto, Table: "node-test"},
		Balancer:  balancer.Options{Plan: balancer.DefaultPlan()},
		Stream:    stream.Config{Backlog: 16, MaxMessage: 65536, Streams: 1},
		Datagram:  datagram.Config{Timeout: time.Minute, StreamTimeout: time.Minute},
		AccessLog: conntrack.LogOptions{Path: Off},
	}
}

// inOwnNamespace runs a test again in a process whose network namespace is its own, with the
// endpoint of webManifest, which answers by TCP and UDP. It returns false where the test is over.
func inOwnNamespace(t *testing.T) bool {
	t.Helper()
	const inside = "SLUICE_TEST_INSIDE"
	if os.Getenv(inside) == "" {
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), inside+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		must.Run(t, cmd)
		return false
	}
	host := must.Get(scratch.Own("host"))(t)
	t.Cleanup(host.Close)
	must.OK(t, errors.Join(os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0), host.Up("lo"), host.AddAddresses("lo", netip.MustParsePrefix("192.0.2.1/32"))))
	l := must.Get(net.Listen("tcp", "192.0.2.1:8080"))(t)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("web\n"))
			c.Close()
		}
	}()
	u := must.Get(net.ListenPacket("udp", "192.0.2.1:8080"))(t)
	t.Cleanup(func() { _ = u.Close() })
	go func() {
		b := make([]byte, 100)
		for {
			_, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = u.WriteTo([]byte("web\n"), from)
		}
	}()
	return true
}

// askWeb asks the Service of webManifest.
func askWeb() error {
	c, err := net.DialTimeout("tcp", "10.96.0.10:80", 10*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	line, err := bufio.NewReader(c).ReadString('\n')
	if err == nil && line != "web\n" {
		err = errors.New("the answer is " + line)
	}
	return err
}

// run runs a proxy, until the returned function stops it.
func run(t *testing.T, p *Proxy) (ctx context.Context, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx, nil) }()
	return ctx, sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			check.OKf(t, err, "Run")
		case <-time.After(time.Minute):
			t.Fatal("Run does not end")
		}
	})
}

// TestProxyInTheProcess starts a Proxy in this process, in a network namespace that is the
// process's own: it serves, takes another policy, and stops in order.
func TestProxyInTheProcess(t *testing.T) {
	if !inOwnNamespace(t) {
		return
	}
	p := must.Get(New(config(t, webManifest), zerolog.New(zerolog.NewTestWriter(t))))(t)
	ctx, stop := run(t, p)
	defer stop()
	wait.For(t, "an answer of the Service", 30*time.Second, askWeb)
	u := Update{Policy: config(t, "").Policy}
	u.Policy.MasqueradeAll = true
	check.OK(t, p.Update(ctx, u))
	check.OKf(t, askWeb(), "after an update")
	stop()
	if !p.policy.MasqueradeAll {
		t.Error("the update was not in force")
	}
	if err := askWeb(); err == nil {
		t.Error("the Service answers although the Proxy has stopped")
	}
	if err := p.Update(ctx, u); err == nil {
		t.Error("a Proxy that has stopped takes an update")
	}
}
