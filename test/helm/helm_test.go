// Package helm compares the output of the Helm chart in deploy/ with the kustomize
// base and its overlays.
package helm

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const deploy = "../../deploy"

// render returns the output of helm template, one text for each object, sorted.
func render(t *testing.T, values map[string]any) ([]string, error) {
	t.Helper()
	chart, err := loader.Load(filepath.Join(deploy, "helm/sluice"))
	if err != nil {
		t.Fatal(err)
	}
	all, err := chartutil.ToRenderValues(chart, values, chartutil.ReleaseOptions{Name: "sluice", Namespace: "kube-system"}, nil)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return nil, err
	}
	var text []string
	for _, f := range files {
		text = append(text, f)
	}
	return objects(t, strings.Join(text, "\n---\n")), nil
}

// kustomize returns the output of kubectl kustomize, in the same form.
func kustomize(t *testing.T, folder string) []string {
	t.Helper()
	made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), filepath.Join(deploy, "kustomize", folder))
	if err != nil {
		t.Fatal(err)
	}
	text, err := made.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return objects(t, string(text))
}

func objects(t *testing.T, text string) []string {
	t.Helper()
	var out []string
	for _, document := range strings.Split(text, "\n---\n") {
		var value map[string]any
		if err := yaml.UnmarshalStrict([]byte(document), &value); err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
		if value == nil {
			continue
		}
		normal, err := yaml.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, string(normal))
	}
	slices.Sort(out)
	return out
}

func TestChartIsTheKustomizeBase(t *testing.T) {
	for _, test := range []struct {
		folder string
		values map[string]any
	}{
		{"base", nil},
		{"replace-kube-proxy", map[string]any{"kubeProxyConfigMap": "kube-proxy"}},
		{"beside", map[string]any{"serviceProxyName": "sluice", "healthzPort": 10266, "metricsBindAddress": "127.0.0.1:10269"}},
	} {
		want := kustomize(t, test.folder)
		got, err := render(t, test.values)
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
	for _, values := range []map[string]any{
		{"serviceproxyname": "sluice"},
		{"healthzPort": 0},
		{"detectLocalMode": "Guess"},
		{"extraArgs": []any{"no flag"}},
		{"image": map[string]any{"tag": ""}},
	} {
		if _, err := render(t, values); err == nil {
			t.Errorf("%v is accepted", values)
		}
	}
}
