package load

import (
	"math"
	"math/bits"
)

// A histogram's buckets grow with the value: there are subBuckets for each power
// of two, so that the relative error of a value is at most 1/subBuckets.
const (
	subBits    = 6
	subBuckets = 1 << subBits
	buckets    = (64 - subBits) * subBuckets
)

// Histogram counts durations in nanoseconds. The zero value is empty. It is
// not safe for concurrent use.
type Histogram struct {
	counts [buckets]uint64
	total  uint64
	max    int64
}

// Record counts one value; a negative one counts as 0.
func (h *Histogram) Record(ns int64) {
	ns = max(ns, 0)
	h.counts[bucket(ns)]++
	h.total++
	h.max = max(h.max, ns)
}

// Reset empties the histogram.
func (h *Histogram) Reset() { *h = Histogram{} }

// Merge adds another histogram's values.
func (h *Histogram) Merge(o *Histogram) {
	for i, n := range o.counts {
		h.counts[i] += n
	}
	h.total += o.total
	h.max = max(h.max, o.max)
}

// Count is the number of values.
func (h *Histogram) Count() uint64 { return h.total }

// Max is the largest value, exactly.
func (h *Histogram) Max() int64 { return h.max }

// Quantile returns the value that the fraction q (0 to 1) of all values does not
// exceed, rounded up to its bucket's upper bound but never above Max. It is 0 for
// an empty histogram.
func (h *Histogram) Quantile(q float64) int64 {
	if h.total == 0 {
		return 0
	}
	rank := uint64(math.Ceil(q * float64(h.total)))
	rank = min(max(rank, 1), h.total)
	var seen uint64
	for i, n := range h.counts {
		if seen += n; seen >= rank {
			return min(upper(i), h.max)
		}
	}
	return h.max
}

func bucket(ns int64) int {
	v := uint64(ns)
	if v < subBuckets {
		return int(v)
	}
	shift := bits.Len64(v) - subBits - 1
	// The leading subBits+1 bits select the bucket; the first of them is set.
	return (shift+1)*subBuckets + int(v>>shift) - subBuckets
}

// upper is the largest value of bucket i.
func upper(i int) int64 {
	if i < subBuckets {
		return int64(i)
	}
	shift := i/subBuckets - 1
	lead := uint64(i%subBuckets + subBuckets)
	return int64((lead+1)<<shift - 1)
}
