package kubernetes

import (
	"context"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/metrics"
)

// requestMetrics are the metrics of requests to the API server that all programs of
// Kubernetes have, with their names, labels and buckets. client-go has one set of them
// for the process.
type requestMetrics struct {
	duration, limited, sent, received *prometheus.HistogramVec
	results, retries                  *prometheus.CounterVec
}

// Requests returns the collectors of requests to the API server (rest_client_…). They
// count from the first call on, for all clients of the process.
func Requests() []prometheus.Collector {
	m := registerRequests()
	return []prometheus.Collector{m.duration, m.limited, m.sent, m.received, m.results, m.retries}
}

var registerRequests = sync.OnceValue(func() *requestMetrics {
	histogram := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, []string{"verb", "host"})
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	seconds := []float64{0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60}
	bytes := []float64{64, 256, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20}
	m := &requestMetrics{
		duration: histogram("rest_client_request_duration_seconds", "Time from a request to the API server until its response begins.", seconds),
		limited:  histogram("rest_client_rate_limiter_duration_seconds", "Time that a request waited because of --kube-api-qps.", seconds),
		sent:     histogram("rest_client_request_size_bytes", "Size of requests to the API server.", bytes),
		received: histogram("rest_client_response_size_bytes", "Size of its responses.", bytes),
		results:  counter("rest_client_requests_total", "Requests to the API server, by HTTP status.", "code", "method", "host"),
		retries:  counter("rest_client_request_retries_total", "Requests that were repeated, by HTTP status.", "code", "verb", "host"),
	}
	metrics.Register(metrics.RegisterOpts{
		RequestLatency:     latencies{m.duration},
		RateLimiterLatency: latencies{m.limited},
		RequestSize:        sizes{m.sent},
		ResponseSize:       sizes{m.received},
		RequestResult:      results{m.results},
		RequestRetry:       retries{m.retries},
	})
	return m
})

// began counts the time until the response of a watch began. client-go measures other
// requests only, and nearly all of ours are watches.
func (m *requestMetrics) began(r *http.Request, latency time.Duration) {
	m.duration.WithLabelValues(r.Method, r.URL.Host).Observe(latency.Seconds())
}

// expect creates the histograms of the methods that are used, and the counters of one
// status of each class, so that a rate of them is 0 and not unknown before the first.
func (m *requestMetrics) expect(config *rest.Config) {
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return // the first request will say it
	}
	for _, vec := range []*prometheus.HistogramVec{m.duration, m.limited, m.sent, m.received} {
		vec.WithLabelValues("GET", server.Host)
		vec.WithLabelValues("POST", server.Host)
	}
	for _, code := range []string{"200", "304", "404", "500"} {
		m.results.WithLabelValues(code, "GET", server.Host)
	}
}

type latencies struct{ vec *prometheus.HistogramVec }

// Observe implements metrics.LatencyMetric.
func (l latencies) Observe(_ context.Context, verb string, u url.URL, latency time.Duration) {
	l.vec.WithLabelValues(verb, u.Host).Observe(latency.Seconds())
}

type sizes struct{ vec *prometheus.HistogramVec }

// Observe implements metrics.SizeMetric.
func (s sizes) Observe(_ context.Context, verb, host string, size float64) {
	s.vec.WithLabelValues(verb, host).Observe(size)
}

type results struct{ vec *prometheus.CounterVec }

// Increment implements metrics.ResultMetric.
func (r results) Increment(_ context.Context, code, method, host string) {
	r.vec.WithLabelValues(code, method, host).Inc()
}

type retries struct{ vec *prometheus.CounterVec }

// IncrementRetry implements metrics.RetryMetric.
func (r retries) IncrementRetry(_ context.Context, code, method, host string) {
	r.vec.WithLabelValues(code, method, host).Inc()
}
