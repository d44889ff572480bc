package live

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/test/must"
)

// BenchmarkWalk100000 pages through 100,000 connections. stop-us/p99 and stop-us/max
// are how long the loop was away from its other work at a time: what a connection
// waits at most.
func BenchmarkWalk100000(b *testing.B) { benchmarkWalk(b, 100_000) }

func benchmarkWalk(b *testing.B, open int) {
	w := newWorld(b, 1)
	w.on(0, func(s *conntrack.Shard) {
		for i := range open {
			s.Open(&conntrack.Record{Start: poll.Nanotime(), Client: client(i), Port: web, Endpoint: a})
		}
	})
	order, err := ParseOrder("-bytes")
	must.OK(b, err)
	var stops Durations
	var longest time.Duration
	w.view.post = func(shard int, f func()) bool {
		return w.loops[shard].Post(func() {
			began := time.Now()
			f()
			took := time.Since(began)
			stops.Add(took)
			longest = max(longest, took)
		})
	}
	runtime.GC()
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		page, err := w.view.Page(context.Background(), Wanted{Filter: parse(b, "service=web"), Order: order, Offset: 0, Limit: 100})
		if err != nil || page.Open != open {
			b.Fatalf("%v, %v", page, err)
		}
	}
	b.ReportMetric(float64(stops.Quantile(0.99).Microseconds()), "stop-us/p99")
	b.ReportMetric(float64(longest.Microseconds()), "stop-us/max")
}
