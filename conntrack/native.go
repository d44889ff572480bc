package conntrack

import (
	"math"
	"sync/atomic"
)

// Native histograms of Prometheus have exponential buckets: bucket i ends at 2^(i/8) s, 9 % above
// its start.
const (
	// NativeSchema is Prometheus' number of this resolution: 2^NativeSchema buckets for each doubling.
	NativeSchema = 3
	perDoubling  = 1 << NativeSchema
	// Durations outside of 1 us to 4,096 s count in the first and the last bucket.
	nativeMin   = -20 * perDoubling
	nativeCount = 32 * perDoubling
)

// nativeBounds are where the buckets of a doubling end, as the bits of a float64's fraction.
var nativeBounds = func() (bounds [perDoubling]uint64) {
	for i := range bounds {
		bounds[i] = math.Float64bits(math.Exp2(float64(i)/perDoubling)) & fractionMask
	}
	return bounds
}()

// A float64 of at least 2^-1022 is 2^(e-exponentBias) * (1 + f/2^fractionBits).
const (
	fractionBits = 52
	fractionMask = 1<<fractionBits - 1
	exponentBias = 1023
)

// nativeBucket returns the bucket of a duration in ns, counted from nativeMin.
func nativeBucket(ns int64) int {
	seconds := math.Float64bits(float64(max(ns, 1)) / 1e9)
	fraction, i := seconds&fractionMask, 0
	if fraction > nativeBounds[perDoubling/2-1] {
		i = perDoubling / 2
	}
	for i < perDoubling && fraction > nativeBounds[i] {
		i++
	}
	return min(max((int(seconds>>fractionBits)-exponentBias)*perDoubling+i-nativeMin, 0), nativeCount-1)
}

// native counts durations by native bucket. It takes memory for those doublings that have any: 64
// bytes each.
type native [nativeCount / perDoubling]atomic.Pointer[doubling]

type doubling [perDoubling]atomic.Uint64

func (n *native) add(bucket int, count uint64) {
	at := &n[bucket/perDoubling]
	d := at.Load()
	if d == nil {
		at.CompareAndSwap(nil, new(doubling))
		d = at.Load()
	}
	d[bucket%perDoubling].Add(count)
}

func (n *native) read() *Native {
	var counts [nativeCount]uint64
	for number := range n {
		if d := n[number].Load(); d != nil {
			for i := range d {
				counts[number*perDoubling+i] = d[i].Load()
			}
		}
	}
	return newNative(&counts)
}

// Native is what a native histogram has counted. It is not changed once it is made; nil has counted
// nothing.
type Native struct {
	Buckets []NativeBucket // in order, without empty ones
}

// NativeBucket counts durations up to 2^(Index/8) s.
type NativeBucket struct {
	Index int
	Count uint64
}

func newNative(counts *[nativeCount]uint64) *Native {
	n := new(Native)
	for i, count := range counts {
		if count != 0 {
			n.Buckets = append(n.Buckets, NativeBucket{i + nativeMin, count})
		}
	}
	if n.Buckets == nil {
		return nil
	}
	return n
}

// plus returns the sum of n and a multiple of o.
func (n *Native) plus(o *Native, times int) *Native {
	if o == nil {
		return n
	}
	var counts [nativeCount]uint64
	n.each(func(bucket int, count uint64) { counts[bucket] += count })
	o.each(func(bucket int, count uint64) { counts[bucket] += count * uint64(times) })
	return newNative(&counts)
}

// each calls f for the buckets, counted from nativeMin.
func (n *Native) each(f func(bucket int, count uint64)) {
	if n == nil {
		return
	}
	for _, b := range n.Buckets {
		f(min(max(b.Index-nativeMin, 0), nativeCount-1), b.Count)
	}
}
