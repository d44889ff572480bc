package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-proxy/sluice/admin"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/health"
	"github.com/sluice-proxy/sluice/listener"
	"github.com/sluice-proxy/sluice/service"
)

// registry gives the metrics of the whole proxy.
func (p *proxy) registry() *prometheus.Registry {
	stats := func(pick func(listener.Stats) float64) func() float64 {
		return func() float64 { return pick(p.manager.Stats()) }
	}
	datagrams := func(pick func(datagram.Stats) float64) func() float64 {
		return func() float64 { return pick(p.manager.Datagrams()) }
	}
	sources := admin.Sources{
		Sync:    p.sync,
		Version: version,
		Table:   p.conntrack,
		Whole:   !p.options.metricsPerService,
		Log:     p.accessLog,
		Health:  func() health.Stats { return p.health.Stats() },
		NoLocal: p.noLocal.Load,
		Values: map[admin.Value]func() float64{
			admin.ServicePorts:          func() float64 { return float64(servicePorts(p.manager.Snapshot())) },
			admin.ServiceEndpoints:      func() float64 { return float64(endpoints(p.manager.Snapshot())) },
			admin.ConfigProblems:        func() float64 { return float64(len(p.manager.Snapshot().Problems)) },
			admin.ConfigAppliedTime:     func() float64 { return float64(p.applied.Load()) / 1e9 },
			admin.ConfigFailuresTotal:   func() float64 { return float64(p.failures.Load()) },
			admin.SteeringRepairsTotal:  func() float64 { return float64(p.repairs.Load()) },
			admin.NodeAddresses:         func() float64 { return float64(len(p.host.Load().Addresses)) },
			admin.PodRanges:             func() float64 { return float64(len(p.host.Load().PodRanges)) },
			admin.Listeners:             stats(func(s listener.Stats) float64 { return float64(s.Listeners) }),
			admin.PortClaims:            stats(func(s listener.Stats) float64 { return float64(s.Claims) }),
			admin.PortConflicts:         stats(func(s listener.Stats) float64 { return float64(s.Conflicts) }),
			admin.PortConflictsTotal:    stats(func(s listener.Stats) float64 { return float64(s.ConflictsTotal) }),
			admin.PortsUnclaimed:        stats(func(s listener.Stats) float64 { return float64(s.Unclaimed) }),
			admin.UnguardedDestinations: stats(func(s listener.Stats) float64 { return float64(s.Unguarded) }),
			admin.AcceptPausesTotal:     stats(func(s listener.Stats) float64 { return float64(s.AtLimit + s.Exhausted) }),
			admin.ConnectionsDialing:    stats(func(s listener.Stats) float64 { return float64(s.Dialing) }),
			admin.AffinityPins:          stats(func(s listener.Stats) float64 { return float64(s.Pins.Pins) }),
			admin.AffinityEvictedTotal:  stats(func(s listener.Stats) float64 { return float64(s.Pins.Evicted) }),
			admin.AffinityExpiredTotal:  stats(func(s listener.Stats) float64 { return float64(s.Pins.Expired) }),
			admin.UDPSessions:           datagrams(func(s datagram.Stats) float64 { return float64(s.Sessions) }),
			admin.UDPPausesTotal:        datagrams(func(s datagram.Stats) float64 { return float64(s.Pauses) }),
			admin.UDPUnservedTotal:      datagrams(func(s datagram.Stats) float64 { return float64(s.Unserved) }),
			admin.UDPLostTotal:          datagrams(func(s datagram.Stats) float64 { return float64(s.Lost) }),
			admin.UDPDisbelievedTotal:   datagrams(func(s datagram.Stats) float64 { return float64(s.Disbelieved) }),
			admin.UDPResentTotal:        datagrams(func(s datagram.Stats) float64 { return float64(s.Resent) }),
			admin.UDPConflictsTotal:     datagrams(func(s datagram.Stats) float64 { return float64(s.Conflicts) }),
			admin.HTTPEvictedTotal:      func() float64 { return float64(p.health.Stats().Evicted + p.metricsConns.Evicted()) },
			admin.RelayPipes:            func() float64 { return float64(p.relay.Pipes()) },
			admin.RelaySystemCallsTotal: func() float64 { return float64(p.systemCalls()) },
		},
	}
	p.sourceMetrics(&sources)
	return admin.NewRegistry(sources)
}

// sourceMetrics adds the metrics of the source that there is.
func (p *proxy) sourceMetrics(s *admin.Sources) {
	if m := p.manifests; m != nil {
		s.Values[admin.ManifestFiles] = func() float64 { return float64(m.Stats().Files) }
		s.Values[admin.ManifestFilesInError] = func() float64 { return float64(m.Stats().FilesInError) }
		s.Values[admin.ManifestObjectsPassedOver] = func() float64 { return float64(sum(m.Stats().PassedOver)) }
	}
	if c := p.cluster; c != nil {
		s.Values[admin.KubernetesConnected] = func() float64 {
			if c.Stats().Connected {
				return 1
			}
			return 0
		}
		s.Values[admin.KubernetesErrorsTotal] = func() float64 { return float64(c.Stats().Errors) }
		s.Values[admin.KubernetesRelistsTotal] = func() float64 { return float64(c.Stats().Relists) }
		s.Changes = func() admin.Changes {
			n := c.Stats()
			return admin.Changes{
				Services: n.ServiceChanges, PendingServices: n.PendingServiceChanges,
				Endpoints: n.EndpointChanges, PendingEndpoints: n.PendingEndpointChanges,
			}
		}
	}
}

func sum(counts map[string]int) int {
	n := 0
	for _, c := range counts {
		n += c
	}
	return n
}

func (p *proxy) systemCalls() uint64 {
	var sum uint64
	for _, l := range p.loops {
		s := l.Relay.Stats()
		sum += s.SystemCalls() + l.Poll.Waits()
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
