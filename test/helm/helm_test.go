// Package helm compares the output of the Helm chart in deploy/ with the kustomize
// base and its overlays, and checks what the chart makes of values.
package helm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/test/helm/chart"
)

const (
	deploy  = "../../deploy"
	ourName = "sluice"
)

// render returns the output of helm template for a release in kube-system.
func render(release string, values map[string]any) ([]string, error) {
	return chart.Render(filepath.Join(deploy, "helm/sluice"), chart.Release{Name: release, Namespace: "kube-system", Values: values})
}

// kustomize returns the output of kubectl kustomize, in the same form.
func kustomize(t *testing.T, folder string) []string {
	t.Helper()
	if !filepath.IsAbs(folder) {
		folder = filepath.Join(deploy, "kustomize", folder)
	}
	made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), folder)
	if err != nil {
		t.Fatal(err)
	}
	text, err := made.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	out, err := chart.Objects(string(text))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// withClientPodNames returns a folder with the base and the component client-pod-names.
func withClientPodNames(t *testing.T) string {
	t.Helper()
	folder := t.TempDir()
	from, err := filepath.Abs(filepath.Join(deploy, "kustomize"))
	if err == nil {
		from, err = filepath.Rel(folder, from)
	}
	if err == nil {
		text := "resources: [" + from + "/base]\ncomponents: [" + from + "/client-pod-names]\n"
		err = os.WriteFile(filepath.Join(folder, "kustomization.yaml"), []byte(text), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return folder
}

func TestChartIsTheKustomizeBase(t *testing.T) {
	for _, test := range []struct {
		folder, release string
		values          map[string]any
	}{
		{"base", ourName, nil},
		{"replace-kube-proxy", ourName, map[string]any{"kubeProxyConfigMap": "kube-proxy", "healthzPort": 10256, "metricsBindAddress": "127.0.0.1:10249"}},
		{withClientPodNames(t), ourName, map[string]any{"clientPodNames": true}},
		{"beside", "sluice-beside", map[string]any{"serviceProxyName": "sluice", "healthzPort": 10266, "metricsBindAddress": "127.0.0.1:10269"}},
	} {
		want := kustomize(t, test.folder)
		got, err := render(test.release, test.values)
		if err != nil {
			t.Errorf("%s: %v", test.folder, err)
			continue
		}
		if len(got) != len(want) {
			t.Errorf("%s: %d objects, want %d", test.folder, len(got), len(want))
			continue
		}
		for i := range got {
			if got[i] != want[i] {
				t.Errorf("%s: the chart gives\n%s\nand kustomize\n%s", test.folder, got[i], want[i])
			}
		}
	}
}

// A typo in the values is an error, not a cluster without a proxy.
func TestValuesAreChecked(t *testing.T) {
	on := map[string]any{"enabled": true}
	for _, test := range []struct {
		values map[string]any
		want   string // in the error
	}{
		{map[string]any{"serviceproxyname": "sluice"}, "serviceproxyname"},
		{map[string]any{"capabilities": map[string]any{"drop": []any{"CAP_PERFMON"}}}, "capabilities"},
		{map[string]any{"healthzPort": 0}, "healthzPort"},
		{map[string]any{"detectLocalMode": "Guess"}, "detectLocalMode"},
		{map[string]any{"serviceProxyName": "a b"}, "serviceProxyName"},
		{map[string]any{"metricsBindAddress": "localhost:10249"}, "metricsBindAddress"},
		{map[string]any{"metricsBindAddress": "10249"}, "metricsBindAddress"},
		{map[string]any{"metricsBindAddress": "0.0.0.0:0"}, "metricsBindAddress"},
		{map[string]any{"metricsBindAddress": "0.0.0.0:99999"}, "99999 is no port"},
		{map[string]any{"maxUnavailable": "10%"}, "maxSurge and maxUnavailable"},
		{map[string]any{"maxSurge": 0}, "maxSurge and maxUnavailable"},
		{map[string]any{"podLabels": map[string]any{"k8s-app": "proxy"}}, "k8s-app: the chart sets this label itself"},
		{map[string]any{"apiServer": map[string]any{"host": "10.0.0.1:6443"}}, "host"},
		{map[string]any{"extraArgs": []any{"--healthz_bind_address=0.0.0.0:1"}}, "use the value healthzPort"},
		{map[string]any{"extraArgs": []any{"no flag"}}, "extraArgs"},
		{map[string]any{"image": map[string]any{"tag": ""}}, "tag"},
		{map[string]any{"image": map[string]any{"digest": "latest"}}, "digest"},
		{map[string]any{"apiServer": map[string]any{"host": "https://10.0.0.1"}}, "host"},
		{map[string]any{"livenessProbe": map[string]any{"port": 1}}, "port"},
		{map[string]any{"tolerations": "all"}, "tolerations"},
		{map[string]any{"extraArgs": []any{"--healthz-bind-address=0.0.0.0:1"}}, "use the value healthzPort"},
		{map[string]any{"extraArgs": []any{"--metrics-port=1"}}, "use the value metricsBindAddress"},
		{map[string]any{"extraArgs": []any{"--master=https://h"}}, "use the value apiServer"},
		{map[string]any{"healthzPort": 10249}, "port 10249 is that of /healthz and that of the metrics"},
		{map[string]any{"serviceProxyName": "b", "besideAnotherSluice": true}, "give healthzPort and metricsBindAddress"},
		{map[string]any{"monitoring": map[string]any{"podMonitor": on}}, "where Prometheus cannot reach them"},
		{map[string]any{"kubeProxyConfigMap": "kube-proxy"}, "give healthzPort and metricsBindAddress"},
		{map[string]any{"kubeProxyConfigMap": "kube-proxy", "healthzPort": 10256}, "give healthzPort and metricsBindAddress"},
	} {
		if _, err := render(ourName, test.values); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: %v, want %q", test.values, err, test.want)
		}
	}
}

// A name may read as a number or a truth value: it is text all the same, or the API
// server takes none of the objects, and a ConfigMap 0x10 would be another one, 16.
func TestNamesAreTexts(t *testing.T) {
	objects, err := chart.Render(filepath.Join(deploy, "helm/sluice"), chart.Release{Name: "7", Namespace: "42", Values: map[string]any{
		"fullnameOverride": "1e3", "kubeProxyConfigMap": "0x10", "serviceProxyName": "on", "healthzPort": 10266, "metricsBindAddress": "0.0.0.0:10269",
		"priorityClassName": "5", "serviceAccount": map[string]any{"name": "12"},
		"monitoring": map[string]any{"podMonitor": map[string]any{"enabled": true}, "prometheusRule": map[string]any{"enabled": true}, "networkPolicy": map[string]any{"enabled": true}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range objects {
		var o struct {
			Kind     string
			Metadata struct {
				Name, Namespace any
				Labels          map[string]any
			}
			Spec struct{ Groups []struct{ Name any } }
		}
		if err := yaml.Unmarshal([]byte(text), &o); err != nil {
			t.Fatal(err)
		}
		m := o.Metadata
		if _, ok := m.Name.(string); !ok {
			t.Errorf("%s: the name is %v", o.Kind, m.Name)
		}
		if _, ok := m.Namespace.(string); !ok && m.Namespace != nil {
			t.Errorf("%s: the namespace is %v", o.Kind, m.Namespace)
		}
		if m.Labels["app.kubernetes.io/instance"] != "7" {
			t.Errorf("%s: the labels are %v", o.Kind, m.Labels)
		}
		for _, g := range o.Spec.Groups {
			if g.Name != "7" {
				t.Errorf("%s: the group is %v", o.Kind, g.Name)
			}
		}
	}
	pod := daemonSet(t, objects).Spec.Template.Spec
	if pod.PriorityClassName != "5" || pod.ServiceAccountName != "12" || pod.Volumes[len(pod.Volumes)-1].ConfigMap.Name != "0x10" {
		t.Errorf("priority class %q, service account %q, ConfigMap %q", pod.PriorityClassName, pod.ServiceAccountName, pod.Volumes[len(pod.Volumes)-1].ConfigMap.Name)
	}
}
