//go:build cluster

package cluster

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
)

// fleet is a cluster of three nodes with a proxy on each, which kubectl sluice asks.
type fleet struct {
	*world
	names    []string
	nodes    []*netns.Host
	proxies  []*netns.Cmd
	kubelets []*kubelet
	path     string // where kubectl finds its plugin
	vip      string // of the Service web
}

// newFleet starts it. The user sluice may do what the documentation says that people need.
func newFleet(t *testing.T) *fleet {
	t.Helper()
	w := setUp(t)
	w.namespace = "default"
	w.admin.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node3"}})
	f := &fleet{world: w, names: []string{"node", "node2", "node3"}, nodes: []*netns.Host{w.hosts.Node, w.hosts.Node2, w.hosts.Outside}}
	svc := w.service("web", nil)
	w.slice("web", w.pod1())
	f.vip = at(svc.Spec.ClusterIP, 80)
	w.write("other-hosts.conf", kubeconfig("https://"+at(w.hosts.Node.IPv4.String(), 6443), "admin"))
	for i, name := range f.names {
		f.kubelets = append(f.kubelets, startKubelet(t, f.nodes[i]))
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		w.admin.read(n)
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: f.nodes[i].IPv4.String()}}
		n.Status.DaemonEndpoints.KubeletEndpoint.Port = kubeletPort
		w.admin.update(n, "status")
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "sluice-" + name, Labels: map[string]string{"app.kubernetes.io/name": "sluice"}},
			Spec:       corev1.PodSpec{NodeName: name, Containers: []corev1.Container{{Name: "sidecar", Image: "i"}, {Name: "sluice", Image: "i"}}},
		}
		w.admin.create(pod)
		pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
		w.admin.update(pod, "status")
		cmd := f.nodes[i].Command(t, os.Getenv("SLUICE_BIN"), "run", "--kubeconfig", filepath.Join(w.dir, "other-hosts.conf"),
			"--hostname-override", name, "--access-log", "off")
		must.OK(t, cmd.Start())
		f.proxies = append(f.proxies, cmd)
	}
	f.grantPeople()
	bin := t.TempDir()
	own, err := filepath.Abs(os.Getenv("SLUICE_BIN"))
	if err == nil {
		err = os.Symlink(own, filepath.Join(bin, "kubectl-sluice"))
	}
	must.OK(t, err)
	f.path = bin + ":" + os.Getenv("PATH")
	w.until("all proxies serve", func() error {
		if out, said, code := f.plugin("status"); code != 0 {
			return fmt.Errorf("status %d: %s%s", code, out, said)
		}
		return nil
	})
	return f
}

// grantPeople gives the user sluice the rights that docs/observing.md names.
func (f *fleet) grantPeople() {
	f.t.Helper()
	f.grant([]right{{"", "pods", "list"}, {"", "pods/exec", "get"}, {"", "pods/exec", "create"}})
	f.bind()
}

// pluginCommand prepares kubectl sluice as the user sluice.
func (f *fleet) pluginCommand(args ...string) *netns.Cmd {
	f.t.Helper()
	cmd := f.hosts.Node.Command(f.t, program(f.t, "kubectl"), append([]string{"sluice"}, args...)...)
	cmd.Env = []string{"PATH=" + f.path, "HOME=" + f.dir, "KUBECONFIG=" + f.kubeconfig("sluice")}
	return cmd
}

// plugin runs kubectl sluice as the user sluice, and returns its output, its messages and
// its exit status.
func (f *fleet) plugin(args ...string) (out, said string, status int) {
	f.t.Helper()
	cmd := f.pluginCommand(args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		f.t.Fatal(err)
	}
	return stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()
}

// pluginRows runs kubectl sluice with the output json, and returns for each node's proxy what
// key says of its rows. All nodes have to answer.
func (f *fleet) pluginRows(key func(row map[string]any) string, args ...string) (map[string][]string, error) {
	f.t.Helper()
	out, said, status := f.plugin(append(args, "-o", "json")...)
	if status != 0 {
		return nil, fmt.Errorf("%v: status %d, %s", args, status, said)
	}
	rows := make(map[string][]string)
	for line := range strings.Lines(out) {
		var row map[string]any
		if err := json.Unmarshal([]byte(line), &row); err != nil {
			return nil, fmt.Errorf("%v: %q: %w", args, line, err)
		}
		node := fmt.Sprint(row["proxy_node"])
		rows[node] = append(rows[node], key(row))
	}
	return rows, nil
}

// onEach expects the same rows of each node.
func (f *fleet) onEach(want string, key func(row map[string]any) string, args ...string) {
	f.t.Helper()
	f.until(fmt.Sprint("each node has ", want, " of ", args), func() error {
		rows, err := f.pluginRows(key, args...)
		for _, name := range f.names {
			if got := fmt.Sprint(rows[name]); err == nil && got != want {
				err = fmt.Errorf("%s: %s", name, got)
			}
		}
		return err
	})
}

// field returns a key for pluginRows: some fields' values.
func field(names ...string) func(map[string]any) string {
	return func(row map[string]any) string {
		var all []string
		for _, n := range names {
			all = append(all, fmt.Sprint(row[n]))
		}
		return strings.Join(all, " ")
	}
}

// documented returns the commands of docs/observing.md that ask the whole cluster, with the names
// of this one.
func documented(t *testing.T) (all [][]string) {
	t.Helper()
	names := strings.NewReplacer("shop/cart-2", "default/web-1", "shop/cart", "default/web")
	for line := range strings.Lines(string(must.Read(t, "../../docs/observing.md"))) {
		for _, m := range regexp.MustCompile("`kubectl sluice ([^`]*)`").FindAllStringSubmatch(line, -1) {
			if strings.HasPrefix(line, "| ") {
				all = append(all, strings.Fields(names.Replace(m[1])))
			}
		}
	}
	return all
}

// TestPlugin asks three nodes through a real API server, by kubectl and as a user with no
// other rights than those of the documentation. Then one node after the other stops.
func TestPlugin(t *testing.T) {
	f := newFleet(t)
	dead := f.service("dead", nil)
	f.slice("dead", endpoint{host: f.hosts.Pods[0], node: "node", port: 8999})
	for _, h := range f.nodes {
		c, err := h.Dial("tcp", f.vip)
		if err == nil {
			_, err = netns.AskOn(c)
		}
		must.OKf(t, err, "%s", h.Name())
		defer c.Close()
	}
	play := func(name string, test func(t *testing.T)) {
		t.Run(name, func(t *testing.T) {
			defer func(before *testing.T) { f.t, f.admin.t = before, before }(f.t)
			f.t, f.admin.t = t, t
			test(t)
		})
	}
	play("rows of each node", func(t *testing.T) {
		f.onEach("[default/web:p open]", field("service", "state"), "conns", "service=default/web")
		f.onEach("[default/web:p 1]", field("service", "open"), "top", "--interval", "1s", "service=default/web")
		if out, said, status := f.plugin("slow", "--for", "1s"); out != "" || !strings.HasPrefix(said, "no endpoint is slow") || status != 0 {
			t.Errorf("slow: %d, %s%s", status, out, said)
		}
		f.until("each node has failures", func() error {
			for _, h := range f.nodes {
				_, _ = askWithin(time.Second, h, "tcp", at(dead.Spec.ClusterIP, 80)) // its endpoint refuses, again and again
			}
			rows, err := f.pluginRows(field("service", "error"), "failures", "--service", "default/dead")
			for _, name := range f.names {
				if err == nil && (len(rows[name]) == 0 || rows[name][0] != "default/dead:p refused") {
					err = fmt.Errorf("%s: %v", name, rows[name])
				}
			}
			return err
		})
		out, said, status := f.plugin("status")
		for i, line := range append([]string{"PROXY NODE "}, f.names...) {
			if lines := strings.Split(out, "\n"); !strings.HasPrefix(lines[i], line) || i > 0 && !strings.Contains(lines[i], " in force ") {
				t.Errorf("status %d, %s: line %d of\n%s", status, said, i, out)
			}
		}
	})
	play("documented commands", func(t *testing.T) {
		commands := documented(t)
		for _, args := range commands {
			if args[0] == "web" {
				continue // it goes on: the page below
			}
			if args[0] == "slow" {
				args = append(args, "--for", "1s")
			}
			if out, said, status := f.plugin(args...); status != 0 {
				t.Errorf("kubectl sluice %v: status %d\n%s%s", args, status, out, said)
			}
		}
		if len(commands) < 5 {
			t.Errorf("only %v", commands)
		}
	})
	play("chosen nodes, and bounds", func(t *testing.T) {
		out, said, status := f.plugin("conns", "service=default/web", "--node", "node2,node9")
		if !strings.Contains(out, "\nnode2 ") || strings.Contains(out, "\nnode ") || status != 1 || said != "1 of 2 nodes did not answer:\n  node9: it has no pod of Sluice\n" {
			t.Errorf("status %d\n%s%s", status, out, said)
		}
		out, said, status = f.plugin("conns", "service=default/web", "--limit", "2", "--sort=-duration", "--parallel", "1")
		if strings.Count(out, "\n") != 3 || said != "and 1 more: see --limit\n" || status != 0 {
			t.Errorf("status %d\n%s%s", status, out, said)
		}
		if out, said, status = f.plugin("tap", "--parallel", "2"); status != 1 || !strings.Contains(said, "there are 3 nodes") {
			t.Errorf("status %d\n%s%s", status, out, said)
		}
		if out, said, status = f.plugin("conns", "nix=1"); status != 1 || !strings.Contains(said, "the filter is wrong") {
			t.Errorf("status %d\n%s%s", status, out, said)
		}
	})
	play("tap", func(t *testing.T) {
		cmd := f.pluginCommand("tap", "service=default/web", "-o", "json")
		var out output.Text
		cmd.Stdout = &out
		must.OK(t, cmd.Start())
		f.until("a record of each node has come", func() error {
			for i, h := range f.nodes {
				if _, err := askWithin(answer, h, "tcp", f.vip); err != nil {
					return err
				}
				if !strings.Contains(out.String(), fmt.Sprintf(`"proxy_node":%q`, f.names[i])) {
					return fmt.Errorf("none of %s:\n%s", f.names[i], out.String())
				}
			}
			return nil
		})
		_ = cmd.Process.Signal(os.Interrupt)
		check.OK(t, cmd.Wait())
		if n := strings.Count(out.String(), `"proxy_node"`); n != strings.Count(out.String(), "\n") {
			t.Errorf("%d records with a node:\n%s", n, out.String())
		}
		f.until("no command is left in a pod", func() error {
			for i, k := range f.kubelets {
				if n := k.running.Load(); n > 0 {
					return fmt.Errorf("%s: %d", f.names[i], n)
				}
			}
			return nil
		})
	})
	play("page", func(t *testing.T) {
		cmd := f.pluginCommand("web", "--listen", "18080")
		must.OK(t, cmd.Start())
		f.until("the page has a connection of each node", func() error {
			body, err := f.get("http://127.0.0.1:18080/v1/connections?filter=service%3Ddefault/web")
			for _, name := range f.names {
				if err == nil && !strings.Contains(body, fmt.Sprintf(`"proxy_node":%q`, name)) {
					err = fmt.Errorf("none of %s: %s", name, body)
				}
			}
			return err
		})
		if body, err := f.get("http://127.0.0.1:18080/v1/status?proxy_node=node2"); err != nil || !strings.Contains(body, `"node":"node2"`) || !strings.Contains(body, `"nodes":[{"node":"node"},{"node":"node2"},{"node":"node3"}]`) {
			t.Errorf("%v: %s", err, body)
		}
		_ = f.proxies[2].Process.Signal(os.Interrupt)
		_ = f.proxies[2].Wait()
		f.until("the page names the node that does not answer, and has the others' connections", func() error {
			body, err := f.get("http://127.0.0.1:18080/v1/status")
			if err == nil && !strings.Contains(body, `{"node":"node"},{"node":"node2"},{"node":"node3","trouble":"`) {
				err = errors.New(body)
			}
			if body, _ := f.get("http://127.0.0.1:18080/v1/connections?filter=service%3Ddefault/web"); err == nil && strings.Count(body, `"proxy_node"`) != 2 {
				err = errors.New(body)
			}
			return err
		})
		_ = cmd.Process.Signal(os.Interrupt)
		check.OK(t, cmd.Wait())
	})
	play("a stopped proxy, a stopped kubelet, a pod that does not run", func(t *testing.T) {
		f.wantSilent("node3", "no proxy runs in this network namespace", 2)
		f.nodes[1].SetDown("eth0")
		f.wantSilent("node2", "", 1)
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "sluice-node"}}
		f.admin.read(pod)
		pod.Status.Phase = corev1.PodPending
		f.admin.update(pod, "status")
		f.wantSilent("node", "its pod sluice-node is Pending", 0)
	})
	play("without rights", func(t *testing.T) {
		f.grant([]right{{"", "pods", "list"}})
		f.wantSilent("node2", "forbidden", 0)
		f.admin.delete(&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "sluice"}})
		f.until("pods cannot be listed", func() error {
			if _, said, _ := f.plugin("conns"); !strings.HasPrefix(said, "sluice: pods in namespace kube-system: ") || !strings.Contains(said, "forbidden") {
				return errors.New(said)
			}
			return nil
		})
	})
}

// wantSilent waits until a node is named as one that does not answer, with a reason, while
// others, so many, have their rows.
func (f *fleet) wantSilent(node, why string, others int) {
	f.t.Helper()
	f.until(node+" does not answer: "+why, func() error {
		out, said, status := f.plugin("status", "--timeout", "3s")
		f.t.Logf("%s%s", out, said)
		_, reason, named := strings.Cut(said, "\n  "+node+": ")
		if reason, _, _ = strings.Cut(reason, "\n"); !named || !strings.Contains(reason, why) || strings.Count(out, " in force ") != others || status != 1 {
			return fmt.Errorf("status %d\n%s%s", status, out, said)
		}
		return nil
	})
}
