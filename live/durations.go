package live

import (
	"math/bits"
	"slices"
	"time"
)

// Durations is a histogram of durations from 16 us to 39 hours. Each bucket is at most
// a quarter wider than the one before.
// A few durations take no memory of their own. Copies share what they count, so only the last
// copy may be added to.
type Durations struct {
	buckets *[durationBuckets]uint32 // nil while there are few
	count   uint32
	few     [fewDurations]uint8 // their buckets
}

const (
	durationShift   = 14 // the first bucket ends at 2^14 ns
	durationSteps   = 4  // buckets for each doubling
	durationBuckets = 33*durationSteps + 1
	fewDurations    = 4
)

// Add adds a duration.
func (d *Durations) Add(t time.Duration) {
	d.addTo(bucketOf(t))
}

func (d *Durations) addTo(bucket int) {
	if d.buckets == nil && d.count < fewDurations {
		d.few[d.count] = uint8(bucket)
	} else {
		d.spread()
		d.buckets[bucket]++
	}
	d.count++
}

// spread has the durations counted in buckets, however few they are.
func (d *Durations) spread() {
	if d.buckets != nil {
		return
	}
	d.buckets = new([durationBuckets]uint32)
	for _, bucket := range d.few[:d.count] {
		d.buckets[bucket]++
	}
}

// merge adds the durations of another histogram.
func (d *Durations) merge(o *Durations) {
	if o.buckets == nil {
		for _, bucket := range o.few[:o.count] {
			d.addTo(int(bucket))
		}
		return
	}
	d.spread()
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
	if d.buckets == nil {
		few := d.few
		slices.Sort(few[:d.count])
		return bucketEnd(int(few[rank-1]))
	}
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
