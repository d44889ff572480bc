package admin

import (
	"math"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// scrapeProtobuf returns the histogram of a service port as a Prometheus that wants native histograms
// gets it.
func scrapeProtobuf(t *testing.T, s Sources, family string, port service.PortName) *dto.Histogram {
	t.Helper()
	accept := expfmt.NewFormat(expfmt.TypeProtoDelim)
	r := httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody)
	r.Header.Set("Accept", string(accept))
	w := httptest.NewRecorder()
	pages := &Pages{Metrics: NewRegistry(s), Mode: func() string { return "" }}
	pages.handler(time.Now()).ServeHTTP(w, r)
	for decoder := expfmt.NewDecoder(w.Body, expfmt.ResponseFormat(w.Header())); ; {
		var f dto.MetricFamily
		must.OK(t, decoder.Decode(&f)) // also if it ends without the histogram
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if f.GetName() == family && l.GetName() == "service" && l.GetValue() == port.Name.Name {
					return m.GetHistogram()
				}
			}
		}
	}
}

// quantile is what histogram_quantile finds in native buckets: where the bucket begins and ends that
// has it. It fails the test unless their sum is the number of samples, without which Prometheus
// refuses a histogram.
func quantile(t *testing.T, h *dto.Histogram, q float64) (begin, end float64) {
	t.Helper()
	growth := math.Exp2(math.Exp2(-float64(h.GetSchema())))
	rank, index, seen, count, next := q*float64(h.GetSampleCount()), 0, 0.0, int64(0), 0
	for _, span := range h.GetPositiveSpan() {
		index += int(span.GetOffset())
		for range span.GetLength() {
			count += h.GetPositiveDelta()[next]
			if seen < rank && seen+float64(count) >= rank {
				end = math.Pow(growth, float64(index))
			}
			seen += float64(count)
			index++
			next++
		}
	}
	if seen != float64(h.GetSampleCount()) || next != len(h.GetPositiveDelta()) {
		t.Errorf("%v samples in buckets of %v, %d of %d buckets", seen, h.GetSampleCount(), next, len(h.GetPositiveDelta()))
	}
	return end / growth, end
}

// TestNativeHistograms: a scrape by protobuf has the p99 of a server that takes 400 ms to within a
// native bucket, 9 %, beside the buckets that text has.
func TestNativeHistograms(t *testing.T) {
	s := sources(t)
	slow := service.PortName{Name: service.Name{Namespace: "default", Name: "slow"}, Port: "http", Protocol: service.TCP}
	counters, shard := s.Table.Counters(slow), s.Table.Shard(0)
	const connections = 1000
	for i := range int64(connections) {
		r := &conntrack.Record{Counters: counters, End: conntrack.ClientFin}
		shard.Open(r)
		r.BeginAttempt(&service.Endpoint{}, 0)
		r.AttemptSucceeded(int64(time.Millisecond) / 2)
		r.FirstByte = int64(395*time.Millisecond) + i*int64(10*time.Microsecond) // up to 405 ms
		if i%20 == 0 {
			r.FirstByte = int64(2 * time.Millisecond) // from a cache
		}
		shard.Close(r)
	}
	h := scrapeProtobuf(t, s, "sluice_first_byte_duration_seconds", slow)
	begin, end := quantile(t, h, 0.99)
	if begin > 0.405 || end < 0.405 || end > 0.4*1.1 {
		t.Errorf("p99 is between %v and %v", begin, end)
	}
	check.Equal(t, len(h.GetBucket()), len(conntrack.FirstByteBuckets))
	check.Equal(t, h.GetSampleCount(), connections)
	check.Equal(t, len(h.GetPositiveSpan()), 2) // nothing is said of what lies between
	check.Equal(t, len(h.GetExemplars()), 1)
	begin, end = quantile(t, scrapeProtobuf(t, s, "sluice_connect_duration_seconds", slow), 0.99)
	if begin > 0.0005 || end < 0.0005 {
		t.Errorf("p99 of connecting is between %v and %v", begin, end)
	}
	// Up to maxGap empty buckets are among others.
	var out dto.Histogram
	check.Equal(t, addNative(&out, &conntrack.Native{Buckets: []conntrack.NativeBucket{{Index: -3, Count: 1}, {Index: 0, Count: 2}, {Index: 4, Count: 3}}}), 6)
	out.Schema, out.SampleCount = new(int32(conntrack.NativeSchema)), new(uint64(6))
	check.Equal(t, len(out.GetPositiveSpan()), 2)
	if begin, end = quantile(t, &out, 0.4); begin >= 1 || end != 1 {
		t.Errorf("p40 is between %v and %v", begin, end)
	}
	young := slow
	young.Name.Name = "young"
	shard.Open(&conntrack.Record{Counters: s.Table.Counters(young)})
	if h := scrapeProtobuf(t, s, "sluice_connect_duration_seconds", young); h.GetZeroThreshold() == 0 || h.GetSampleCount() != 0 {
		t.Errorf("a histogram without samples is not native: %v", h)
	}
}
