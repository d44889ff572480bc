package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/socket"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/execserver"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// fleet is an API server with a pod of Sluice on each node, whose command run plays. It
// knows no WebSockets.
type fleet struct {
	kubeconfig string
	pods       []corev1.Pod
	run        func(ctx context.Context, pod string, stdin io.Reader, stdout, stderr io.Writer) error
	running    atomic.Int32
	most       atomic.Int32 // of running
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	const pods = "/api/v1/namespaces/kube-system/pods"
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, exec := strings.CutSuffix(strings.TrimPrefix(r.URL.Path, pods+"/"), "/exec")
		switch {
		case r.URL.Path == pods && r.URL.Query().Get("labelSelector") == "app.kubernetes.io/name=sluice":
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(&corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}, Items: f.pods})
		case exec && r.Header.Get("Upgrade") != "websocket":
			execserver.Serve(w, r, func(ctx context.Context, command []string, stdin io.Reader, stdout, stderr io.Writer) error {
				defer f.running.Add(-1)
				if n := f.running.Add(1); n > f.most.Load() {
					f.most.Store(n)
				}
				if got := fmt.Sprint(command, r.URL.Query()["container"]); got != "[sluice dial-stdio] [sluice]" {
					return errors.New(got)
				}
				return f.run(ctx, name, stdin, stdout, stderr)
			})
		default:
			http.Error(w, "no", http.StatusBadRequest)
		}
	}))
	t.Cleanup(server.Close)
	t.Cleanup(server.CloseClientConnections)
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: %q}}]\ncontexts: [{name: x, context: {cluster: c}}]\ncurrent-context: x\n", server.URL)
	must.OK(t, os.WriteFile(f.kubeconfig, []byte(text), 0o600))
	return f
}

func (f *fleet) add(node string, phase corev1.PodPhase) {
	f.pods = append(f.pods, corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "sluice-" + node},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "sluice"}}}, Status: corev1.PodStatus{Phase: phase},
	})
}

// answer returns what fleet.run is to be for proxies that all answer alike.
func (f *fleet) answer(t *testing.T, answer func(*http.Request) any) func(context.Context, string, io.Reader, io.Writer, io.Writer) error {
	t.Helper()
	admin := filepath.Join(t.TempDir(), "admin.sock")
	s, err := socket.Listen(admin, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == api.PathVersion {
			_ = json.NewEncoder(w).Encode(&api.Version{API: "v1"})
			return
		}
		_ = json.NewEncoder(w).Encode(answer(r))
	}))
	must.OK(t, err)
	ctx, stop := context.WithCancel(context.Background())
	t.Cleanup(stop)
	go func() { _ = s.Serve(ctx) }()
	return func(ctx context.Context, _ string, stdin io.Reader, stdout, _ io.Writer) error {
		cmd := newRootCommand()
		cmd.SetArgs([]string{"dial-stdio", "--admin-socket", admin})
		cmd.SetIn(stdin)
		cmd.SetOut(stdout)
		return cmd.ExecuteContext(ctx)
	}
}

// sluice runs a command as the plugin, and returns what it writes.
func (f *fleet) sluice(args ...string) (out, said string, err error) {
	cmd, args := commandFor(append([]string{"/usr/local/bin/kubectl-sluice"}, args...))
	var stdout, stderr bytes.Buffer
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	cmd.SetArgs(append(args, "--kubeconfig", f.kubeconfig))
	err = cmd.ExecuteContext(context.Background())
	return stdout.String(), stderr.String(), err
}

// TestAllNodes: rows of the nodes that answer, and the others named with the reason.
func TestAllNodes(t *testing.T) {
	f := newFleet(t)
	for _, node := range []string{"e", "hangs", "c", "broken", "a", "starts", "d", "b"} {
		phase := corev1.PodRunning
		if node == "starts" {
			phase = corev1.PodPending
		}
		f.add(node, phase)
	}
	answers := f.answer(t, func(r *http.Request) any {
		return &api.Connections{Matched: 2, Connections: []api.Connection{{ID: 1, State: "open", DurationUS: 1}, {ID: 2, State: "open", DurationUS: 2}}}
	})
	f.run = func(ctx context.Context, pod string, stdin io.Reader, stdout, stderr io.Writer) error {
		switch pod {
		case "sluice-hangs":
			<-ctx.Done()
			return nil
		case "sluice-broken":
			_, _ = fmt.Fprintln(stderr, "sluice: no proxy\n  runs here")
			return errors.New("exit status 1")
		}
		return answers(ctx, pod, stdin, stdout, stderr)
	}
	out, said, err := f.sluice("conns", "--timeout", "5s", "--parallel", "3", "--sort=-duration", "--limit", "6")
	if !errors.Is(err, errReported) {
		t.Error(err)
	}
	var rows []string
	for _, line := range strings.Split(strings.TrimSpace(out), "\n")[1:] {
		rows = append(rows, strings.Fields(line)[0])
	}
	slices.Sort(rows[:min(5, len(rows))])
	if len(rows) != 6 || strings.Join(rows[:5], "") != "abcde" {
		t.Errorf("the longest of each node, and one more: %q of\n%s", rows, out)
	}
	if want := `and 4 more: see --limit
3 of 8 nodes did not answer:
  broken: pod sluice-broken: no proxy runs here
  hangs: pod sluice-hangs: no answer in 5s
  starts: its pod sluice-starts is Pending
`; said != want {
		t.Errorf("it says\n%s, want\n%s", said, want)
	}
	wait.For(t, "no command runs in a pod any more", 20*time.Second, func() error {
		if n := f.running.Load(); n > 0 {
			return fmt.Errorf("%d run", n)
		}
		return nil
	})
}

// TestFailuresOfNodes: failures are summed up on each node, or each of them is listed.
func TestFailuresOfNodes(t *testing.T) {
	f := newFleet(t)
	f.add("a", corev1.PodRunning)
	f.add("b", corev1.PodRunning)
	at := time.Now()
	f.run = f.answer(t, func(*http.Request) any {
		one := func(age time.Duration, why, from string) api.Failure {
			return api.Failure{Time: at.Add(-age), Service: "shop/cart:http", Endpoint: "10.244.1.7:80", Error: why, Client: from}
		}
		return &api.Failures{Failures: []api.Failure{one(1, "refused", "10.1.0.1:1"), one(2, "timeout", "10.1.0.1:2"), one(3, "timeout", "10.1.0.2:3")}}
	})
	for _, p := range []struct {
		args []string
		want string
		said string
	}{
		{[]string{"--limit", "3"}, "a 2 timeout 2; b 2 timeout 2; a 1 refused 1", "and 1 more: see --limit\n"},
		{[]string{"--each"}, "a refused; b refused; a timeout; b timeout; a timeout; b timeout", ""},
	} {
		out, said, err := f.sluice(append([]string{"failures", "-o", "json", "--parallel", "1"}, p.args...)...)
		var rows []string
		for line := range strings.Lines(out) {
			var r struct {
				ProxyNode string `json:"proxy_node"`
				Count     int
				Error     string
				Clients   int
			}
			must.OK(t, json.Unmarshal([]byte(line), &r))
			row := r.ProxyNode + " " + r.Error
			if r.Count > 0 {
				row = fmt.Sprintf("%s %d %s %d", r.ProxyNode, r.Count, r.Error, r.Clients)
			}
			rows = append(rows, row)
		}
		if got := strings.Join(rows, "; "); got != p.want || said != p.said || err != nil {
			t.Errorf("%v: %s, %q, %v; want %s", p.args, got, said, err, p.want)
		}
	}
}

// TestParallel: of many nodes that do not answer, few are waited for at the same time.
func TestParallel(t *testing.T) {
	f := newFleet(t)
	for i := range 12 {
		f.add(fmt.Sprint("node-", i), corev1.PodRunning)
	}
	f.run = func(ctx context.Context, _ string, _ io.Reader, _, _ io.Writer) error {
		<-ctx.Done()
		return nil
	}
	if _, said, err := f.sluice("status", "--timeout", "1s", "--parallel", "3"); !strings.Contains(said, "12 of 12 nodes did not answer") {
		t.Errorf("%v: %s", err, said)
	}
	// Those that were given up end while the next begin.
	if most := f.most.Load(); most < 3 || most > 6 {
		t.Errorf("%d nodes at the same time, want 3", most)
	}
}

// TestPluginName: by its name the program is a plugin, and its help says what people type.
func TestPluginName(t *testing.T) {
	for name, want := range map[string]string{
		"/bin/sluice": "sluice", "kubectl-sluice": "kubectl sluice", "/home/me/.krew/bin/kubectl-sluice": "kubectl sluice", "kubectl_complete-sluice": "kubectl sluice",
	} {
		cmd, args := commandFor([]string{name, "conns"})
		check.Equalf(t, cmd.DisplayName(), want, "%s", name)
		completes := args[0] == cobra.ShellCompRequestCmd
		if args[len(args)-1] != "conns" || completes != strings.Contains(name, "complete") {
			t.Errorf("%s: %q", name, args)
		}
	}
	f := newFleet(t)
	out, _, err := f.sluice("slow", "--help")
	if err != nil || !strings.Contains(out, "kubectl sluice slow [FILTER]") {
		t.Errorf("%v\n%s", err, out)
	}
	if _, _, err := f.sluice("status"); err == nil || !strings.Contains(err.Error(), "no pod in namespace kube-system has the label") {
		t.Error(err)
	}
}
