package load

import (
	"net/netip"
	"slices"
	"testing"
	"time"
)

func TestSplit(t *testing.T) {
	for _, c := range []struct {
		n, threads int
		want       []int
	}{
		{1, 4, []int{1}},
		{16, 1, []int{16}},
		{16, 3, []int{5, 5, 6}},
		{32, 4, []int{8, 8, 8, 8}},
	} {
		if got := split(c.n, c.threads); !slices.Equal(got, c.want) {
			t.Errorf("split(%d, %d) = %v, want %v", c.n, c.threads, got, c.want)
		}
	}
}

// Events before the window do not count, and the rate covers the time that the
// loop really ran in it.
func TestMeterWindow(t *testing.T) {
	const second = int64(time.Second)
	var m meter
	m.open(window{begin: second, end: 3 * second, slice: second})
	for _, at := range []int64{1, second / 2, second + 1, 2 * second, 2*second + 5, 3*second + 1} {
		if m.tick(at) != (at < 3*second) {
			t.Errorf("at %d: the window is open or closed wrongly", at)
		}
		m.done(at, at-10)
		m.bytes += 100
		m.reads++
	}
	m.failed("refused")
	r := Result{Errors: map[string]uint64{}}
	var latency Histogram
	m.addTo(&r, &latency)
	if r.Count != 4 || r.Bytes != 400 || latency.Count() != 4 {
		t.Errorf("counted %d, %d bytes, %d latencies; want 4, 400, 4", r.Count, r.Bytes, latency.Count())
	}
	if r.Reads != 4 {
		t.Errorf("%d reads, want 4", r.Reads)
	}
	if r.Rate != 2 || r.Seconds != 2 {
		t.Errorf("%v a second over %v s, want 2 over 2", r.Rate, r.Seconds)
	}
	if !slices.Equal(r.Slices, []float64{2, 1}) {
		t.Errorf("slices %v, want [2 1]", r.Slices)
	}
	if r.Errors["refused"] != 1 {
		t.Errorf("errors %v", r.Errors)
	}
}

// A worker that never reached the window does not count.
func TestMeterUnused(t *testing.T) {
	var m meter
	m.open(window{begin: 5, end: 10})
	m.tick(1)
	r := Result{Errors: map[string]uint64{}}
	var latency Histogram
	m.addTo(&r, &latency)
	if r.Rate != 0 || r.Seconds != 0 {
		t.Errorf("rate %v over %v s", r.Rate, r.Seconds)
	}
}

func TestRotation(t *testing.T) {
	s := Spec{Targets: []netip.Addr{netip.MustParseAddr("10.2.0.2"), netip.MustParseAddr("fd02::2")}}
	r := s.targets(80)
	a, b, c := r.next(), r.next(), r.next()
	if a == b || a != c {
		t.Error("two targets do not take turns")
	}
	if s.sources().next() != nil {
		t.Error("no source address is nil")
	}
}

func TestRunRefusesAnEmptySpec(t *testing.T) {
	if _, err := newWorkers(Spec{Kind: Echo, Clients: 1, Threads: 1}); err == nil {
		t.Error("no target is no error")
	}
	if _, err := newWorkers(Spec{Kind: "juggle", Clients: 1, Threads: 1, Targets: []netip.Addr{netip.IPv6Loopback()}}); err == nil {
		t.Error("an unknown kind is no error")
	}
}
