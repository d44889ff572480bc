//go:build cluster

package cluster

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/test/must"
)

const (
	prometheus = "127.0.0.1:9090"
	// alerts are the rules of the chart.
	alerts = deploy + "/helm/sluice/alerts.yaml"
)

// TestMonitoring reads the metrics with Debian's Prometheus, in kube-proxy's place:
// under its job, by its port, with the queries of dashboards that were made for it.
func TestMonitoring(t *testing.T) {
	w := setUp(t)
	w.admin.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
	w.namespace = "n"
	t.Run("metrics of kube-proxy", func(t *testing.T) { testKubeProxysMetrics(t, w.with(t, "n")) })
	cmd := w.start("sluice", os.Getenv("SLUICE_BIN"), "run", "--kubeconfig", w.kubeconfig("system:kube-proxy"), "--hostname-override", "node",
		"--detect-local-mode", "NodeCIDR", "--access-log", filepath.Join(w.dir, "access.log"))
	defer stop(cmd)
	w.awaitProxy()
	w.until("its event has arrived", func() error {
		if !w.hasEvent("node") {
			return errNotYet
		}
		return nil
	})
	bad := w.service("bad", func(s *corev1.Service) { s.Annotations = map[string]string{"sluice.dev/eject-after": "never"} })
	w.until("an event names the annotation with a bad value", func() error {
		if !slices.ContainsFunc(w.events("n"), func(e corev1.Event) bool {
			return e.InvolvedObject.Name == "bad" && e.Reason == "ServiceNotServedInFull" && strings.Contains(e.Message, `annotation sluice.dev/eject-after: "never"`)
		}) {
			return errNotYet
		}
		return nil
	})
	w.wantMetric("sluice_config_problems 1")
	w.admin.delete(bad)
	w.wantMetric("sluice_config_problems 0") // no alert
	w.startPrometheus()

	svc := w.service("web", nil)
	w.slice("web", w.pod2())
	w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(2))
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "web-4"}}
	w.admin.read(s)
	s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().Format(time.RFC3339Nano)}
	s.Endpoints[0].Addresses = []string{w.hosts.Pods[0].IPv4.String()}
	w.admin.update(s)
	w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))

	t.Run("dashboard of the mixin", func(t *testing.T) { testMixin(t, w.with(t, "n")) })
	t.Run("alerts", func(t *testing.T) { testAlerts(t, w.with(t, "n")) })
	t.Run("native histograms", func(t *testing.T) { testNativeHistograms(t, w.with(t, "n")) })
}

// startPrometheus runs Debian's Prometheus on the node. It reads the proxy's metrics as
// it would kube-proxy's, but more often.
func (w *world) startPrometheus() {
	w.t.Helper()
	rules, err := filepath.Abs(alerts)
	must.OK(w.t, err)
	w.write("prometheus.yml", fmt.Sprintf(`
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
rule_files: [%q]
scrape_configs:
- job_name: kube-proxy
  static_configs: [{targets: ["127.0.0.1:10249"], labels: {cluster: c}}]
`, rules))
	w.start("prometheus", "prometheus", "--config.file", filepath.Join(w.dir, "prometheus.yml"), "--storage.tsdb.path", filepath.Join(w.dir, "tsdb"),
		"--web.listen-address", prometheus)
}

// query returns the number of series that a query has, and the largest value.
func (w *world) query(text string) (series int, largest string, err error) {
	return w.queryOf(prometheus, text)
}

// queryOf is query of the Prometheus at an address.
func (w *world) queryOf(server, text string) (series int, largest string, err error) {
	body, err := w.get("http://" + server + "/api/v1/query?query=" + url.QueryEscape(text))
	if err != nil {
		return 0, "", err
	}
	var answer struct {
		Error string
		Data  struct{ Result []struct{ Value [2]any } }
	}
	_, body, _ = strings.Cut(body, " ") // after the status
	if err := json.Unmarshal([]byte(body), &answer); err != nil || answer.Error != "" {
		return 0, "", fmt.Errorf("%s: %w %s", text, err, answer.Error)
	}
	for _, r := range answer.Data.Result {
		if value := fmt.Sprint(r.Value[1]); value > largest {
			largest = value
		}
	}
	return len(answer.Data.Result), largest, nil
}

// testMixin makes the queries of the dashboard Kubernetes / Proxy of the
// kubernetes-mixin: for each panel the metric, what it selects beside cluster, job and
// instance, and what is made of it. Each of them has a series.
func testMixin(t *testing.T, w *world) {
	const (
		sum     = `sum(%s)`
		rate    = `rate(%s[20s])`
		total   = `sum(rate(%s[20s]))`
		highest = `histogram_quantile(0.99, sum by (instance, le) (rate(%s[20s])))`
		each    = `histogram_quantile(0.99, rate(%s[20s]))`
		perVerb = `histogram_quantile(0.99, sum by (verb, le) (rate(%s[20s])))`
		plain   = `%s`
	)
	for _, panel := range []struct{ title, metric, selects, shape string }{
		{"variables", "up", "", plain},
		{"Up", "up", "", sum},
		{"Rules Sync Rate", "kubeproxy_sync_proxy_rules_duration_seconds_count", "", total},
		{"Rules Sync Latency", "kubeproxy_sync_proxy_rules_duration_seconds_bucket", "", each},
		{"Network Programming Rate", "kubeproxy_network_programming_duration_seconds_count", "", total},
		{"Network Programming Latency", "kubeproxy_network_programming_duration_seconds_bucket", "", highest},
		{"Kube API Request Rate", "rest_client_requests_total", `code=~"2.."`, total},
		{"Kube API Request Rate", "rest_client_requests_total", `code=~"3.."`, total},
		{"Kube API Request Rate", "rest_client_requests_total", `code=~"4.."`, total},
		{"Kube API Request Rate", "rest_client_requests_total", `code=~"5.."`, total},
		{"Post Request Latency", "rest_client_request_duration_seconds_bucket", `verb="POST"`, perVerb},
		{"Get Request Latency", "rest_client_request_duration_seconds_bucket", `verb="GET"`, perVerb},
		{"Memory", "process_resident_memory_bytes", "", plain},
		{"CPU usage", "process_cpu_seconds_total", "", rate},
		{"Goroutines", "go_goroutines", "", plain},
	} {
		selector := `{cluster="c", job="kube-proxy", instance=~".+"`
		if panel.selects != "" {
			selector += ", " + panel.selects
		}
		query := fmt.Sprintf(panel.shape, panel.metric+selector+"}")
		w.until(panel.title+" has a series: "+query, func() error {
			series, _, err := w.query(query)
			if err == nil && series == 0 {
				err = errNotYet
			}
			return err
		})
	}
	w.until("the proxy is up", func() error { // also after a reading that was too late
		_, up, err := w.query(`sum(up{job="kube-proxy"})`)
		if err == nil && up != "1" {
			err = fmt.Errorf("up is %q", up)
		}
		return err
	})
}

// testAlerts expects Prometheus to take the rules, every metric that they name to
// exist, and none to fire.
func testAlerts(t *testing.T, w *world) {
	if out, err := w.hosts.Node.Command(t, "promtool", "check", "rules", alerts).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	text := must.Read(t, alerts)
	played := must.Read(t, "testdata/alerts_test.yaml")
	w.write("alerts.yaml", string(text))
	w.write("alerts_test.yaml", string(played))
	if out, err := w.hosts.Node.Command(t, "promtool", "test", "rules", filepath.Join(w.dir, "alerts_test.yaml")).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	var file struct {
		Groups []struct {
			Rules []struct{ Alert, Expr string }
		}
	}
	must.OK(t, yaml.Unmarshal(text, &file))
	for _, r := range file.Groups[0].Rules {
		for _, selector := range regexp.MustCompile(`\w+\{[^}]*\}`).FindAllString(r.Expr, -1) {
			w.until(r.Alert+": there is "+selector, func() error {
				series, _, err := w.query(selector)
				if err == nil && series == 0 {
					err = errNotYet
				}
				return err
			})
		}
		w.until(r.Alert+" does not hold", func() error { // after a reading that was too late it does, for a moment
			series, largest, err := w.query(r.Expr)
			if err == nil && series != 0 {
				err = fmt.Errorf("%s holds, %s", r.Expr, largest)
			}
			return err
		})
	}
	w.until("all rules are evaluated", func() error {
		body, err := w.get("http://" + prometheus + "/api/v1/rules?type=alert")
		if err == nil && strings.Count(body, `"health":"ok"`) != len(file.Groups[0].Rules) {
			err = fmt.Errorf("the rules:\n%s", body)
		}
		return err
	})
}

var family = regexp.MustCompile(`(?m)^# TYPE (\S+) `)

// testKubeProxysMetrics starts kube-proxy and then the program in its place.
// docs/metrics.md names each metric that only kube-proxy has.
func testKubeProxysMetrics(t *testing.T, w *world) {
	docs := must.Read(t, "../../docs/metrics.md")
	_, missing, _ := strings.Cut(string(docs), "kube-proxy has these metrics, and Sluice does not:")
	missing, _, _ = strings.Cut(missing, "\n## ")
	names := func(path, mode string, args ...string) map[string]bool {
		t.Helper()
		w.write("proxy.conf", proxyConfig(w, mode))
		cmd := w.start(filepath.Base(path)+"-"+mode, path, append(args, "--config", filepath.Join(w.dir, "proxy.conf"), "--hostname-override", "node")...)
		defer stop(cmd)
		w.awaitProxy()
		body, err := w.get("http://127.0.0.1:10249/metrics")
		must.OK(t, err)
		found := map[string]bool{}
		for _, m := range family.FindAllStringSubmatch(body, -1) {
			found[m[1]] = true
		}
		return found
	}
	kubeProxy := program(t, "kube-proxy")
	ours, theirs := names(os.Getenv("SLUICE_BIN"), "iptables", "run", "--access-log", "off"), map[string]bool{}
	for _, mode := range []string{"iptables", "nftables"} {
		maps.Copy(theirs, names(kubeProxy, mode))
	}
	if out, err := w.hosts.Node.Command(t, kubeProxy, "--cleanup").CombinedOutput(); err != nil {
		t.Logf("kube-proxy --cleanup: %v\n%s", err, out)
	}
	if len(theirs) < 50 || len(ours) < 50 {
		t.Fatalf("kube-proxy has %d metrics, sluice %d", len(theirs), len(ours))
	}
	for _, name := range slices.Sorted(maps.Keys(theirs)) {
		if strings.HasPrefix(name, "go_") || ours[name] || documents(missing, name) {
			continue
		}
		t.Errorf("docs/metrics.md does not say that only kube-proxy has %s", name)
	}
}

// documents tells whether a text has a name, in whole or by its beginning and "…".
func documents(text, name string) bool {
	for _, m := range regexp.MustCompile("`(\\w+?)(…?)`").FindAllStringSubmatch(text, -1) {
		if m[1] == name || m[2] != "" && strings.HasPrefix(name, m[1]) {
			return true
		}
	}
	return false
}
