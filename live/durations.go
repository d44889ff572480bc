package live

import (
	"math/bits"
	"time"
)

// Durations is a histogram of durations from 16 us to 268 s. Each bucket is at most
// a quarter wider than the one before.
// An empty one takes no memory of its own. Copies share what they count, so only the last
// copy may be added to.
type Durations struct {
	buckets *[durationBuckets]uint32 // nil without any
	count   uint32
}

const (
	durationShift   = 14 // the first bucket ends at 2^14 ns
	durationSteps   = 4  // buckets for each doubling
	durationBuckets = 24*durationSteps + 1
)

// Add adds a duration.
func (d *Durations) Add(t time.Duration) {
	if d.buckets == nil {
		d.buckets = new([durationBuckets]uint32)
	}
	d.buckets[bucketOf(t)]++
	d.count++
}

// merge adds the durations of another histogram.
func (d *Durations) merge(o *Durations) {
	if o.count == 0 {
		return
	}
	if d.buckets == nil {
		d.buckets = new([durationBuckets]uint32)
	}
	for i, n := range o.buckets {
		d.buckets[i] += n
	}
	d.count += o.count
}

// Quantile returns a duration that the part q of all durations does not exceed, to
// within the width of a bucket; 0 without any.
func (d *Durations) Quantile(q float64) time.Duration {
	if d.count == 0 {
		return 0
	}
	rank := uint32(q*float64(d.count-1)) + 1
	for i, n := range d.buckets {
		if n >= rank {
			return bucketEnd(i)
		}
		rank -= n
	}
	return bucketEnd(durationBuckets - 1)
}

// bucketOf returns the bucket of a duration. Bucket 0 has all below 2^durationShift
// ns; after it, each doubling has durationSteps buckets of equal width.
func bucketOf(t time.Duration) int {
	if t < 1<<durationShift {
		return 0
	}
	exponent := bits.Len64(uint64(t)) - 1
	step := int(uint64(t)>>(exponent-2)) & (durationSteps - 1)
	return min((exponent-durationShift)*durationSteps+step+1, durationBuckets-1)
}

// bucketEnd returns the end of a bucket.
func bucketEnd(i int) time.Duration {
	if i == 0 {
		return 1 << durationShift
	}
	exponent, step := (i-1)/durationSteps+durationShift, (i-1)%durationSteps
	return time.Duration(1)<<exponent + time.Duration(step+1)<<(exponent-2)
}
