package admin

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/sluice-proxy/sluice/conntrack"
)

// histogram is a metric as Prometheus expects it: in seconds, with cumulative buckets and, for those
// that ask for protobuf, native ones. client_golang has no constant histogram with both.
type histogram struct {
	desc   *prometheus.Desc
	counts *conntrack.Histogram
	bounds []time.Duration
	labels []*dto.LabelPair
}

// newHistogram returns a histogram, with an exemplar if it has one.
func newHistogram(desc *prometheus.Desc, counts *conntrack.Histogram, bounds []time.Duration, labels []*dto.LabelPair) prometheus.Metric {
	h := &histogram{desc, counts, bounds, labels}
	if s := counts.Slow; s.ID != 0 {
		return prometheus.MustNewMetricWithExemplars(h, prometheus.Exemplar{
			Value: s.Duration.Seconds(), Labels: prometheus.Labels{"id": strconv.FormatUint(s.ID, 10)}, Timestamp: time.Unix(0, s.At),
		})
	}
	return h
}

// Desc implements prometheus.Metric.
func (h *histogram) Desc() *prometheus.Desc { return h.desc }

// Write implements prometheus.Metric.
func (h *histogram) Write(m *dto.Metric) error {
	out := &dto.Histogram{
		SampleSum: new(h.counts.Sum.Seconds()), Bucket: make([]*dto.Bucket, len(h.bounds)),
		Schema: new(int32(conntrack.NativeSchema)), ZeroThreshold: new(prometheus.DefNativeHistogramZeroThreshold), ZeroCount: new(uint64(0)),
	}
	var cumulative uint64
	for i, bound := range h.bounds {
		cumulative += h.counts.Buckets[i]
		out.Bucket[i] = &dto.Bucket{UpperBound: new(bound.Seconds()), CumulativeCount: new(cumulative)}
	}
	out.SampleCount = new(addNative(out, h.counts.Native)) // Prometheus refuses any other number
	m.Label, m.Histogram = h.labels, out
	return nil
}

// maxGap is how many empty buckets take less than a new span.
const maxGap = 2

// addNative adds native buckets as spans, each with the distance from the one before and differences
// of counts. It returns the sum.
func addNative(out *dto.Histogram, n *conntrack.Native) (sum uint64) {
	if n == nil {
		return 0
	}
	var span *dto.BucketSpan
	var next int
	var last int64
	add := func(count int64) {
		*span.Length++
		out.PositiveDelta = append(out.PositiveDelta, count-last)
		last = count
		next++
	}
	for _, b := range n.Buckets {
		if gap := b.Index - next; span == nil || gap > maxGap {
			span = &dto.BucketSpan{Offset: new(int32(gap)), Length: new(uint32(0))}
			out.PositiveSpan = append(out.PositiveSpan, span)
			next = b.Index
		}
		for next < b.Index {
			add(0)
		}
		add(int64(b.Count))
		sum += b.Count
	}
	return sum
}
