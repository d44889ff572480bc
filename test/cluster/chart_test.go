//go:build cluster

package cluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// kubectl runs kubectl as the administrator.
func (w *world) kubectl(t *testing.T, args ...string) *netns.Cmd {
	return w.hosts.Node.Command(t, program(t, "kubectl"), append([]string{"--kubeconfig", w.kubeconfig("admin")}, args...)...)
}

// testChart renders the chart for each file of test/helm/values, with what this API
// server has of kube-proxy, and applies it to the API server as a dry run.
func testChart(t *testing.T, w *world) {
	if out, err := w.kubectl(t, "apply", "-f", "testdata/monitoring-crds.yaml").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	kubeadm := must.Read(t, "../../cmd/sluice/internal/kubeproxyconfig/testdata/kubeadm.yaml")
	moved := strings.NewReplacer(`healthzBindAddress: ""`, `healthzBindAddress: 0.0.0.0:10356`, `metricsBindAddress: ""`, `metricsBindAddress: 0.0.0.0:10349`)
	for name, data := range map[string]map[string]string{
		"kube-proxy":        {"config.conf": string(kubeadm)},
		"kube-proxy-moved":  {"config.conf": moved.Replace(string(kubeadm))},
		"kube-proxy-config": {"config": strings.Replace(string(kubeadm), `metricsBindAddress: ""`, `metricsBindAddress: 0.0.0.0:10249`, 1)},
	} {
		w.admin.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name}, Data: data})
	}
	render := os.Getenv("SLUICE_RENDER")
	if render == "" {
		t.Fatal("SLUICE_RENDER is not set: run make test-cluster")
	}
	files, err := filepath.Glob("../helm/values/*.yaml")
	if err != nil || len(files) < 12 {
		t.Fatalf("%d files of values, %v", len(files), err)
	}
	for _, file := range files {
		release := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run("dry run of the chart, "+release, func(t *testing.T) {
			for _, server := range [][]string{nil, {"-server", apiServer, "-token", "token-admin"}} { // helm template, helm install
				args := append([]string{"-chart", filepath.Join(deploy, "helm/sluice"), "-release", release, "-values", file}, server...)
				objects, err := w.hosts.Node.Command(t, render, args...).CombinedOutput()
				if err != nil {
					t.Fatalf("%v: %v\n%s", args, err, objects)
				}
				apply := w.kubectl(t, "apply", "--dry-run=server", "--validate=strict", "-f", "-")
				apply.Stdin = strings.NewReader(string(objects))
				out, err := apply.CombinedOutput()
				if err != nil || strings.Count(string(out), "(server dry run)") != strings.Count(string(objects), "\nkind: ") {
					t.Errorf("%v: %v\n%s\n%s", args, err, out, objects)
				}
			}
		})
	}
}
