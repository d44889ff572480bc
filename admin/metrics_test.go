package admin

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/health"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

var (
	web  = service.PortName{Name: service.Name{Namespace: "default", Name: "web"}, Port: "http", Protocol: service.TCP}
	idle = service.PortName{Name: service.Name{Namespace: "default", Name: "idle"}, Protocol: service.TCP}
)

// sources returns everything that there can be, with one connection open and one
// ended.
func sources(t *testing.T) Sources {
	t.Helper()
	accessLog := must.Get(conntrack.OpenLog(conntrack.LogOptions{Writer: new(strings.Builder)}))(t)
	table := conntrack.NewTable(conntrack.Options{Sink: accessLog})
	s := table.Shard(0)
	counters := table.Counters(web)
	table.Counters(idle)
	ep := &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.4:80")}
	ms := int64(time.Millisecond)

	r := &conntrack.Record{Counters: counters}
	s.Open(r)
	r.BeginAttempt(ep, 0)
	r.AttemptFailed(conntrack.DialTimeout, 250*ms)
	r.BeginAttempt(ep, 250*ms)
	r.AttemptSucceeded(251 * ms)
	r.End, r.BytesFromClient, r.BytesFromEndpoint, r.FirstByte = conntrack.EndpointFin, 100, 2000, 260*ms
	s.Close(r)
	s.Flush()

	r = &conntrack.Record{Counters: counters}
	s.Open(r)
	r.BeginAttempt(ep, 0)
	r.AttemptSucceeded(ms)
	r.Progress(11, 22)
	must.OK(t, table.Close(t.Context()))
	sync := NewSync()
	sync.Queued(time.Unix(1000, 0))
	sync.Applied(time.Unix(1000, 0), time.Unix(1001, 0), []time.Time{time.Unix(991, 0)})
	return Sources{
		Version: "v1.2.3", Table: table, Log: accessLog,
		Metrics: []Metric{
			NewMetric("sluice_gauge", "A gauge.", func() float64 { return 1 }),
			NewMetric("sluice_counter_total", "A counter.", func() float64 { return 2 }),
		},
		Health: func() health.Stats {
			return health.Stats{HealthzOK: 3, HealthzUnavailable: 4, LivezOK: 5, LivezUnavailable: 6, Ports: 7, PortFailures: 8, PortsWaiting: 2}
		},
		Sync: sync,
		NoLocal: func() *NoLocalEndpoints {
			n := new(NoLocalEndpoints)
			n[service.IPv4].Internal, n[service.IPv6].External = 9, 10
			return n
		},
	}
}

func TestMetricsOfAServicePort(t *testing.T) {
	want := `
# HELP sluice_connections_opened_total Connections accepted from clients.
# TYPE sluice_connections_opened_total counter
sluice_connections_opened_total{namespace="default",port="",protocol="TCP",service="idle"} 0
sluice_connections_opened_total{namespace="default",port="http",protocol="TCP",service="web"} 2
# HELP sluice_connections_active Connections that are open.
# TYPE sluice_connections_active gauge
sluice_connections_active{namespace="default",port="",protocol="TCP",service="idle"} 0
sluice_connections_active{namespace="default",port="http",protocol="TCP",service="web"} 1
# HELP sluice_connections_retried_total Connections that took more than one attempt to reach an endpoint.
# TYPE sluice_connections_retried_total counter
sluice_connections_retried_total{namespace="default",port="http",protocol="TCP",service="web"} 1
# HELP sluice_dial_attempts_total Attempts to connect to an endpoint.
# TYPE sluice_dial_attempts_total counter
sluice_dial_attempts_total{namespace="default",port="http",protocol="TCP",service="web"} 3
# HELP sluice_relayed_bytes_total Relayed bytes, by the side that sent them.
# TYPE sluice_relayed_bytes_total counter
sluice_relayed_bytes_total{from="client",namespace="default",port="http",protocol="TCP",service="web"} 111
sluice_relayed_bytes_total{from="endpoint",namespace="default",port="http",protocol="TCP",service="web"} 2022
# HELP sluice_connect_duration_seconds Time from accepting a connection until an endpoint answered, all attempts included.
# TYPE sluice_connect_duration_seconds histogram
`
	cumulative := map[time.Duration]int{300 * time.Millisecond: 2, 500 * time.Millisecond: 2, 800 * time.Millisecond: 2, 2 * time.Second: 2, 5 * time.Second: 2}
	for _, bound := range conntrack.ConnectBuckets {
		n, ok := cumulative[bound]
		if !ok && bound >= time.Millisecond {
			n = 1
		}
		want += fmt.Sprintf("sluice_connect_duration_seconds_bucket{namespace=\"default\",port=\"http\",protocol=\"TCP\",service=\"web\",le=\"%v\"} %d\n", bound.Seconds(), n)
	}
	want += `sluice_connect_duration_seconds_bucket{namespace="default",port="http",protocol="TCP",service="web",le="+Inf"} 2
sluice_connect_duration_seconds_sum{namespace="default",port="http",protocol="TCP",service="web"} 0.252
sluice_connect_duration_seconds_count{namespace="default",port="http",protocol="TCP",service="web"} 2
`
	err := testutil.GatherAndCompare(NewRegistry(sources(t)), strings.NewReader(want),
		"sluice_connections_opened_total", "sluice_connections_active", "sluice_connections_retried_total",
		"sluice_dial_attempts_total", "sluice_relayed_bytes_total", "sluice_connect_duration_seconds")
	check.OK(t, err)
}

// Datagrams of UDP and messages of SCTP are counted; TCP has neither.
func TestDatagramsAndMessages(t *testing.T) {
	s := sources(t)
	for _, protocol := range []service.Protocol{service.UDP, service.SCTP} {
		name := service.PortName{Name: service.Name{Namespace: "default", Name: "web"}, Port: "http", Protocol: protocol}
		r := &conntrack.Record{Counters: s.Table.Counters(name), Protocol: protocol}
		shard := s.Table.Shard(0)
		shard.Open(r)
		r.DatagramsFromClient, r.DatagramsFromEndpoint = 3, 4+uint64(protocol)
		r.Progress(11, 22)
		shard.Close(r)
	}
	want := fmt.Sprintf(`
# HELP sluice_relayed_datagrams_total Relayed UDP datagrams and SCTP messages, by the side that sent them.
# TYPE sluice_relayed_datagrams_total counter
sluice_relayed_datagrams_total{from="client",namespace="default",port="http",protocol="SCTP",service="web"} 3
sluice_relayed_datagrams_total{from="client",namespace="default",port="http",protocol="UDP",service="web"} 3
sluice_relayed_datagrams_total{from="endpoint",namespace="default",port="http",protocol="SCTP",service="web"} %d
sluice_relayed_datagrams_total{from="endpoint",namespace="default",port="http",protocol="UDP",service="web"} %d
`, 4+service.SCTP, 4+service.UDP)
	check.OK(t, testutil.GatherAndCompare(NewRegistry(s), strings.NewReader(want), "sluice_relayed_datagrams_total"))
}

// A service port has the same series whatever happens to it, from its first
// connection on, and their number does not depend on clients or endpoints.
func TestSeriesOfAServicePort(t *testing.T) {
	families := must.Get(NewRegistry(sources(t)).Gather())(t)
	series := map[string]int{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "service" {
					series[l.GetValue()]++
				}
			}
		}
	}
	want := 2 + len(conntrack.Ends()) + len(conntrack.DialErrors()) + 1 + 1 + 2 + 3
	if series["web"] != want || series["idle"] != 2 {
		t.Errorf("series %v, want %d for web and 2 for idle", series, want)
	}
}

// Without metrics of each service port there is one series in the place of all of
// them, with the sums.
func TestSumsOverServicePorts(t *testing.T) {
	from := sources(t)
	from.Table.Forget(web) // what is gone counts too
	from.Whole = true
	want := `
# HELP sluice_connections_opened_total Connections accepted from clients.
# TYPE sluice_connections_opened_total counter
sluice_connections_opened_total{namespace="",port="",protocol="",service=""} 2
# HELP sluice_relayed_bytes_total Relayed bytes, by the side that sent them.
# TYPE sluice_relayed_bytes_total counter
sluice_relayed_bytes_total{from="client",namespace="",port="",protocol="",service=""} 111
sluice_relayed_bytes_total{from="endpoint",namespace="",port="",protocol="",service=""} 2022
`
	check.OK(t, testutil.GatherAndCompare(NewRegistry(from), strings.NewReader(want), "sluice_connections_opened_total", "sluice_relayed_bytes_total"))
}

func TestValues(t *testing.T) {
	s := sources(t)
	families := must.Get(NewRegistry(s).Gather())(t)
	got := map[string]float64{}
	for _, f := range families {
		m := f.GetMetric()[0]
		got[f.GetName()] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
	}
	for name, want := range map[string]float64{
		"sluice_gauge": 1, "sluice_counter_total": 2,
		"sluice_build_info": 1, "sluice_records_queued_total": 1, "sluice_records_dropped_total": 0, "sluice_records_misused_total": 0,
		"sluice_access_log_lines_total": 1, "sluice_access_log_lines_lost_total": 0, "sluice_access_log_write_errors_total": 0,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v, %v", name, v, ok)
		}
	}
}

// Without a log and without values, what is left still works.
func TestFewSources(t *testing.T) {
	families := must.Get(NewRegistry(Sources{Table: conntrack.NewTable(conntrack.Options{})}).Gather())(t)
	var own []string
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "sluice_") {
			own = append(own, f.GetName())
		}
	}
	if want := []string{"sluice_build_info", "sluice_records_dropped_total", "sluice_records_misused_total", "sluice_records_queued_total"}; !slices.Equal(own, want) {
		t.Errorf("metrics %v, want %v", own, want)
	}
}

// TestHealthMetrics shows A3.16 and A7.5.
func TestHealthMetrics(t *testing.T) {
	const want = `
# HELP kubeproxy_proxy_healthz_total Answers of /healthz, by HTTP status.
# TYPE kubeproxy_proxy_healthz_total counter
kubeproxy_proxy_healthz_total{code="200"} 3
kubeproxy_proxy_healthz_total{code="503"} 4
# HELP kubeproxy_proxy_livez_total Answers of /livez, by HTTP status.
# TYPE kubeproxy_proxy_livez_total counter
kubeproxy_proxy_livez_total{code="200"} 5
kubeproxy_proxy_livez_total{code="503"} 6
# HELP kubeproxy_sync_proxy_rules_no_local_endpoints_total Service ports of traffic policy Local with endpoints, but none on this node.
# TYPE kubeproxy_sync_proxy_rules_no_local_endpoints_total gauge
kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="external"} 0
kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"} 9
kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv6",traffic_policy="external"} 10
kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv6",traffic_policy="internal"} 0
# HELP sluice_health_check_port_failures_total Times that a health check port of a Service could not be opened.
# TYPE sluice_health_check_port_failures_total counter
sluice_health_check_port_failures_total 8
# HELP sluice_health_check_ports Health check ports of Services that are open, of both address families.
# TYPE sluice_health_check_ports gauge
sluice_health_check_ports 7
# HELP sluice_health_check_ports_waiting Health check ports of Services that wait for room within --max-claims.
# TYPE sluice_health_check_ports_waiting gauge
sluice_health_check_ports_waiting 2
`
	if err := testutil.GatherAndCompare(NewRegistry(sources(t)), strings.NewReader(want),
		"kubeproxy_proxy_healthz_total", "kubeproxy_proxy_livez_total", "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
		"sluice_health_check_ports", "sluice_health_check_ports_waiting", "sluice_health_check_port_failures_total"); err != nil {
		t.Error(err)
	}
}

// A scrape of a cluster's worth of services.
func BenchmarkGather(b *testing.B) {
	for _, n := range []int{100, 1000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			table := conntrack.NewTable(conntrack.Options{})
			for i := range n {
				name := web
				name.Name.Name = fmt.Sprint("web-", i)
				r := &conntrack.Record{Counters: table.Counters(name), End: conntrack.ClientFin}
				table.Shard(0).Open(r)
				table.Shard(0).Close(r)
			}
			registry := NewRegistry(Sources{Table: table})
			b.ReportAllocs()
			for b.Loop() {
				must.OK(b, must.Err(registry.Gather()))
			}
		})
	}
}

// A histogram names a connection that was slow, for those that ask for OpenMetrics, and all
// histograms have native buckets.
func TestExemplars(t *testing.T) {
	registry := NewRegistry(sources(t))
	r := httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody)
	r.Header.Set("Accept", "application/openmetrics-text;version=1.0.0")
	w := httptest.NewRecorder()
	pages := &Pages{Metrics: registry, Mode: func() string { return "" }}
	pages.handler(time.Now()).ServeHTTP(w, r)
	for _, want := range []string{
		`sluice_connect_duration_seconds_bucket{namespace="default",port="http",protocol="TCP",service="web",le="0.3"} 2 # {id="1"} 0.251 `,
		`sluice_first_byte_duration_seconds_bucket{namespace="default",port="http",protocol="TCP",service="web",le="0.4"} 1 # {id="1"} 0.26 `,
	} {
		check.Contains(t, w.Body.String(), want)
	}
	check.Equalf(t, strings.Count(w.Body.String(), "# {"), 2, "exemplars, and connections that were not slow have none:\n%s", w.Body)
	families := must.Get(registry.Gather())(t)
	native := 0
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if m.GetHistogram().GetSchema() > 0 {
				native++
			}
		}
	}
	check.Equalf(t, native, 7, "how many of 3 histograms of web's and 4 of kube-proxy's are native")
}
