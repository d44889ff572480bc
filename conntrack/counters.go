package conntrack

import (
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/service"
)

// ConnectBuckets, FirstByteBuckets and DurationBuckets are the upper bounds of the
// histograms' buckets; one more bucket takes longer durations. The steps of the retry plan (250
// ms, 500 ms, 1 s, 2 s, 3.75 s) are in separate buckets.
var (
	ConnectBuckets = [...]time.Duration{
		100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
		time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond,
		50 * time.Millisecond, 100 * time.Millisecond, 200 * time.Millisecond, 300 * time.Millisecond, 500 * time.Millisecond,
		800 * time.Millisecond, 2 * time.Second, 5 * time.Second,
	}
	FirstByteBuckets = [...]time.Duration{
		500 * time.Microsecond, time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond,
		10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond,
		400 * time.Millisecond, 550 * time.Millisecond, 750 * time.Millisecond,
		time.Second, 2500 * time.Millisecond, 10 * time.Second, time.Minute,
	}
	DurationBuckets = [...]time.Duration{
		time.Millisecond, 5 * time.Millisecond, 25 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond,
		500 * time.Millisecond, time.Second, 2500 * time.Millisecond, 5 * time.Second, 10 * time.Second, 30 * time.Second,
		time.Minute, 5 * time.Minute, 15 * time.Minute, time.Hour, 6 * time.Hour,
	}
)

const bucketCount = len(ConnectBuckets)

// The histograms share a type.
var (
	_ = [1]struct{}{}[len(ConnectBuckets)-len(FirstByteBuckets)]
	_ = [1]struct{}{}[len(ConnectBuckets)-len(DurationBuckets)]
)

// Counters count the connections of one service port. A connection looks them up
// once, when it is accepted. They are safe for concurrent use.
type Counters struct {
	name service.PortName

	// Fields that a connection writes at its start have a cache line of their own,
	// apart from those that it writes at its end.
	opened   atomic.Uint64
	active   atomic.Int64
	attempts atomic.Uint64
	retried  atomic.Uint64
	_        [32]byte

	loads balancer.Loads

	bytesFromClient   atomic.Uint64
	bytesFromEndpoint atomic.Uint64
	datagrams         [2]atomic.Uint64         // from clients, from endpoints
	outcomes          atomic.Pointer[outcomes] // nil until a connection has any
}

// outcomes are the larger part of Counters. Most service ports of a large cluster have no connection
// on a node.
type outcomes struct {
	ended     [endCount]atomic.Uint64
	failed    [dialErrorCount]atomic.Uint64
	connect   histogram
	firstByte histogram
	duration  histogram // without exemplars: each long connection would be one
}

func (c *Counters) outcome() *outcomes {
	if o := c.outcomes.Load(); o != nil {
		return o
	}
	c.outcomes.CompareAndSwap(nil, new(outcomes))
	return c.outcomes.Load()
}

// Loads returns the open connections of each endpoint, for the port's balancer. Records
// count there from BeginAttempt on.
func (c *Counters) Loads() *balancer.Loads { return &c.loads }

// Totals are a copy of Counters. The values are read one by one, so they may differ
// by connections in progress.
type Totals struct {
	Opened  uint64
	Active  int64
	Retried uint64 // connections with more than one attempt
	// Attempts counts started attempts; Failed counts failed ones by DialError.
	Attempts uint64
	Failed   [dialErrorCount]uint64 `json:"-"`
	// Ended counts connections by End.
	Ended             [endCount]uint64 `json:"-"`
	BytesFromClient   uint64
	BytesFromEndpoint uint64
	// Datagrams that were forwarded from clients and from endpoints.
	DatagramsFromClient   uint64
	DatagramsFromEndpoint uint64
	// Connect uses ConnectBuckets, FirstByte FirstByteBuckets, and Duration, of connections that
	// ended, DurationBuckets.
	Connect   Histogram
	FirstByte Histogram
	Duration  Histogram
}

// Histogram counts durations by bucket. Its buckets are not cumulative. Native counts the same
// durations, or more while there are new ones.
type Histogram struct {
	Buckets [bucketCount + 1]uint64
	Sum     time.Duration
	Slow    Exemplar `json:"-"`
	Native  *Native  `json:",omitempty"`
}

// Exemplar is the last connection whose duration was longer than slow; its ID is 0 without one.
type Exemplar struct {
	ID       uint64
	Duration time.Duration
	At       int64 // when it was counted, in Unix ns
}

// slow bounds what Exemplars cost: only connections that take longer are one.
const slow = 100 * time.Millisecond

func (h *Histogram) addTimes(o *Histogram, times int) {
	for i, b := range o.Buckets {
		h.Buckets[i] += b * uint64(times)
	}
	h.Sum += o.Sum * time.Duration(times)
	h.Native = h.Native.plus(o.Native, times)
	if o.Slow.At > h.Slow.At {
		h.Slow = o.Slow
	}
}

// Totals returns the current values.
func (c *Counters) Totals() Totals {
	t := Totals{
		Opened:                c.opened.Load(),
		Active:                c.active.Load(),
		Retried:               c.retried.Load(),
		Attempts:              c.attempts.Load(),
		BytesFromClient:       c.bytesFromClient.Load(),
		BytesFromEndpoint:     c.bytesFromEndpoint.Load(),
		DatagramsFromClient:   c.datagrams[0].Load(),
		DatagramsFromEndpoint: c.datagrams[1].Load(),
	}
	if o := c.outcomes.Load(); o != nil {
		t.Connect, t.FirstByte, t.Duration = o.connect.read(), o.firstByte.read(), o.duration.read()
		for i := range o.ended {
			t.Ended[i] = o.ended[i].Load()
		}
		for i := range o.failed {
			t.Failed[i] = o.failed[i].Load()
		}
	}
	return t
}

// Add adds the values of another service port.
func (t *Totals) Add(o *Totals) { t.addTimes(o, 1) }

// addTimes is Add of a multiple; -1 takes away.
func (t *Totals) addTimes(o *Totals, times int) {
	n := uint64(times)
	t.Opened += n * o.Opened
	t.Active += int64(times) * o.Active
	t.Retried += n * o.Retried
	t.Attempts += n * o.Attempts
	t.BytesFromClient += n * o.BytesFromClient
	t.BytesFromEndpoint += n * o.BytesFromEndpoint
	t.DatagramsFromClient += n * o.DatagramsFromClient
	t.DatagramsFromEndpoint += n * o.DatagramsFromEndpoint
	for i := range o.Ended {
		t.Ended[i] += n * o.Ended[i]
	}
	for i := range o.Failed {
		t.Failed[i] += n * o.Failed[i]
	}
	t.Connect.addTimes(&o.Connect, times)
	t.FirstByte.addTimes(&o.FirstByte, times)
	t.Duration.addTimes(&o.Duration, times)
}

// countDatagrams adds a record's datagrams since the last call.
func (c *Counters) countDatagrams(r *Record) {
	for i, n := range [...]uint64{r.DatagramsFromClient, r.DatagramsFromEndpoint} {
		if more := uint32(n) - r.countedDatagrams[i]; more != 0 {
			c.datagrams[i].Add(uint64(more))
			r.countedDatagrams[i] = uint32(n)
		}
	}
}

func (c *Counters) recordClosed(r *Record) {
	c.active.Add(-1)
	r.countBytes()
	o := c.outcome()
	if int(r.End) < endCount {
		o.ended[r.End].Add(1)
	}
	o.duration.observeIn(0, r.Duration, &DurationBuckets)
	if r.FirstByte > 0 {
		o.firstByte.observeIn(r.ID, r.FirstByte, &FirstByteBuckets)
	}
}

// histogram counts durations in ns.
type histogram struct {
	buckets [bucketCount + 1]atomic.Uint64
	sum     atomic.Int64
	slow    atomic.Pointer[Exemplar]
	native  native
}

// observe adds a connection's duration by ConnectBuckets.
func (h *histogram) observe(id uint64, ns int64) { h.observeIn(id, ns, &ConnectBuckets) }

// observeIn adds a connection's duration. If the ID is 0, it is no exemplar.
func (h *histogram) observeIn(id uint64, ns int64, bounds *[bucketCount]time.Duration) {
	i := 0
	for i < len(bounds) && ns > int64(bounds[i]) {
		i++
	}
	h.native.add(nativeBucket(ns), 1) // first: read reads it last, and it never lacks what the buckets have
	h.buckets[i].Add(1)
	h.sum.Add(ns)
	if id != 0 && ns > int64(slow) {
		h.slow.Store(&Exemplar{id, time.Duration(ns), time.Now().UnixNano()})
	}
}

func (h *histogram) read() Histogram {
	var out Histogram
	for i := range h.buckets {
		out.Buckets[i] = h.buckets[i].Load()
	}
	out.Sum = time.Duration(h.sum.Load())
	out.Native = h.native.read()
	if s := h.slow.Load(); s != nil {
		out.Slow = *s
	}
	return out
}
