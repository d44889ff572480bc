package conntrack

import (
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestNativeBuckets compares the bucket of a duration with Prometheus' rule: it is above the end of the
// one before, 2^((i-1)/8) s, and at most 2^(i/8) s.
func TestNativeBuckets(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	durations := []int64{1, 1000, int64(time.Second) / 4, int64(time.Second), int64(time.Second) + 1, int64(time.Minute)}
	for range 10_000 {
		durations = append(durations, int64(math.Exp(random.Float64()*math.Log(float64(time.Hour)))))
	}
	for _, ns := range durations {
		i, s := nativeBucket(ns)+nativeMin, time.Duration(ns).Seconds()
		if i > nativeMin && s <= math.Exp2(float64(i-1)/perDoubling) || s > math.Exp2(float64(i)/perDoubling) {
			t.Errorf("%v is in bucket %d", time.Duration(ns), i)
		}
	}
	for ns, want := range map[int64]int{-1: 0, 0: 0, 1: 0, math.MaxInt64: nativeCount - 1} {
		check.Equalf(t, nativeBucket(ns), want, "%d ns", ns)
	}
}

// Nothing is lost while several loops meet a doubling for the first time, and readers may lag behind,
// but never see fewer durations than the buckets before had.
func TestNativeOfManyGoroutines(t *testing.T) {
	var h histogram
	var loops sync.WaitGroup
	const each = 2000
	for range 4 {
		loops.Go(func() {
			for i := range int64(each) {
				h.observe(1, 1000<<(i%20))
			}
		})
	}
	done := make(chan struct{})
	go func() {
		loops.Wait()
		close(done)
	}()
	for over := false; !over; {
		select {
		case <-done:
			over = true
		default:
		}
		read, native := h.read(), uint64(0)
		read.Native.each(func(_ int, n uint64) { native += n })
		if native < read.Count() || over && native != 4*each {
			t.Fatalf("%d in native buckets, %d in others", native, read.Count())
		}
	}
}

// BenchmarkHistogramMemory reports the bytes of histograms of a service port whose connections take
// from 0.2 ms to 3 ms, the first byte included.
func BenchmarkHistogramMemory(b *testing.B) {
	const ports = 5006
	var before, after runtime.MemStats
	for b.Loop() {
		list := make([]*outcomes, ports)
		runtime.GC()
		runtime.ReadMemStats(&before)
		for i := range list {
			list[i] = new(outcomes)
			for us := int64(200); us <= 3000; us += 200 {
				list[i].connect.observe(1, us*1000)
				list[i].firstByte.observeIn(1, us*1000, &FirstByteBuckets)
			}
		}
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.TotalAlloc-before.TotalAlloc)/ports, "bytes/port")
	}
}
