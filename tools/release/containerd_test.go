package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"
)

// patience bounds each wait.
const patience = 60 * time.Second

// needsRoot ends a test that cannot run.
func needsRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("SLUICE_REQUIRE_ROOT") != "" {
		t.Fatal("it needs root")
	}
	t.Skip("SKIP-NEEDS: root, for containerd")
}

// containerd runs Debian's containerd in a folder of its own, until the test ends, and
// returns a function that calls its client.
func containerd(t *testing.T) func(args ...string) *exec.Cmd {
	t.Helper()
	// A socket's path is short.
	folder, err := os.MkdirTemp("/tmp", "ctd-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	address := filepath.Join(folder, "sock")
	config := fmt.Sprintf("version = 2\nroot = %q\nstate = %q\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\naddress = %q\n[ttrpc]\naddress = %q\n",
		filepath.Join(folder, "root"), filepath.Join(folder, "state"), address, address+".ttrpc")
	if err := os.WriteFile(filepath.Join(folder, "config.toml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(folder, "log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = log.Close() })
	daemon := exec.Command("containerd", "--config", filepath.Join(folder, "config.toml"))
	daemon.Stdout, daemon.Stderr = log, log
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = daemon.Process.Signal(unix.SIGTERM)
		_ = daemon.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("containerd says\n%s", text)
		}
	})
	client := func(args ...string) *exec.Cmd {
		return exec.Command("ctr", append([]string{"--address", address}, args...)...)
	}
	until(t, "containerd answers", func() error { return client("version").Run() })
	return client
}

// until waits for a condition.
func until(t *testing.T, what string, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// pod is the part of the DaemonSet in deploy/ that a runtime applies.
type pod struct {
	Spec struct {
		Template struct {
			Spec struct {
				Containers []struct {
					SecurityContext struct{ Capabilities struct{ Add []string } }
					StartupProbe    struct{ Exec struct{ Command []string } }
				}
			}
		}
	}
}

// runtimeDefaults are the capabilities that containerd gives to a container.
var runtimeDefaults = strings.Fields("CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT KILL AUDIT_WRITE")

// The image loads into containerd, has the digest of the index, and serves a Service
// as a container of the DaemonSet does: with a read-only file system, the runtime's
// seccomp profile, and exactly its capabilities.
func TestImageRunsInContainerd(t *testing.T) {
	needsRoot(t)
	r := built(t)
	ctr := containerd(t)
	if out, err := ctr("images", "import", "--all-platforms", filepath.Join(r.out, r.imageArchive())).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	image := r.image + ":" + version
	listed, err := ctr("images", "list", "name=="+image).CombinedOutput()
	if err != nil || !strings.Contains(string(listed), "linux/"+strings.Join(r.arches, ",linux/")) {
		t.Fatalf("%v\n%s", err, listed)
	}
	t.Logf("%s", listed)

	text, err := os.ReadFile("../../deploy/kustomize/base/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var set pod
	if err := yaml.Unmarshal(text, &set); err != nil {
		t.Fatal(err)
	}
	granted := set.Spec.Template.Spec.Containers[0].SecurityContext.Capabilities.Add
	probe := set.Spec.Template.Spec.Containers[0].StartupProbe.Exec.Command
	node := newNode(t)
	manifests := t.TempDir()
	if err := os.WriteFile(filepath.Join(manifests, "web.yaml"), []byte(service), 0o644); err != nil {
		t.Fatal(err)
	}
	args := []string{"run", "--rm", "--read-only", "--seccomp", "--with-ns", "network:" + node.path,
		"--mount", "type=bind,src=" + manifests + ",dst=/etc/sluice,options=rbind:ro"}
	for _, c := range granted {
		if !slices.Contains(runtimeDefaults, c) {
			args = append(args, "--cap-add", "CAP_"+c)
		}
	}
	for _, c := range runtimeDefaults {
		if !slices.Contains(granted, c) {
			args = append(args, "--cap-drop", "CAP_"+c)
		}
	}
	id := fmt.Sprintf("sluice-%d", os.Getpid())
	container := ctr(append(args, image, id, "/usr/local/bin/sluice", "run", "--manifests=/etc/sluice", "--hostname-override=node", "--node-ip=192.0.2.1", "--service-cidr=10.96.0.0/16")...)
	said, err := os.Create(filepath.Join(t.TempDir(), "said"))
	if err != nil {
		t.Fatal(err)
	}
	defer said.Close()
	container.Stdout, container.Stderr = said, said
	if err := container.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- container.Wait() }()
	defer func() {
		log, _ := os.ReadFile(said.Name())
		t.Logf("the container says\n%s", log)
	}()
	until(t, "the Service is served", func() error {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("the container has ended: %v", err)
		default:
		}
		body, err := node.get("http://10.96.0.10/")
		if err == nil && body != "pod" {
			err = fmt.Errorf("somebody else answers: %q", body)
		}
		return err
	})
	if out, err := ctr(append([]string{"task", "exec", "--exec-id", "probe", id}, probe...)...).CombinedOutput(); err != nil || len(probe) == 0 {
		t.Errorf("the startup probe %q: %v\n%s", probe, err, out)
	}
	pids, err := ctr("task", "list").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	pid := strings.Fields(string(pids)[strings.Index(string(pids), id):])[1]
	status, err := os.ReadFile("/proc/" + pid + "/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"CapEff:\t" + mask(t, granted), "CapBnd:\t" + mask(t, granted), "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(string(status), line+"\n") {
			t.Errorf("/proc/PID/status has not %q:\n%s", line, status)
		}
	}
	if out, err := ctr("task", "kill", "--signal", "SIGTERM", id).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("the container ended with %v", err)
		}
	case <-time.After(patience):
		t.Error("the container does not end")
	}
}

// mask returns capabilities as the kernel prints them.
func mask(t *testing.T, names []string) string {
	t.Helper()
	numbers := map[string]int{"BPF": unix.CAP_BPF, "CHOWN": unix.CAP_CHOWN, "NET_ADMIN": unix.CAP_NET_ADMIN, "NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE, "NET_RAW": unix.CAP_NET_RAW, "PERFMON": unix.CAP_PERFMON}
	var bits uint64
	for _, n := range names {
		number, ok := numbers[n]
		if !ok {
			t.Fatalf("capability %s is not known here", n)
		}
		bits |= 1 << number
	}
	return fmt.Sprintf("%016x", bits)
}

const service = `apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [192.0.2.1], nodeName: node}]
`

// node is a network namespace with an address, in which an endpoint answers.
type node struct {
	path  string
	calls chan func()
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{calls: make(chan func())}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		ready <- n.enter()
		for f := range n.calls {
			f()
		}
	}()
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { close(n.calls) })
	var l net.Listener
	var err error
	n.do(func() { l, err = net.Listen("tcp4", "192.0.2.1:8080") })
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{ReadHeaderTimeout: patience, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "pod") })}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	return n
}

func (n *node) enter() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	n.path = fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
	for _, args := range []string{"link set lo up", "link add eth0 type veth peer name peer", "link set peer up", "addr add 192.0.2.1/24 dev eth0", "link set eth0 up", "route add default dev eth0"} {
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w\n%s", args, err, out)
		}
	}
	return nil
}

// do runs f in the namespace.
func (n *node) do(f func()) {
	done := make(chan struct{})
	n.calls <- func() { defer close(done); f() }
	<-done
}

// get is a client on the node.
func (n *node) get(url string) (string, error) {
	client := http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
		n.do(func() { c, err = (&net.Dialer{}).DialContext(ctx, network, address) })
		return c, err
	}}}
	response, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1000))
	if err == nil && response.StatusCode != http.StatusOK {
		err = errors.New(response.Status)
	}
	return string(body), err
}
