package node

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-proxy/sluice/admin"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/flow"
	"github.com/sluice-proxy/sluice/health"
	"github.com/sluice-proxy/sluice/listener"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
	"github.com/sluice-proxy/sluice/source/manifests"
	"github.com/sluice-proxy/sluice/stream"
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
	}
	if m := p.manifests; m != nil {
		sources.Metrics = append(sources.Metrics, manifestMetrics(m)...)
	}
	if c := p.cluster; c != nil {
		sources.Metrics = append(sources.Metrics, clusterMetrics(c)...)
		sources.Collectors = kubernetes.Requests()
	}
	return admin.NewRegistry(sources)
}

// ownMetrics are those of the proxy, whatever its source is.
func (p *Proxy) ownMetrics() []admin.Metric {
	stats := func(pick func(listener.Stats) float64) func() float64 {
		return func() float64 { return pick(p.manager.Stats()) }
	}
	streams := func(pick func(stream.Stats) float64) func() float64 {
		return func() float64 { return pick(p.stream.Stats()) }
	}
	datagrams := func(pick func(*datagram.Stats) *atomic.Uint64) func() float64 {
		return func() float64 { return float64(pick(p.datagram.Stats()).Load()) }
	}
	flows := func(pick func(flow.Stats) float64) func() float64 {
		return func() float64 {
			if p.flows == nil {
				return 0
			}
			return pick(p.flows.server.Stats())
		}
	}
	return []admin.Metric{
		admin.NewMetric("sluice_service_ports", "Service ports in the configuration in force.", func() float64 { return float64(servicePorts(p.manager.Snapshot())) }),
		admin.NewMetric("sluice_service_endpoints", "Endpoints of all service ports in the configuration in force.", func() float64 { return float64(endpoints(p.manager.Snapshot())) }),
		admin.NewMetric("sluice_config_problems", "Objects, or parts of them, that could not be used.", func() float64 { return float64(len(p.manager.Snapshot().Problems)) }),
		admin.NewMetric("sluice_config_file_fields_pending", "Fields of --config that have changed and need a restart.", p.pendingFields),
		admin.NewMetric("sluice_config_applied_timestamp_seconds", "When the configuration in force was applied.", func() float64 { return float64(p.applied.Load()) / 1e9 }),
		admin.NewMetric("sluice_config_failures_total", "Configurations that could not be applied.", func() float64 { return float64(p.failures.Load()) }),
		admin.NewMetric("sluice_steering_repairs_total", "Repairs of our kernel state after another program had changed it.", func() float64 { return float64(p.repairs.Load()) }),
		admin.NewMetric("sluice_node_addresses", "Addresses of this node's interfaces.", func() float64 { return float64(len(p.host.Load().Addresses)) }),
		admin.NewMetric("sluice_pod_ranges", "Ranges of addresses that this node routes to interfaces of pods; 0 if pods are not recognised by interfaces.", func() float64 { return float64(len(p.host.Load().PodRanges)) }),
		admin.NewMetric("sluice_listeners", "Listening sockets of services.", streams(func(s stream.Stats) float64 { return float64(s.Listeners) })),
		admin.NewMetric("sluice_port_claims", "Sockets that are bound to node ports, health check node ports and Service addresses of this node, one for each address.", stats(func(s listener.Stats) float64 { return float64(s.Claims) })),
		admin.NewMetric("sluice_port_conflicts", "Addresses and ports among them that another program has bound, so that they are not served.", stats(func(s listener.Stats) float64 { return float64(s.Conflicts) })),
		admin.NewMetric("sluice_port_conflicts_total", "Times that another program was found to have bound one.", stats(func(s listener.Stats) float64 { return float64(s.ConflictsTotal) })),
		admin.NewMetric("sluice_ports_unclaimed", "Addresses and ports among them that are not served because a limit is reached or a right is missing.", stats(func(s listener.Stats) float64 { return float64(s.Unclaimed) })),
		admin.NewMetric("sluice_sctp_ports_missing", "SCTP ports of cluster IPs that are not relayed because this kernel has no SCTP: they refuse clients that kernel flows do not serve.", stats(func(s listener.Stats) float64 { return float64(s.Lacking) })),
		admin.NewMetric("sluice_unguarded_destinations", "Addresses and ports with more source ranges than a socket filter holds: clients that are not allowed are reset instead of dropped.", streams(func(s stream.Stats) float64 { return float64(s.Unguarded) })),
		admin.NewMetric("sluice_accept_pauses_total", "Pauses in accepting because of a limit of the process or a lack of descriptors or memory.", streams(func(s stream.Stats) float64 { return float64(s.AtLimit + s.Exhausted) })),
		admin.NewMetric("sluice_connections_unserved_total", "Accepted connections to a destination that no service has; they are reset.", streams(func(s stream.Stats) float64 { return float64(s.Strays) })),
		admin.NewMetric("sluice_connections_dialing", "Connections that wait for an endpoint to answer.", streams(func(s stream.Stats) float64 { return float64(s.Dialing) })),
		admin.NewMetric("sluice_endpoints_ejected", "Endpoints that new TCP and SCTP connections pass over because they kept failing (sluice.dev/eject-after).", streams(func(s stream.Stats) float64 { return float64(s.Ejected) })),
		admin.NewMetric("sluice_affinity_pins", "Clients that are remembered for session affinity.", streams(func(s stream.Stats) float64 { return float64(s.Pins.Pins) })),
		admin.NewMetric("sluice_affinity_evicted_total", "Clients whose affinity was evicted because their service port had too many.", streams(func(s stream.Stats) float64 { return float64(s.Pins.Evicted) })),
		admin.NewMetric("sluice_affinity_expired_total", "Clients whose affinity expired.", streams(func(s stream.Stats) float64 { return float64(s.Pins.Expired) })),
		admin.NewMetric("sluice_udp_sessions", "UDP sessions that are open.", func() float64 { return float64(p.datagram.Stats().Sessions.Load()) }),
		admin.NewMetric("sluice_udp_pauses_total", "Times that a loop paused a service's UDP socket, because the service had created too many sessions.", datagrams(func(s *datagram.Stats) *atomic.Uint64 { return &s.Pauses })),
		admin.NewMetric("sluice_udp_datagrams_unserved_total", "UDP datagrams from a client that is not allowed, or to no service.", datagrams(func(s *datagram.Stats) *atomic.Uint64 { return &s.Unserved })),
		admin.NewMetric("sluice_udp_datagrams_lost_total", "UDP datagrams that were lost: full socket buffer, larger than the path's MTU, or no socket for the replies.", datagrams(func(s *datagram.Stats) *atomic.Uint64 { return &s.Lost })),
		admin.NewMetric("sluice_udp_icmp_ignored_total", "ICMP messages about UDP sessions that were ignored: not sent by the endpoint, not a refusal, or without a quote of the datagram.", datagrams(func(s *datagram.Stats) *atomic.Uint64 { return &s.Disbelieved })),
		admin.NewMetric("sluice_udp_datagrams_resent_total", "UDP datagrams that were sent again to another endpoint because the first one's port was closed.", datagrams(func(s *datagram.Stats) *atomic.Uint64 { return &s.Resent })),
		admin.NewMetric("sluice_udp_reply_conflicts_total", "Times that another program had a service's UDP port on all addresses, so that replies leave by a raw socket.", datagrams(func(s *datagram.Stats) *atomic.Uint64 { return &s.Conflicts })),
		admin.NewMetric("sluice_http_connections_evicted_total", "Connections to the ports for health checks and metrics, to the admin socket and to the page, that were closed to make room for new ones.", func() float64 {
			return float64(p.health.Stats().Evicted + p.metricsConns.Evicted() + p.admin.Evicted() + p.page.Evicted())
		}),
		admin.NewMetric("sluice_flows", "Connections and UDP sessions that the kernel forwards.", flows(func(s flow.Stats) float64 { return float64(s.Open) })),
		admin.NewMetric("sluice_flows_asked_total", "First packets of connections and UDP sessions about which the kernel's data path asked the process.", flows(func(s flow.Stats) float64 { return float64(s.Kernel["asked"]) })),
		admin.NewMetric("sluice_flows_decided_total", "Connections and UDP sessions about which the table of the kernel's data path decided.", flows(func(s flow.Stats) float64 { return float64(s.Kernel["decided"]) })),
		admin.NewMetric("sluice_flows_shortcuts_total", "Packets of the kernel's data path that skipped the node's IP stack.", flows(func(s flow.Stats) float64 { return float64(s.Kernel["shortcuts"]) })),
		admin.NewMetric("sluice_flows_passed_total", "Packets to Services that the kernel's data path left to the relay; of TCP, SYNs alone.", flows(func(s flow.Stats) float64 { return float64(s.PassedInAll()) })),
		admin.NewMetric("sluice_flows_packets_lost_total", "Packets that the kernel's data path could not send again after a decision.", flows(func(s flow.Stats) float64 { return float64(s.Lost) })),
		admin.NewMetric("sluice_relay_pipes", "Pipes that the relay has open.", func() float64 { return float64(p.relay.Pipes()) }),
		admin.NewMetric("sluice_relay_bulk_buffers", "Directions of connections that have large socket buffers, of --max-bulk-buffers.", func() float64 { n, _ := p.relay.Bulk(); return float64(n) }),
		admin.NewMetric("sluice_relay_bulk_buffers_refused_total", "Times that a direction kept small socket buffers because --max-bulk-buffers was reached, at most once for each MiB.", func() float64 { _, n := p.relay.Bulk(); return float64(n) }),
		admin.NewMetric("sluice_relay_held_message_bytes", "Bytes of SCTP messages that wait until their receiver has room, or for their end.", func() float64 { return float64(p.messages.Held()) }),
		admin.NewMetric("sluice_relay_system_calls_total", "System calls that the relay made to move bytes.", func() float64 { return float64(p.systemCalls()) }),
	}
}

func manifestMetrics(w *manifests.Watcher) []admin.Metric {
	return []admin.Metric{
		admin.NewMetric("sluice_manifest_files", "Files with a manifest's name in the directory.", func() float64 { return float64(w.Stats().Files) }),
		admin.NewMetric("sluice_manifest_files_in_error", "Files among them that could not be read or are invalid.", func() float64 { return float64(w.Stats().FilesInError) }),
		admin.NewMetric("sluice_manifest_objects_passed_over", "Objects of kinds that are ignored.", func() float64 { return float64(sum(w.Stats().PassedOver)) }),
		admin.NewMetric("sluice_manifest_polling", "1 while the directory is read every 50 ms because the system does not report changes, 0 otherwise.", func() float64 { return oneIf(w.Stats().Polling) }),
	}
}

func clusterMetrics(c *kubernetes.Source) []admin.Metric {
	const ofKubeProxy = "kubeproxy_sync_proxy_rules_"
	return append(admin.PerFamily(
		admin.NewMetric(ofKubeProxy+"service_changes_total", "Services that were added, changed or removed.", func() float64 { return float64(c.Stats().ServiceChanges) }),
		admin.NewMetric(ofKubeProxy+"service_changes_pending", "Services among them that are not in force yet.", func() float64 { return float64(c.Stats().PendingServiceChanges) }),
		admin.NewMetric(ofKubeProxy+"endpoint_changes_total", "EndpointSlices that were added, changed or removed.", func() float64 { return float64(c.Stats().EndpointChanges) }),
		admin.NewMetric(ofKubeProxy+"endpoint_changes_pending", "EndpointSlices among them that are not in force yet.", func() float64 { return float64(c.Stats().PendingEndpointChanges) }),
	),
		admin.NewMetric("sluice_kubernetes_connected", "1 while the API server answers all requests, 0 otherwise.", func() float64 { return oneIf(c.Stats().Connected) }),
		admin.NewMetric("sluice_kubernetes_errors_total", "Requests to the API server that failed.", func() float64 { return float64(c.Stats().Errors) }),
		admin.NewMetric("sluice_kubernetes_relists_total", "Times that all objects of a kind were listed again, because their watch could not be resumed.", func() float64 { return float64(c.Stats().Relists) }),
	)
}

func (p *Proxy) pendingFields() float64 {
	if p.config.PendingFields == nil {
		return 0
	}
	return float64(p.config.PendingFields())
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
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
