package helm

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// samples renders each file of values/ as a release that is named like the file.
func samples(t *testing.T) map[string][]string {
	t.Helper()
	files, err := filepath.Glob("values/*.yaml")
	if err != nil || len(files) < 12 {
		t.Fatalf("%d files: %v", len(files), err)
	}
	out := map[string][]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		values := map[string]any{}
		if err := yaml.UnmarshalStrict(text, &values); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		if out[name], err = render(name, values); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
	return out
}

// No two releases have an object in common, and no DaemonSet selects the pods of
// another one.
func TestReleasesShareNothing(t *testing.T) {
	owners := map[string]string{}
	selectors := map[string]string{}
	for release, objects := range samples(t) {
		for _, text := range objects {
			var object struct {
				metav1.TypeMeta
				metav1.ObjectMeta `json:"metadata"`
			}
			if err := yaml.Unmarshal([]byte(text), &object); err != nil {
				t.Fatal(err)
			}
			key := fmt.Sprintf("%s %s/%s", object.Kind, object.Namespace, object.Name)
			if other, ok := owners[key]; ok {
				t.Errorf("%s is an object of %s and of %s", key, release, other)
			}
			owners[key] = release
		}
		set := daemonSet(t, objects)
		selector := metav1.FormatLabelSelector(set.Spec.Selector)
		if other, ok := selectors[selector]; ok {
			t.Errorf("the DaemonSets of %s and %s select the same pods, %s", release, other, selector)
		}
		selectors[selector] = release
		parsed, err := metav1.LabelSelectorAsSelector(set.Spec.Selector)
		if err != nil || !parsed.Matches(labels(set.Spec.Template.Labels)) {
			t.Errorf("%s: %s does not select its own pods, %v", release, selector, err)
		}
		if replaces := !slices.ContainsFunc(set.Spec.Template.Spec.Containers[0].Args, func(a string) bool { return strings.HasPrefix(a, "--service-proxy-name") }); replaces != (set.Spec.Template.Labels["k8s-app"] == "kube-proxy") {
			t.Errorf("%s: labels %v; k8s-app is that of kube-proxy where it is replaced, and only there", release, set.Spec.Template.Labels)
		}
	}
}

type labels map[string]string

func (l labels) Has(name string) bool              { _, ok := l[name]; return ok }
func (l labels) Get(name string) string            { return l[name] }
func (l labels) Lookup(name string) (string, bool) { v, ok := l[name]; return v, ok }

// Two releases on the same nodes share no name, mark, table or port in the kernel.
func TestReleasesOnTheSameNodes(t *testing.T) {
	all := samples(t)
	second := daemonSet(t, all["second"])
	if a, b := ports(t, all["beside"]), ports(t, all["second"]); a == b {
		t.Errorf("both have the ports %s", a)
	}
	args := strings.Join(second.Spec.Template.Spec.Containers[0].Args, " ")
	help, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, flag := range []string{"nft-table", "steer-mark", "reply-mark", "socket-mark", "route-table-steer", "route-table-replies", "reply-ports"} {
		value := regexp.MustCompile(`--` + flag + `=(\S+)`).FindStringSubmatch(args)
		row := regexp.MustCompile("(?m)^\\| `--" + flag + "` \\| `?([^|`,]*)").FindStringSubmatch(string(help))
		if value == nil || row == nil || value[1] == strings.TrimSpace(row[1]) {
			t.Errorf("--%s: %v, and the default is %v", flag, value, row)
		}
	}
}

// Values add capabilities to the default ones, and drop some.
func TestCapabilities(t *testing.T) {
	objects, err := render(ourName, map[string]any{"capabilities": map[string]any{"add": []any{"SYS_ADMIN", "BPF"}, "drop": []any{"PERFMON"}}})
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(daemonSet(t, objects).Spec.Template.Spec.Containers[0].SecurityContext.Capabilities.Add); got != "[BPF CHOWN NET_ADMIN NET_BIND_SERVICE NET_RAW SYS_ADMIN]" {
		t.Error(got)
	}
}

// Objects of the Prometheus operator are what its types say, and each alert's
// runbook line exists.
func TestMonitoring(t *testing.T) {
	runbook, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	metrics, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	headings := regexp.MustCompile(`(?m)^### (Sluice\w+)$`).FindAllStringSubmatch(string(runbook), -1)
	documented := map[string]bool{}
	for _, h := range headings {
		documented[h[1]] = true
	}
	all := samples(t)
	for _, test := range []struct{ release, job, port, runbooks string }{
		{"monitoring", "kube-proxy", "10249", "https://github.com/sluice-proxy/sluice/blob/main/docs/operations.md"},
		{"ipv6", "ipv6", "10269", "https://wiki.example.com/sluice"},
	} {
		set := daemonSet(t, all[test.release])
		monitors, alerts := 0, 0
		for _, text := range all[test.release] {
			switch {
			case strings.Contains(text, "kind: PodMonitor\n"):
				monitor := &monitoringv1.PodMonitor{}
				if err := yaml.UnmarshalStrict([]byte(text), monitor); err != nil {
					t.Error(err)
				}
				monitors++
				pod := labels(set.Spec.Template.Labels)
				selector, err := metav1.LabelSelectorAsSelector(&monitor.Spec.Selector)
				if err != nil || !selector.Matches(pod) {
					t.Errorf("%s: the PodMonitor does not select the pods, %v", test.release, err)
				}
				if job := pod[monitor.Spec.JobLabel]; job != test.job {
					t.Errorf("%s: the job is %q, want %q", test.release, job, test.job)
				}
				for pod, want := range map[string]string{"10.0.0.1": "10.0.0.1:" + test.port, "fd00::1": "[fd00::1]:" + test.port} {
					if got := scraped(monitor, pod); got != want {
						t.Errorf("%s: Prometheus asks %s for a pod with address %s, want %s", test.release, got, pod, want)
					}
				}
			case strings.Contains(text, "kind: PrometheusRule\n"):
				rule := &monitoringv1.PrometheusRule{}
				if err := yaml.UnmarshalStrict([]byte(text), rule); err != nil {
					t.Error(err)
				}
				for _, r := range rule.Spec.Groups[0].Rules {
					alerts++
					if want := test.runbooks + "#" + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != want || !documented[r.Alert] {
						t.Errorf("%s: runbook_url %s, want %s; docs/operations.md has it: %v", r.Alert, r.Annotations["runbook_url"], want, documented[r.Alert])
					}
					expr := r.Expr.String()
					if got := strings.Count(expr, `job="`+test.job+`"`); got == 0 || got != strings.Count(expr, "job=") {
						t.Errorf("%s: %s is not about the job %s alone", r.Alert, expr, test.job)
					}
					for _, name := range regexp.MustCompile(`\b(?:sluice|kubeproxy)_\w+`).FindAllString(expr, -1) {
						if !strings.Contains(string(metrics), "`"+name+"`") {
							t.Errorf("%s: docs/metrics.md has no %s", r.Alert, name)
						}
					}
				}
			}
		}
		if monitors != 1 || alerts != len(documented) {
			t.Errorf("%s: %d PodMonitors, %d alerts; docs/operations.md has %d", test.release, monitors, alerts, len(documented))
		}
	}
}

// scraped returns the address that a PodMonitor's relabelings make of a pod's.
func scraped(m *monitoringv1.PodMonitor, pod string) (address string) {
	for _, r := range m.Spec.PodMetricsEndpoints[0].RelabelConfigs {
		if r.TargetLabel != "__address__" {
			continue
		}
		if all := regexp.MustCompile("^(?:" + r.Regex + ")$"); all.MatchString(pod) {
			address = all.ReplaceAllString(pod, strings.ReplaceAll(*r.Replacement, "$1", "${1}"))
		}
	}
	return address
}
