package conntrack

import (
	"fmt"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

func portName(name string) service.PortName {
	return service.PortName{Name: service.Name{Namespace: "default", Name: name}, Port: "http", Protocol: service.TCP}
}

func TestCountersOfAConnection(t *testing.T) {
	table := NewTable(Options{})
	s := table.Shard(0)
	c := table.Counters(portName("web"))
	r := &Record{Counters: c}
	s.Open(r)
	r.BeginAttempt(endpoint, 0)
	r.AttemptFailed(DialTimeout, int64(250*time.Millisecond))
	r.BeginAttempt(endpoint, int64(250*time.Millisecond))
	r.AttemptSucceeded(int64(251 * time.Millisecond))
	r.Progress(100, 5)
	r.Progress(150, 5)
	if got := c.Totals(); got.Active != 1 || got.Opened != 1 || got.BytesFromClient != 150 || got.BytesFromEndpoint != 5 || got.Ended != [endCount]uint64{} {
		t.Errorf("while it is open: %+v", got)
	}
	r.BytesFromClient, r.BytesFromEndpoint = 200, 1000
	r.FirstByte = int64(300 * time.Millisecond)
	r.End, r.Duration = EndpointFin, int64(2*time.Second)
	s.Close(r)
	s.Close(r)
	got := c.Totals()
	if got.Connect.Slow.At == 0 || got.FirstByte.Slow.At == 0 {
		t.Error("a connection that took 251 ms is no example of a slow one")
	}
	got.Connect.Slow.At, got.FirstByte.Slow.At = 0, 0
	check.Equal(t, fmt.Sprint(got.Connect.Native, got.FirstByte.Native, got.Duration.Native), "&{[{-15 1}]} &{[{-13 1}]} &{[{8 1}]}") // up to 273 ms, 324 ms, 2 s
	got.Connect.Native, got.FirstByte.Native, got.Duration.Native = nil, nil, nil
	want := Totals{
		Opened: 1, Retried: 1, Attempts: 2, BytesFromClient: 200, BytesFromEndpoint: 1000,
		Connect:   Histogram{Sum: 251 * time.Millisecond, Slow: Exemplar{ID: r.ID, Duration: 251 * time.Millisecond}},
		FirstByte: Histogram{Sum: 300 * time.Millisecond, Slow: Exemplar{ID: r.ID, Duration: 300 * time.Millisecond}},
		Duration:  Histogram{Sum: 2 * time.Second},
	}
	want.Failed[DialTimeout] = 1
	want.Ended[EndpointFin] = 1
	want.Connect.Buckets[11] = 1  // up to 300 ms
	want.FirstByte.Buckets[9] = 1 // up to 400 ms
	want.Duration.Buckets[7] = 1  // up to 2.5 s
	if got != want {
		t.Errorf("totals\n%+v, want\n%+v", got, want)
	}
}

// A service port without connections has small counters: a large cluster has many of them on each node.
func TestCountersOfAnIdlePortAreSmall(t *testing.T) {
	c := NewTable(Options{}).Counters(portName("web"))
	check.Equal(t, c.Totals(), Totals{})
	if size := unsafe.Sizeof(*c); size > 352 || c.outcomes.Load() != nil {
		t.Errorf("%d bytes, and %p", size, c.outcomes.Load())
	}
}

func TestHistogramBounds(t *testing.T) {
	var h histogram
	for i, bound := range ConnectBuckets {
		if i > 0 && bound <= ConnectBuckets[i-1] {
			t.Errorf("bound %d is %v, after %v", i, bound, ConnectBuckets[i-1])
		}
		h.observe(1, int64(bound))   // belongs to it
		h.observe(1, int64(bound)+1) // to the next
	}
	h.observe(1, 0)
	got := h.read()
	for i, n := range got.Buckets {
		if n != 2 && i < bucketCount || i == bucketCount && n != 1 {
			t.Errorf("bucket %d has %d: %v", i, n, got.Buckets)
		}
	}
	check.Equalf(t, got.Count(), uint64(2*bucketCount+1), "observations")
}

// Counters stay the same ones across changes of the port, and what a port has
// counted is never lost from the sum.
func TestCountersLiveAsLongAsThePort(t *testing.T) {
	table := NewTable(Options{})
	s := table.Shard(0)
	web := table.Counters(portName("web"))
	if table.Counters(portName("web")) != web || web.name != portName("web") {
		t.Error("the counters of a port change")
	}
	udp := portName("web")
	udp.Protocol = service.UDP
	if table.Counters(udp) == web {
		t.Error("UDP shares TCP's counters (A1.6)")
	}
	r := &Record{Counters: web, End: ClientFin}
	s.Open(r)
	table.Forget(portName("web"))
	ports, all := table.Totals()
	if len(ports) != 2 || ports[0].Name != portName("web") || all.Active != 1 {
		t.Errorf("forgotten with a connection open: %+v", ports)
	}
	check.Equalf(t, table.Counters(portName("web")), web, "a port that comes back has other counters")
	table.Forget(portName("web"))
	table.Forget(portName("never-seen"))
	s.Close(r)
	ports, all = table.Totals()
	if len(ports) != 1 || all.Opened != 1 || all.Active != 0 || all.Ended[ClientFin] != 1 {
		t.Errorf("forgotten: %d ports, %+v", len(ports), all)
	}
	if again := table.Counters(portName("web")); again == web || again.Totals() != (Totals{}) {
		t.Error("a new port of that name does not begin at 0")
	}
}

func TestTotalsAreSorted(t *testing.T) {
	table := NewTable(Options{})
	for _, n := range []string{"c", "a", "b"} {
		c := table.Counters(portName(n))
		c.bytesFromClient.Add(uint64(n[0]))
	}
	ports, all := table.Totals()
	if len(ports) != 3 || ports[0].Name.Name.Name != "a" || ports[2].Name.Name.Name != "c" || all.BytesFromClient != 'a'+'b'+'c' {
		t.Errorf("%+v", ports)
	}
}

// For the race detector: loops count while somebody reads and configures.
func TestCountersFromManyGoroutines(t *testing.T) {
	sink := &collector{}
	table := NewTable(Options{Shards: 2, Sink: sink})
	var wg sync.WaitGroup
	const each = 3000
	for i := range 2 {
		wg.Go(func() {
			s := table.Shard(i)
			for k := range each {
				r := &Record{Counters: table.Counters(portName("web")), End: ClientFin, BytesFromClient: 3}
				s.Open(r)
				r.BeginAttempt(endpoint, 0)
				r.AttemptSucceeded(5)
				s.Close(r)
				if k%100 == 0 {
					s.Flush()
				}
			}
			s.Flush()
		})
	}
	wg.Go(func() {
		for range 200 {
			table.Totals()
			table.Counters(portName("other"))
			table.Forget(portName("other"))
			table.Stats()
		}
	})
	wg.Wait()
	closeTable(t, table)
	_, all := table.Totals()
	if all.Opened != 2*each || all.Active != 0 || all.BytesFromClient != 6*each || all.Ended[ClientFin] != 2*each {
		t.Errorf("totals %+v", all)
	}
	if stats := table.Stats(); stats.Queued != uint64(len(sink.records)) || stats.Queued+stats.Dropped != 2*each {
		t.Errorf("stats %+v, %d records", stats, len(sink.records))
	}
}

// Count returns the number of observations.
func (h *Histogram) Count() uint64 {
	var n uint64
	for _, b := range h.Buckets {
		n += b
	}
	return n
}

// FailedAttempts returns the number of attempts that failed, for any reason.
func (t *Totals) FailedAttempts() uint64 {
	var n uint64
	for _, f := range t.Failed {
		n += f
	}
	return n
}
