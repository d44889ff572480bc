package admin

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-proxy/sluice/conntrack"
)

// sendHistogram sends a histogram as Prometheus expects it: in seconds, with
// cumulative buckets.
func sendHistogram(ch chan<- prometheus.Metric, d *prometheus.Desc, h *conntrack.Histogram, bounds []time.Duration, labels []string) {
	buckets := make(map[float64]uint64, len(bounds))
	var cumulative uint64
	for i, bound := range bounds {
		cumulative += h.Buckets[i]
		buckets[bound.Seconds()] = cumulative
	}
	m := prometheus.MustNewConstHistogram(d, cumulative+h.Buckets[len(bounds)], h.Sum.Seconds(), buckets, labels...)
	if s := h.Slow; s.ID != 0 {
		m = prometheus.MustNewMetricWithExemplars(m, prometheus.Exemplar{
			Value: s.Duration.Seconds(), Labels: prometheus.Labels{"id": strconv.FormatUint(s.ID, 10)}, Timestamp: time.Unix(0, s.At),
		})
	}
	ch <- m
}
