package node

import (
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-proxy/sluice/admin"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow"
	"github.com/sluice-proxy/sluice/health"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
)

// registry returns the metrics of the whole proxy.
func (p *Proxy) registry() *prometheus.Registry {
	sources := admin.Sources{
		Sync:    p.sync,
		Version: p.config.Version,
		Table:   p.conntrack,
		Whole:   p.config.WholeMetrics,
		Log:     p.accessLog,
		Health:  func() health.Stats { return p.health.Stats() },
		NoLocal: p.noLocal.Load,
		Metrics: p.ownMetrics(),
		Carried: &p.totals,
	}
	if n := p.names; n != nil {
		sources.Metrics = append(sources.Metrics, admin.MetricsOf(n.stats)...)
	}
	if m := p.manifests; m != nil {
		sources.Metrics = append(sources.Metrics, admin.MetricsOf(m.Stats)...)
	}
	if c := p.cluster; c != nil {
		sources.Metrics = append(sources.Metrics, clusterMetrics(c)...)
		sources.Collectors = kubernetes.Requests()
	}
	sources.Collectors = append(sources.Collectors, dataPathMetric{p}, &p.refusals)
	return admin.NewRegistry(sources)
}

// dataPathMetric names the data path in use, and that of the node's own clients, and why it is the relay.
type dataPathMetric struct{ proxy *Proxy }

const dataPathHelp = "Always 1; its labels name the data path in use, and why it is the relay."

// nodeClientsHelp is the help of the same metric for clients on the node itself.
const nodeClientsHelp = "Always 1; its labels name the data path of new connections of this node's own clients, and why it is the relay."

var (
	dataPathDesc    = prometheus.NewDesc("sluice_data_path", dataPathHelp, []string{"path", "reason"}, nil)
	nodeClientsDesc = prometheus.NewDesc("sluice_node_clients_data_path", nodeClientsHelp, []string{"path", "reason"}, nil)
)

// Describe implements prometheus.Collector.
func (dataPathMetric) Describe(to chan<- *prometheus.Desc) {
	to <- dataPathDesc
	to <- nodeClientsDesc
}

// Collect implements prometheus.Collector.
func (m dataPathMetric) Collect(to chan<- prometheus.Metric) {
	used := *m.proxy.dataPath.Load()
	tell := func(desc *prometheus.Desc) {
		to <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, 1, used.path.String(), strings.ToValidUTF8(used.why, "?"))
	}
	tell(dataPathDesc)
	if used.path == conntrack.Kernel {
		if used.why = m.proxy.flows.server.NodeRelayed(); used.why != "" {
			used.path = conntrack.Relayed
		}
	}
	tell(nodeClientsDesc)
}

// ownMetrics are those of the proxy, whatever its source is.
func (p *Proxy) ownMetrics() []admin.Metric {
	return slices.Concat([]admin.Metric{
		admin.NewMetric("sluice_service_ports", "Service ports in the configuration in force.", func() float64 { return float64(servicePorts(p.manager.Snapshot())) }),
		admin.NewMetric("sluice_service_endpoints", "Endpoints of all service ports in the configuration in force.", func() float64 { return float64(endpoints(p.manager.Snapshot())) }),
		admin.NewMetric("sluice_config_problems", "Objects, or parts of them, that could not be used.", func() float64 { return float64(len(p.manager.Snapshot().Problems)) }),
		admin.NewMetric("sluice_config_file_fields_pending", "Fields of --config that have changed and need a restart.", p.pendingFields),
		admin.NewMetric("sluice_config_applied_timestamp_seconds", "When the configuration in force was applied.", func() float64 { return float64(p.applied.Load()) / 1e9 }),
		admin.NewMetric("sluice_config_failures_total", "Configurations that could not be applied.", func() float64 { return float64(p.failures.Load()) }),
		admin.NewMetric("sluice_steering_repairs_total", "Repairs of our kernel state after another program had changed it.", func() float64 { return float64(p.repairs.Load()) }),
		admin.NewMetric("sluice_node_addresses", "Addresses of this node's interfaces.", func() float64 { return float64(len(p.host.Load().Addresses)) }),
		admin.NewMetric("sluice_pod_ranges", "Ranges that this node routes to interfaces of pods; 0 if pods are not recognised by interfaces.", func() float64 { return float64(len(p.host.Load().PodRanges)) }),
		admin.NewMetric("sluice_http_connections_evicted_total", "Connections for health checks, metrics, the admin socket and the page that were closed to make room.", func() float64 {
			return float64(p.health.Stats().Evicted + p.metricsConns.Evicted() + p.admin.Evicted() + p.page.Evicted())
		}),
		admin.NewMetric("sluice_connections_limit", "Connections that the relay may have open at once.", func() float64 { return float64(p.maxConnections) }),
		admin.NewMetric("sluice_flows_limit", "Connections and UDP sessions that the kernel may forward at once; 0 where all are relayed.", func() float64 {
			if p.dataPath.Load().path != conntrack.Kernel {
				return 0
			}
			return float64(p.config.MaxFlows)
		}),
		admin.NewMetric("sluice_relay_pipes", "Pipes that the relay has open.", func() float64 { return float64(p.relay.Pipes()) }),
		admin.NewMetric("sluice_relay_bulk_buffers", "Directions of connections that have large socket buffers, of --max-bulk-buffers.", func() float64 { n, _ := p.relay.Bulk(); return float64(n) }),
		admin.NewMetric("sluice_relay_bulk_buffers_refused_total", "Times that a direction kept small socket buffers because --max-bulk-buffers was reached.", func() float64 { _, n := p.relay.Bulk(); return float64(n) }),
		admin.NewMetric("sluice_relay_held_message_bytes", "Bytes of SCTP messages that wait until their receiver has room, or for their end.", func() float64 { return float64(p.messages.Held()) }),
		admin.NewMetric("sluice_relay_system_calls_total", "System calls that the relay made to move bytes.", func() float64 { return float64(p.systemCalls()) }),
	}, admin.MetricsOf(p.manager.Stats), admin.MetricsOf(p.stream.Stats), admin.MetricsOf(p.datagram.Stats), admin.MetricsOf(p.flowStats))
}

// flowStats are zero if all is relayed.
func (p *Proxy) flowStats() flow.Stats {
	if p.flows == nil {
		return flow.Stats{}
	}
	return p.flows.server.Stats()
}

// clusterMetrics are those of the API server's objects; kube-proxy has its own for each
// address family.
func clusterMetrics(c *kubernetes.Source) (list []admin.Metric) {
	for _, m := range admin.MetricsOf(c.Stats) {
		if strings.HasPrefix(m.Name, "kubeproxy_") {
			list = append(list, admin.PerFamily(m)...)
		} else {
			list = append(list, m)
		}
	}
	return list
}

func (p *Proxy) pendingFields() float64 {
	if p.config.PendingFields == nil {
		return 0
	}
	return float64(p.config.PendingFields())
}

func sum(counts map[string]int) int {
	n := 0
	for _, c := range counts {
		n += c
	}
	return n
}

func (p *Proxy) systemCalls() uint64 {
	sum := p.stream.Stats().DialCalls
	for _, l := range p.loops {
		s := l.Relay.Stats()
		m := l.Messages.Stats()
		sum += s.SystemCalls() + l.Poll.Waits() + m.Receives + m.Sends
	}
	return sum
}

func endpoints(s *service.Snapshot) int {
	n := 0
	for _, port := range s.Ports {
		if port != nil {
			n += len(port.Families[service.IPv4].Endpoints) + len(port.Families[service.IPv6].Endpoints)
		}
	}
	return n
}
