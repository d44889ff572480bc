package load

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestBucketBounds(t *testing.T) {
	for _, v := range []int64{0, 1, 63, 64, 65, 127, 128, 129, 1000, 1 << 20, 1<<40 + 12345, math.MaxInt64} {
		i := bucket(v)
		if i < 0 || i >= buckets {
			t.Fatalf("bucket(%d) = %d, of %d", v, i, buckets)
		}
		if up := upper(i); up < v || float64(up-v) > float64(v)/subBuckets+1 {
			t.Errorf("value %d falls into the bucket that ends at %d", v, up)
		}
		if i > 0 && upper(i-1) >= v {
			t.Errorf("value %d belongs into an earlier bucket", v)
		}
	}
}

func TestQuantileAgainstSorting(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var a, b Histogram
	var values []int64
	for i := range 10000 {
		v := int64(rnd.ExpFloat64() * 50000)
		values = append(values, v)
		if i%2 == 0 {
			a.Record(v)
		} else {
			b.Record(v)
		}
	}
	a.Merge(&b)
	slices.Sort(values)
	if a.Count() != uint64(len(values)) || a.Max() != values[len(values)-1] {
		t.Errorf("count %d, max %d", a.Count(), a.Max())
	}
	for _, q := range []float64{0, 0.01, 0.5, 0.9, 0.99, 0.999, 1} {
		want := values[max(int(math.Ceil(q*float64(len(values))))-1, 0)]
		got := a.Quantile(q)
		if got < want || float64(got-want) > float64(want)/subBuckets+1 {
			t.Errorf("quantile %v is %d, sorting gives %d", q, got, want)
		}
	}
}

func TestEmptyHistogram(t *testing.T) {
	var h Histogram
	if h.Quantile(0.5) != 0 || h.Max() != 0 || h.Count() != 0 {
		t.Error("an empty histogram has values")
	}
	h.Record(-5)
	if h.Quantile(1) != 0 || h.Count() != 1 {
		t.Error("a negative value does not count as 0")
	}
	h.Reset()
	if h.Count() != 0 {
		t.Error("Reset leaves values")
	}
}
