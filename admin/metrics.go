// Package admin serves Prometheus metrics and kube-proxy's other HTTP pages
// (/healthz, /proxyMode, /configz, /flagz, /statusz) on one address. It only reads
// counters of other packages and does not touch the data path.
package admin

import (
	"runtime"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/health"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/service"
)

// Metric is a metric without labels whose value another package provides. It is a
// counter if its name ends in _total, a gauge otherwise.
type Metric struct {
	Name, Help string
	// Value is called at each scrape, from any goroutine.
	Value func() float64
}

// NewMetric creates a Metric.
func NewMetric(name, help string, value func() float64) Metric { return Metric{name, help, value} }

func (m *Metric) collector() prometheus.Collector {
	if strings.HasSuffix(m.Name, "_total") {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: m.Name, Help: m.Help}, m.Value)
	}
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: m.Name, Help: m.Help}, m.Value)
}

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
	// Sync records how changes come into force. Changes returns the counts of
	// objects from an API server. Both may be nil.
	Sync    *Sync
	Changes func() Changes
	// Whole replaces the metrics of each service port by their sum, with empty
	// labels.
	Whole bool
	// Metrics are the metrics of other packages.
	Metrics []Metric
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
	for i := range s.Metrics {
		r.MustRegister(s.Metrics[i].collector())
	}
	if s.Sync != nil {
		r.MustRegister(s.Sync)
	}
	if s.Changes != nil {
		r.MustRegister(newChangesCollector(s.Changes))
	}
	return r
}

// collector reads all values at each scrape and stores none.
type collector struct {
	sources Sources

	build        *prometheus.Desc
	opened       *prometheus.Desc
	active       *prometheus.Desc
	closed       *prometheus.Desc
	retried      *prometheus.Desc
	attempts     *prometheus.Desc
	failures     *prometheus.Desc
	bytes        *prometheus.Desc
	datagrams    *prometheus.Desc
	connect      *prometheus.Desc
	firstByte    *prometheus.Desc
	queued       *prometheus.Desc
	dropped      *prometheus.Desc
	misused      *prometheus.Desc
	logLines     *prometheus.Desc
	logLost      *prometheus.Desc
	logErrors    *prometheus.Desc
	healthz      *prometheus.Desc
	livez        *prometheus.Desc
	checkPorts   *prometheus.Desc
	checkWaits   *prometheus.Desc
	checkFailed  *prometheus.Desc
	noLocal      *prometheus.Desc
	ends         []conntrack.End
	dialFailures []conntrack.DialError
}

var _ prometheus.Collector = (*collector)(nil)

func newCollector(s Sources) *collector {
	plain := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	perPort := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, append([]string{"namespace", "service", "port", "protocol"}, labels...), nil)
	}
	c := &collector{
		sources:     s,
		build:       plain("sluice_build_info", "The program; the value is 1.", "version", "go_version"),
		opened:      perPort("sluice_connections_opened_total", "Connections accepted from clients."),
		active:      perPort("sluice_connections_active", "Connections that are open."),
		closed:      perPort("sluice_connections_closed_total", "Connections that ended, by the side that ended them and how.", "end"),
		retried:     perPort("sluice_connections_retried_total", "Connections that took more than one attempt to reach an endpoint."),
		attempts:    perPort("sluice_dial_attempts_total", "Attempts to connect to an endpoint."),
		failures:    perPort("sluice_dial_failures_total", "Attempts to connect to an endpoint that failed, by reason.", "reason"),
		bytes:       perPort("sluice_relayed_bytes_total", "Relayed bytes, by the side that sent them.", "from"),
		datagrams:   perPort("sluice_relayed_datagrams_total", "Relayed UDP datagrams, by the side that sent them.", "from"),
		connect:     perPort("sluice_connect_duration_seconds", "Time from accepting a connection until an endpoint answered, all attempts included."),
		firstByte:   perPort("sluice_first_byte_duration_seconds", "Time from accepting a connection until the endpoint's first byte."),
		queued:      plain("sluice_records_queued_total", "Connection records that were handed to the access log."),
		dropped:     plain("sluice_records_dropped_total", "Connection records that were lost because the access log was too slow."),
		misused:     plain("sluice_records_misused_total", "Connection records that were opened or closed twice. Anything but 0 is a bug."),
		logLines:    plain("sluice_access_log_lines_total", "Lines written to the access log."),
		logLost:     plain("sluice_access_log_lines_lost_total", "Lines that could not be written to the access log."),
		logErrors:   plain("sluice_access_log_write_errors_total", "Writes to the access log that failed."),
		healthz:     plain("kubeproxy_proxy_healthz_total", "Answers of /healthz, by HTTP status.", "code"),
		livez:       plain("kubeproxy_proxy_livez_total", "Answers of /livez, by HTTP status.", "code"),
		checkPorts:  plain("sluice_health_check_ports", "Health check ports of Services that are open, of both address families."),
		checkWaits:  plain("sluice_health_check_ports_waiting", "Health check ports of Services that wait for room within --max-claims."),
		checkFailed: plain("sluice_health_check_port_failures_total", "Times that a health check port of a Service could not be opened."),
		noLocal:     plain("kubeproxy_sync_proxy_rules_no_local_endpoints_total", "Service ports whose traffic policy is Local and that have endpoints, but none on this node.", "traffic_policy", "ip_family"),
		ends:        conntrack.Ends(), dialFailures: conntrack.DialErrors(),
	}
	return c
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.build, c.opened, c.active, c.closed, c.retried, c.attempts, c.failures, c.bytes, c.datagrams, c.connect, c.firstByte,
		c.queued, c.dropped, c.misused, c.logLines, c.logLost, c.logErrors,
		c.healthz, c.livez, c.checkPorts, c.checkWaits, c.checkFailed, c.noLocal,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, value, labels...)
	}
	send(c.build, prometheus.GaugeValue, 1, c.sources.Version, runtime.Version())
	ports, all := c.sources.Table.Totals()
	if c.sources.Whole {
		ports = []conntrack.PortTotals{{Totals: all}}
	}
	for i := range ports {
		c.collectPort(ch, &ports[i])
	}
	stats := c.sources.Table.Stats()
	send(c.queued, prometheus.CounterValue, float64(stats.Queued))
	send(c.dropped, prometheus.CounterValue, float64(stats.Dropped))
	send(c.misused, prometheus.CounterValue, float64(stats.Misuse))
	if c.sources.Log != nil {
		stats := c.sources.Log.Stats()
		send(c.logLines, prometheus.CounterValue, float64(stats.Written))
		send(c.logLost, prometheus.CounterValue, float64(stats.Lost))
		send(c.logErrors, prometheus.CounterValue, float64(stats.Errors))
	}
	c.collectHealth(send)
}

// collectHealth sends the counts of health checks and of NoLocal.
func (c *collector) collectHealth(send func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string)) {
	if c.sources.Health != nil {
		h := c.sources.Health()
		send(c.healthz, prometheus.CounterValue, float64(h.HealthzOK), "200")
		send(c.healthz, prometheus.CounterValue, float64(h.HealthzUnavailable), "503")
		send(c.livez, prometheus.CounterValue, float64(h.LivezOK), "200")
		send(c.livez, prometheus.CounterValue, float64(h.LivezUnavailable), "503")
		send(c.checkPorts, prometheus.GaugeValue, float64(h.Ports))
		send(c.checkWaits, prometheus.GaugeValue, float64(h.PortsWaiting))
		send(c.checkFailed, prometheus.CounterValue, float64(h.PortFailures))
	}
	if c.sources.NoLocal == nil {
		return
	}
	n := c.sources.NoLocal()
	if n == nil {
		return // nothing is known yet
	}
	for f, name := range [2]string{service.IPv4: "IPv4", service.IPv6: "IPv6"} {
		send(c.noLocal, prometheus.GaugeValue, float64(n[f].Internal), "internal", name)
		send(c.noLocal, prometheus.GaugeValue, float64(n[f].External), "external", name)
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
	if p.Name.Protocol == service.UDP || c.sources.Whole {
		send(c.datagrams, prometheus.CounterValue, float64(t.DatagramsFromClient), "client")
		send(c.datagrams, prometheus.CounterValue, float64(t.DatagramsFromEndpoint), "endpoint")
	}
	sendHistogram(ch, c.connect, &t.Connect, conntrack.ConnectBuckets[:], labels)
	sendHistogram(ch, c.firstByte, &t.FirstByte, conntrack.FirstByteBuckets[:], labels)
}

func portLabels(n service.PortName) []string {
	labels := make([]string, 0, 5) // room for one more
	return append(labels, printable.Name(n.Namespace), printable.Name(n.Name.Name), printable.Name(n.Port), n.Protocol.String())
}
