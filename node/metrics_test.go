package node

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/sluice-proxy/sluice/admin"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/dns"
	"github.com/sluice-proxy/sluice/health"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
	"github.com/sluice-proxy/sluice/source/manifests"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// everyMetric returns a registry with all metrics that there can be.
func everyMetric(t *testing.T) *prometheus.Registry {
	t.Helper()
	accessLog := must.Get(conntrack.OpenLog(conntrack.LogOptions{Writer: new(strings.Builder)}))(t)
	table := conntrack.NewTable(conntrack.Options{})
	for _, protocol := range []service.Protocol{service.TCP, service.UDP} {
		counters := table.Counters(service.PortName{Name: service.Name{Namespace: "default", Name: "web"}, Port: "http", Protocol: protocol})
		table.Shard(0).Open(&conntrack.Record{Counters: counters, Protocol: protocol})
	}
	sync := admin.NewSync()
	sync.Queued(time.Unix(1000, 0))
	sync.Applied(time.Unix(1000, 0), time.Unix(1001, 0), []time.Time{time.Unix(991, 0)})
	metrics := slices.Concat((&Proxy{}).ownMetrics(), admin.MetricsOf((*dns.Server)(nil).Stats), admin.MetricsOf((*manifests.Watcher)(nil).Stats), clusterMetrics(nil))
	for i := range metrics {
		metrics[i].Value = func() float64 { return 1 }
	}
	proxy := &Proxy{}
	proxy.dataPath.Store(&dataPath{})
	return admin.NewRegistry(admin.Sources{
		Table: table, Log: accessLog, Sync: sync, Metrics: metrics,
		Health:     func() health.Stats { return health.Stats{} },
		NoLocal:    func() *admin.NoLocalEndpoints { return new(admin.NoLocalEndpoints) },
		Collectors: append(requests(), dataPathMetric{proxy}, &proxy.refusals),
	})
}

// requests returns the metrics of requests to the API server, each with a value.
func requests() []prometheus.Collector {
	all := kubernetes.Requests()
	for _, c := range all {
		switch c := c.(type) {
		case *prometheus.HistogramVec:
			c.WithLabelValues("GET", "192.0.2.1:6443")
		case *prometheus.CounterVec:
			c.WithLabelValues("200", "GET", "192.0.2.1:6443")
		}
	}
	return all
}

// documentedMetric is a row of the tables in the documentation.
var documentedMetric = regexp.MustCompile("(?m)^\\| `((?:sluice|kubeproxy|rest_client)_[a-z_]+)` \\| ([a-z]+[^|]*) \\|")

// The documentation lists the metrics that there are, with kind and labels, and
// no others.
func TestDocumentedMetrics(t *testing.T) {
	const path = "../docs/metrics.md"
	text := must.Read(t, path)
	documented := map[string]string{}
	for _, m := range documentedMetric.FindAllStringSubmatch(string(text), -1) {
		documented[m[1]] = m[2]
	}
	families := must.Get(everyMetric(t).Gather())(t)
	for _, f := range families {
		name := f.GetName()
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			if !slices.Contains([]string{"namespace", "service", "port", "protocol"}, l.GetName()) {
				labels = append(labels, "`"+l.GetName()+"`")
			}
		}
		want := strings.TrimSpace(strings.ToLower(f.GetType().String()) + " " + strings.Join(labels, ", "))
		if got, ok := documented[name]; !ok || got != want {
			t.Errorf("%s says %q of %s, the code %q", path, got, name, want)
		}
		check.Containsf(t, string(text), f.GetHelp(), "%s does not explain %s as the code does: %s", path, name, f.GetHelp())
		delete(documented, name)
	}
	for name := range documented {
		t.Errorf("%s lists %s, the code does not have it", path, name)
	}
}

// The dashboard asks for metrics that there are, with labels that they have.
func TestDashboardAsksForMetricsThatExist(t *testing.T) {
	text := must.Read(t, "../deploy/grafana/sluice.json")
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	must.OK(t, json.Unmarshal(text, &dashboard))
	families := must.Get(everyMetric(t).Gather())(t)
	labels := map[string][]string{}
	for _, f := range families {
		labels[f.GetName()] = nil
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels[f.GetName()] = append(labels[f.GetName()], l.GetName())
		}
	}
	metric := regexp.MustCompile(`\b((?:sluice|kubeproxy|process)_[a-z_]+?)(?:_bucket)?(?:\{([^}]*)\}|[^a-z_]|$)`)
	label := regexp.MustCompile(`([a-z_]+)=`)
	found := 0
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			for _, m := range metric.FindAllStringSubmatch(target.Expr, -1) {
				found++
				have, ok := labels[m[1]]
				if !ok {
					t.Errorf("%s: there is no metric %s", p.Title, m[1])
				}
				for _, l := range label.FindAllStringSubmatch(m[2], -1) {
					if !slices.Contains(have, l[1]) {
						t.Errorf("%s: %s has no label %s", p.Title, m[1], l[1])
					}
				}
			}
		}
	}
	if found < 20 {
		t.Errorf("found %d metrics only", found)
	}
}

// The names and kinds are as Prometheus wants them, which is what promtool check
// metrics looks at. kube-proxy's own name for a gauge is the exception.
func TestMetricsAreWellNamed(t *testing.T) {
	problems := must.Get(testutil.GatherAndLint(everyMetric(t)))(t)
	for _, p := range problems {
		if p.Metric != "kubeproxy_sync_proxy_rules_no_local_endpoints_total" {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}
