package node

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// refusalInterval is how often refusals are reported.
	refusalInterval = time.Second
	// maxRefusalsTold bounds the clients and destinations of one report: those with the most
	// packets.
	maxRefusalsTold = 256
)

// refusalReasons are those of redirect.Reason, and those of kernel flows alone.
var refusalReasons = [...]conntrack.End{
	redirect.NoEndpoints:      conntrack.NoEndpoints,
	redirect.NoLocalEndpoints: conntrack.NoLocalEndpoints,
	redirect.UnknownPort:      conntrack.UnknownPort,
	redirect.UnknownAddress:   conntrack.UnknownAddress,
	redirect.Reasons:          conntrack.NotAdmitted,
}

// refusals counts what steering and kernel flows refuse or drop. The zero value is ready to
// use.
type refusals struct {
	totals [len(refusalReasons)]atomic.Uint64
	told   uint64 // all packets up to the last time
	doubt  once.Trouble

	mu     sync.Mutex                   // guards what kernel flows drop
	flows  map[conntrack.Refusal]uint64 // packets since the last time, by all but Packets
	byFlow [len(refusalReasons)]uint64  // all packets
}

// dropped counts a first packet that kernel flows dropped by a verdict. It is for the
// thread of the flows.
func (r *refusals) dropped(client netip.Addr, vip netip.AddrPort, protocol service.Protocol, v *policy.Verdict) {
	reason := refusalOf(v)
	r.add(reason, 1, conntrack.Refusal{
		Client: client, VIP: vip, Protocol: protocol, Kind: v.Kind, Port: v.Port, Reason: reason, Packets: 1, Path: conntrack.Kernel,
	})
}

// notAdmitted counts first packets that the table of kernel flows dropped by source ranges. It is for
// the thread of the flows.
func (r *refusals) notAdmitted(list []conntrack.Refusal, packets uint64) {
	r.add(conntrack.NotAdmitted, packets, list...)
}

// add counts packets; list has their clients and destinations, as far as known.
func (r *refusals) add(reason conntrack.End, packets uint64, list ...conntrack.Refusal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.byFlow[slices.Index(refusalReasons[:], reason)] += packets
	if r.flows == nil {
		r.flows = make(map[conntrack.Refusal]uint64)
	}
	for _, key := range list {
		n := key.Packets
		key.Packets = 0
		if _, known := r.flows[key]; known || len(r.flows) < redirect.MaxRefusals {
			r.flows[key] += n
		}
	}
}

// refusalOf names why policy refuses or drops.
func refusalOf(v *policy.Verdict) conntrack.End {
	switch v.Rule {
	case policy.RuleSourceRanges:
		return conntrack.NotAdmitted
	case policy.RuleNoLocalEndpoints:
		return conntrack.NoLocalEndpoints
	case policy.RuleUnknownPort:
		if v.Action == policy.Drop {
			return conntrack.UnknownAddress
		}
		return conntrack.UnknownPort
	}
	return conntrack.NoEndpoints
}

// take returns what kernel flows dropped since the last time, and all packets by reason.
func (r *refusals) take() (list []conntrack.Refusal, totals [len(refusalReasons)]uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, packets := range r.flows {
		key.Packets = packets
		list = append(list, key)
	}
	clear(r.flows)
	return list, r.byFlow
}

// reportRefusals reports each second what was refused or dropped, until ctx ends.
func (p *Proxy) reportRefusals(ctx context.Context) {
	tick := time.NewTicker(refusalInterval)
	defer tick.Stop()
	counter, _ := p.steer.(redirect.Counter)
	for {
		select {
		case <-tick.C:
			p.reportRefused(counter)
		case <-ctx.Done():
			return
		}
	}
}

// reportRefused reports what was refused or dropped since the last report. counter may be nil.
func (p *Proxy) reportRefused(counter redirect.Counter) {
	r := &p.refusals
	list, totals := r.take()
	var steered redirect.Refused
	if counter != nil {
		var err error
		if steered, err = counter.Refused(); err != nil {
			if r.doubt.New(err.Error()) {
				p.log.Warn().Err(err).Msg("what is refused cannot be counted")
			}
			return
		}
		r.doubt.Over()
	}
	table := p.manager.Policy()
	for i := range steered.New {
		s := &steered.New[i]
		vip := netip.AddrPortFrom(s.Destination.Addr, s.Destination.Port)
		v := table.Resolve(s.Destination.Protocol, s.Client, vip)
		list = append(list, conntrack.Refusal{
			Client: s.Client, VIP: vip, Protocol: s.Destination.Protocol, Kind: v.Kind, Port: v.Port, Reason: refusalReasons[s.Reason], Packets: s.Packets,
		})
	}
	var all, listed uint64
	for i, n := range totals {
		if i < len(steered.Totals) {
			n += steered.Totals[i]
		}
		r.totals[i].Store(n)
		all += n
	}
	if len(list) == 0 && all <= r.told {
		return
	}
	slices.SortFunc(list, func(a, b conntrack.Refusal) int { return cmp.Compare(b.Packets, a.Packets) })
	list = list[:min(len(list), maxRefusalsTold)]
	for i := range list {
		listed += list[i].Packets
	}
	// A packet may be listed before it is among the totals.
	r.told += listed
	more := all - min(r.told, all)
	r.told += more
	p.conntrack.Refuse(list, more, !p.config.RecordRefusals)
}

const refusedHelp = "Packets that were refused or dropped without a connection."

var refusedDesc = prometheus.NewDesc("sluice_refused_packets_total", refusedHelp, []string{"reason"}, nil)

// Describe implements prometheus.Collector.
func (r *refusals) Describe(to chan<- *prometheus.Desc) { to <- refusedDesc }

// Collect implements prometheus.Collector.
func (r *refusals) Collect(to chan<- prometheus.Metric) {
	for i, reason := range refusalReasons {
		to <- prometheus.MustNewConstMetric(refusedDesc, prometheus.CounterValue, float64(r.totals[i].Load()), reason.String())
	}
}
