package admin

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// familyLabels are the values of kube-proxy's label ip_family. A change of Sluice
// is a sync of both families, so each metric has both values.
var familyLabels = []string{"IPv4", "IPv6"}

// Sync records how changes come into force, in kube-proxy's metrics and buckets. It
// is safe for concurrent use. Methods on a nil Sync do nothing.
type Sync struct {
	duration, programming *prometheus.HistogramVec
	last, queued          *prometheus.GaugeVec
}

// Bounds of native histograms, which Prometheus gets beside the buckets if it asks for them.
const (
	nativeFactor  = 1.1
	nativeBuckets = 100
)

// NewSync creates a Sync without changes.
func NewSync() *Sync {
	s := &Sync{
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kubeproxy_sync_proxy_rules_duration_seconds", Help: "Time to apply a change.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 15), NativeHistogramBucketFactor: nativeFactor, NativeHistogramMaxBucketNumber: nativeBuckets,
		}, []string{"ip_family"}),
		programming: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kubeproxy_network_programming_duration_seconds",
			Help: "Time from the change of a Pod or Service until it is in force here.",
			Buckets: append(prometheus.ExponentialBuckets(0.015625, 2, 7), // 15 ms to 1 s: kube-proxy has one bucket there
				2, 3, 4, 5, 10, 20, 30, 40, 50, 60, 120, 180, 240, 300),
			NativeHistogramBucketFactor: nativeFactor, NativeHistogramMaxBucketNumber: nativeBuckets,
		}, []string{"ip_family"}),
		last: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "kubeproxy_sync_proxy_rules_last_timestamp_seconds", Help: "When a change was last applied.",
		}, []string{"ip_family"}),
		queued: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", Help: "When a change last arrived.",
		}, []string{"ip_family"}),
	}
	for _, f := range familyLabels { // so that a rate is 0, and not unknown, before the first change
		s.duration.WithLabelValues(f)
		s.programming.WithLabelValues(f)
	}
	return s
}

// Queued records the arrival of a change.
func (s *Sync) Queued(at time.Time) {
	if s == nil {
		return
	}
	for _, f := range familyLabels {
		s.queued.WithLabelValues(f).Set(seconds(at))
	}
}

// Applied records that all changes are in force at now. begin is the start of the
// last sync; triggers are the times of the events that caused its changes.
func (s *Sync) Applied(begin, now time.Time, triggers []time.Time) {
	if s == nil {
		return
	}
	for _, f := range familyLabels {
		s.duration.WithLabelValues(f).Observe(now.Sub(begin).Seconds())
		s.last.WithLabelValues(f).Set(seconds(now))
		for _, t := range triggers {
			s.programming.WithLabelValues(f).Observe(max(now.Sub(t), 0).Seconds())
		}
	}
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }
