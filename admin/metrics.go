// Package admin serves Prometheus metrics and kube-proxy's other HTTP pages
// (/healthz, /proxyMode, /configz, /flagz, /statusz) on one address. It only reads
// counters of other packages and does not touch the data path.
package admin

import (
	"runtime"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/health"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/service"
)

// Metric is a metric whose value another package provides. It is a counter if its name
// ends in _total, a gauge otherwise.
type Metric struct {
	Name, Help string
	// Value is called at each scrape, from any goroutine.
	Value func() float64
	// Labels tell the metrics of one name apart; nil if there is only one.
	Labels prometheus.Labels
}

// NewMetric creates a Metric without labels.
func NewMetric(name, help string, value func() float64) Metric {
	return Metric{Name: name, Help: help, Value: value}
}

// PerFamily returns metrics that kube-proxy has for each address family. Sluice handles
// both families as one, so that each has the whole value.
func PerFamily(metrics ...Metric) (list []Metric) {
	for _, family := range familyLabels {
		for _, m := range metrics {
			m.Labels = prometheus.Labels{"ip_family": family}
			list = append(list, m)
		}
	}
	return list
}

func (m *Metric) collector() prometheus.Collector {
	if m.isTotal() {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: m.Name, Help: m.Help, ConstLabels: m.Labels}, m.Value)
	}
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: m.Name, Help: m.Help, ConstLabels: m.Labels}, m.Value)
}

// noLocal is kube-proxy's own name for a gauge.
const noLocal = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"

// Sources provide the values of the metrics.
type Sources struct {
	// Version is the program's version.
	Version string
	// Table provides the counters of all service ports. It is required.
	Table *conntrack.Table
	// Log is the access log, or nil.
	Log *conntrack.Log
	// Health returns the counts of health checks. NoLocal may return nil. Both are
	// called at each scrape, from any goroutine, and may be nil.
	Health  func() health.Stats
	NoLocal func() *NoLocalEndpoints
	// Sync records how changes come into force. It may be nil.
	Sync *Sync
	// Whole replaces the metrics of each service port by their sum, with empty
	// labels.
	Whole bool
	// Metrics are the metrics of other packages, and Collectors those that have
	// labels or buckets.
	Metrics    []Metric
	Collectors []prometheus.Collector
	// Carried has the totals of Metrics, and of the program and health checks, go on. It may be nil.
	Carried *Carried
}

// NoLocalEndpoints counts, by service.Family, the service ports with traffic policy
// Local whose endpoints are all on other nodes (A3.16).
type NoLocalEndpoints [2]struct{ Internal, External int }

// NewRegistry creates a registry with Sluice's metrics and those of the Go runtime
// and the process.
func NewRegistry(s Sources) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(
		newCollector(s),
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	metrics := slices.Concat(s.Metrics, s.ofProgram(), s.ofHealth(), s.ofNoLocal())
	for i := range metrics {
		if s.Carried != nil {
			s.Carried.include(&metrics[i])
		}
		r.MustRegister(metrics[i].collector())
	}
	r.MustRegister(s.Collectors...)
	if s.Sync != nil {
		r.MustRegister(s.Sync.duration, s.Sync.programming, s.Sync.last, s.Sync.queued)
	}
	return r
}

// ofProgram are the metrics of the program, its records and its access log.
func (s *Sources) ofProgram() []Metric {
	table, log := s.Table, s.Log
	list := []Metric{
		{"sluice_build_info", "The program; the value is 1.", func() float64 { return 1 }, prometheus.Labels{"version": s.Version, "go_version": runtime.Version()}},
		NewMetric("sluice_records_queued_total", "Connection records that were handed to the access log.", func() float64 { return float64(table.Stats().Queued) }),
		NewMetric("sluice_records_dropped_total", "Connection records that were lost because the access log was too slow.", func() float64 { return float64(table.Stats().Dropped) }),
		NewMetric("sluice_records_misused_total", "Connection records that were opened or closed twice. Anything but 0 is a bug.", func() float64 { return float64(table.Stats().Misuse) }),
	}
	if log == nil {
		return list
	}
	return append(list,
		NewMetric("sluice_access_log_lines_total", "Lines written to the access log.", func() float64 { return float64(log.Stats().Written) }),
		NewMetric("sluice_access_log_lines_left_out_total", "Records that got no line because of --access-log-rate.", func() float64 { return float64(log.Stats().LeftOut) }),
		NewMetric("sluice_access_log_lines_lost_total", "Lines that could not be written to the access log.", func() float64 { return float64(log.Stats().Lost) }),
		NewMetric("sluice_access_log_write_errors_total", "Writes to the access log that failed.", func() float64 { return float64(log.Stats().Errors) }),
	)
}

// ofHealth are the counts of health checks.
func (s *Sources) ofHealth() []Metric {
	stats := s.Health
	if stats == nil {
		return nil
	}
	const healthz, livez = "kubeproxy_proxy_healthz_total", "kubeproxy_proxy_livez_total"
	const ofHealthz, ofLivez = "Answers of /healthz, by HTTP status.", "Answers of /livez, by HTTP status."
	ok, unavailable := prometheus.Labels{"code": "200"}, prometheus.Labels{"code": "503"}
	return []Metric{
		{healthz, ofHealthz, func() float64 { return float64(stats().HealthzOK) }, ok},
		{healthz, ofHealthz, func() float64 { return float64(stats().HealthzUnavailable) }, unavailable},
		{livez, ofLivez, func() float64 { return float64(stats().LivezOK) }, ok},
		{livez, ofLivez, func() float64 { return float64(stats().LivezUnavailable) }, unavailable},
		NewMetric("sluice_health_check_ports", "Health check ports of Services that are open, of both address families.", func() float64 { return float64(stats().Ports) }),
		NewMetric("sluice_health_check_ports_waiting", "Health check ports of Services that wait for room within --max-claims.", func() float64 { return float64(stats().PortsWaiting) }),
		NewMetric("sluice_health_check_port_failures_total", "Times that a health check port of a Service could not be opened.", func() float64 { return float64(stats().PortFailures) }),
	}
}

// ofNoLocal are the counts of NoLocal.
func (s *Sources) ofNoLocal() (list []Metric) {
	if s.NoLocal == nil {
		return nil
	}
	const help = "Service ports of traffic policy Local with endpoints, but none on this node."
	for f, family := range familyLabels {
		count := func(policy string, of func(NoLocalEndpoints) int) {
			list = append(list, Metric{noLocal, help, func() float64 {
				if n := s.NoLocal(); n != nil {
					return float64(of(*n))
				}
				return 0 // nothing is known yet
			}, prometheus.Labels{"traffic_policy": policy, "ip_family": family}})
		}
		count("internal", func(n NoLocalEndpoints) int { return n[f].Internal })
		count("external", func(n NoLocalEndpoints) int { return n[f].External })
	}
	return list
}

// collector sends the metrics of all service ports. It reads all values at each scrape
// and stores none.
type collector struct {
	sources Sources
	descs   []*prometheus.Desc // all that follow

	opened, active, closed, retried, attempts, failures, bytes, datagrams, connect, firstByte, duration *prometheus.Desc

	ends         []conntrack.End
	dialFailures []conntrack.DialError
}

var _ prometheus.Collector = (*collector)(nil)

func newCollector(s Sources) *collector {
	c := &collector{sources: s, ends: conntrack.Ends(), dialFailures: conntrack.DialErrors()}
	perPort := func(name, help string, labels ...string) *prometheus.Desc {
		d := prometheus.NewDesc(name, help, append([]string{"namespace", "service", "port", "protocol"}, labels...), nil)
		c.descs = append(c.descs, d)
		return d
	}
	c.opened = perPort("sluice_connections_opened_total", "Connections accepted from clients.")
	c.active = perPort("sluice_connections_active", "Connections that are open.")
	c.closed = perPort("sluice_connections_closed_total", "Connections that ended, by the side that ended them and how.", "end")
	c.retried = perPort("sluice_connections_retried_total", "Connections that took more than one attempt to reach an endpoint.")
	c.attempts = perPort("sluice_dial_attempts_total", "Attempts to connect to an endpoint.")
	c.failures = perPort("sluice_dial_failures_total", "Attempts to connect to an endpoint that failed, by reason.", "reason")
	c.bytes = perPort("sluice_relayed_bytes_total", "Relayed bytes, by the side that sent them.", "from")
	c.datagrams = perPort("sluice_relayed_datagrams_total", "Relayed UDP datagrams and SCTP messages, by the side that sent them.", "from")
	c.connect = perPort("sluice_connect_duration_seconds", "Time from accepting a connection until an endpoint answered, all attempts included.")
	c.firstByte = perPort("sluice_first_byte_duration_seconds", "Time from accepting a connection until the endpoint's first byte.")
	c.duration = perPort("sluice_connection_duration_seconds", "Time from accepting a connection until its end, of connections that ended.")
	return c
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	ports, all := c.sources.Table.Totals()
	if c.sources.Whole {
		ports = []conntrack.PortTotals{{Totals: all}}
	}
	for i := range ports {
		c.collectPort(ch, &ports[i])
	}
}

// collectPort sends the values of a service port: only two before its first
// connection.
func (c *collector) collectPort(ch chan<- prometheus.Metric, p *conntrack.PortTotals) {
	labels := portLabels(p.Name)
	if c.sources.Whole {
		labels[3] = "" // the zero protocol has a name
	}
	send := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, extra ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, value, append(labels, extra...)...)
	}
	t := &p.Totals
	send(c.opened, prometheus.CounterValue, float64(t.Opened))
	send(c.active, prometheus.GaugeValue, float64(t.Active))
	if t.Opened == 0 {
		return
	}
	for _, end := range c.ends {
		send(c.closed, prometheus.CounterValue, float64(t.Ended[end]), end.String())
	}
	send(c.retried, prometheus.CounterValue, float64(t.Retried))
	send(c.attempts, prometheus.CounterValue, float64(t.Attempts))
	for _, reason := range c.dialFailures {
		send(c.failures, prometheus.CounterValue, float64(t.Failed[reason]), reason.String())
	}
	send(c.bytes, prometheus.CounterValue, float64(t.BytesFromClient), "client")
	send(c.bytes, prometheus.CounterValue, float64(t.BytesFromEndpoint), "endpoint")
	if p.Name.Protocol != service.TCP || c.sources.Whole {
		send(c.datagrams, prometheus.CounterValue, float64(t.DatagramsFromClient), "client")
		send(c.datagrams, prometheus.CounterValue, float64(t.DatagramsFromEndpoint), "endpoint")
	}
	pairs := prometheus.MakeLabelPairs(c.connect, labels)
	ch <- newHistogram(c.connect, &t.Connect, conntrack.ConnectBuckets[:], pairs)
	ch <- newHistogram(c.firstByte, &t.FirstByte, conntrack.FirstByteBuckets[:], pairs)
	ch <- newHistogram(c.duration, &t.Duration, conntrack.DurationBuckets[:], pairs)
}

func portLabels(n service.PortName) []string {
	labels := make([]string, 0, 5) // room for one more
	return append(labels, printable.Name(n.Namespace), printable.Name(n.Name.Name), printable.Name(n.Port), n.Protocol.String())
}
