//go:build cluster

package cluster

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// Our defaults are those that kube-proxy writes, except the periods of the modes
// that are not the default, which it leaves out.
func TestDefaultConfigIsKubeProxys(t *testing.T) {
	written := func(command ...string) map[string]any {
		t.Helper()
		path := filepath.Join(t.TempDir(), "config.yaml")
		if out, err := exec.Command(command[0], append(command[1:], "--write-config-to", path)...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", command, err, out)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var config map[string]any
		if err := yaml.Unmarshal(text, &config); err != nil {
			t.Fatal(err)
		}
		for mode, fields := range map[string][]string{"ipvs": {"syncPeriod"}, "nftables": {"syncPeriod", "minSyncPeriod"}} {
			for _, f := range fields {
				delete(config[mode].(map[string]any), f)
			}
		}
		return config
	}
	if d := cmp.Diff(written(program(t, "kube-proxy")), written(os.Getenv("SLUICE_BIN"), "run")); d != "" {
		t.Errorf("the default configuration (-kube-proxy +sluice):\n%s", d)
	}
}

// testKubeProxysConfiguration runs the program in place of the image and the
// command of kube-proxy's DaemonSet: with the ConfigMap that kubeadm and kind
// write, where they mount it, with their arguments, and with the rights of
// kube-proxy's user.
func testKubeProxysConfiguration(t *testing.T, w *world) {
	w = w.with(t, "n")
	svc := w.tcpAndUDP("configured", func(*corev1.Service) {})
	defer w.admin.deleteServices(w.namespace)
	w.slice("configured", w.pod2(), w.pod3())
	for _, from := range []string{"kubeadm", "kind"} {
		t.Run(from, func(t *testing.T) {
			w := w.with(t, w.namespace)
			cmd := w.startContained(container{
				name: "sluice-" + from, granted: []string{everything}, args: []string{"run", "--config=/var/lib/kube-proxy/config.conf", "--hostname-override=node"},
				files: map[string]string{
					"/var/lib/kube-proxy/config.conf":     filepath.Join("../../cmd/sluice/internal/kubeproxyconfig/testdata", from+".yaml"),
					"/var/lib/kube-proxy/kubeconfig.conf": w.kubeconfig("system:kube-proxy"),
				},
			})
			defer stop(cmd)
			w.awaitProxy()
			w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(2, 3))
			w.everybody("udp", at(svc.Spec.ClusterIP, 80), fmtPods(2, 3))
			w.wantMetric("sluice_kubernetes_connected 1")
			w.wantNoAlarm("sluice-" + from)
		})
	}
}
