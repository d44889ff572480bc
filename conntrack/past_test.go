package conntrack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// newPast returns a Past of a table that a test feeds by add.
func newPast(t *testing.T, room int) *Past {
	t.Helper()
	table := NewTable(Options{Now: func() time.Time { return time.Unix(0, 0) }})
	p := NewPast(table, room)
	t.Cleanup(func() { p.Close(); closeTable(t, table) })
	return p
}

func all(*Record) bool { return true }

// lines returns the records that a view visits, as JSON.
func (v *PastView) lines(t *testing.T, since time.Time, limit int, match func(*Record) bool) string {
	t.Helper()
	var out bytes.Buffer
	j := NewJSONEncoder(&out)
	must.OK(t, v.Visit(t.Context(), since, limit, match, func(r *Record) error { j.Encode(r); return nil }))
	return out.String()
}

// A kept record says what the record said.
func TestPastKeepsWholeRecords(t *testing.T) {
	records := examples()
	zoned := records[1]
	zoned.Client = netip.MustParseAddrPort("[fe80::1%eth0]:7")
	zoned.Path = Kernel
	zoned.Failed = slices.Repeat(zoned.Failed, maxFailedListed)
	named, local := records[2], records[3]
	named.self = &self{via: netip.MustParseAddrPort("10.0.0.250:999")}
	local.self = &self{name: "node-a", via: netip.MustParseAddrPort("10.0.0.251:998")}
	records = append(records, zoned, named, local)
	var want bytes.Buffer
	j := NewJSONEncoder(&want)
	for i := range records {
		j.Encode(&records[i])
	}
	p := newPast(t, LeastPast)
	p.put(records)
	if len(p.blocks) > 0 {
		t.Errorf("%d blocks", len(p.blocks))
	}
	if got := p.View().lines(t, time.Unix(0, 0), 0, all); got != want.String() {
		t.Errorf("kept:\n%s\nwant:\n%s", got, want.String())
	}
}

// A Past keeps the newest records that fit into its room, and says since when it has all.
func TestPastIsBounded(t *testing.T) {
	const room, records, endpoints = LeastPast, 100_000, 1000
	p := newPast(t, room)
	p.rate = tapRate{} // all of them come in one second
	pods := make([]service.Endpoint, endpoints)
	for i := range pods {
		pods[i].Pod = service.Name{Namespace: "shop", Name: fmt.Sprint("cart-", i)}
	}
	for i := range records {
		p.put([]Record{{ID: uint64(i), Wall: int64(i) * int64(time.Millisecond), Endpoint: &pods[i%endpoints], Port: portHTTP}})
	}
	size := p.held + mostBlock
	if size > room || size < room/2 {
		t.Errorf("%d bytes are held, of %d", size, room)
	}
	v := p.View()
	if v.Kept < 3000 || v.Kept > records/2 || v.Lost != 0 {
		t.Errorf("%d records are kept, %d lost", v.Kept, v.Lost)
	}
	first := uint64(records - v.Kept)
	next := first
	_ = v.Visit(t.Context(), time.Unix(0, 0), 0, all, func(r *Record) error {
		if r.ID != next || r.Endpoint.Pod.Name != fmt.Sprint("cart-", next%endpoints) {
			t.Fatalf("%d, %s instead of %d", r.ID, r.Endpoint.Pod, next)
		}
		next++
		return nil
	})
	check.Equalf(t, next, records, "the last")
	if want := time.Unix(0, 0).Add(time.Duration(first-1) * time.Millisecond); !v.Since.Equal(want) {
		t.Errorf("since %v, want %v", v.Since, want)
	}
}

// A question has bounds: time, match, and the last ones only. A slow model is a list.
func TestPastQuestions(t *testing.T) {
	const records = 3000
	p := newPast(t, LeastPast)
	var model []Record
	for i := range records {
		r := Record{ID: uint64(i), Wall: int64(i), Duration: 5, Attempts: uint16(i % 3), Endpoint: &service.Endpoint{Place: service.At(fmt.Sprint(i), "")}}
		model = append(model, r)
	}
	p.put(model)
	p.current.lost = 7
	if len(p.blocks) < 3 {
		t.Fatalf("%d blocks test nothing", len(p.blocks))
	}
	v := p.View()
	if v.Lost != 7 || v.Kept != records {
		t.Errorf("%d lost, %d kept", v.Lost, v.Kept)
	}
	match := func(r *Record) bool { return r.Attempts == 1 }
	for _, since := range []int64{0, 6, 1500, records + 4, records + 5} {
		for _, limit := range []int{0, 1, 10, 700, 5000} {
			var want []uint64
			for i := range model {
				if r := &model[i]; r.Wall+r.Duration > since && match(r) {
					want = append(want, r.ID)
				}
			}
			if limit > 0 {
				want = want[max(len(want)-limit, 0):]
			}
			var got []uint64
			must.OK(t, v.Visit(t.Context(), time.Unix(0, since), limit, match, func(r *Record) error { got = append(got, r.ID); return nil }))
			if !slices.Equal(got, want) {
				t.Errorf("since %d, the last %d: %d records %v, want %d", since, limit, len(got), got, len(want))
			}
		}
	}
	for _, id := range []uint64{0, 1234, records} {
		found, err := v.Find(t.Context(), id, func(r *Record) {
			if r.ID != id {
				t.Errorf("%d is found for %d", r.ID, id)
			}
		})
		if err != nil || found != (id < records) {
			t.Errorf("%d: %v, %v", id, found, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := v.Visit(ctx, time.Unix(0, 0), 0, all, func(*Record) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

// Connections that end reach the Past, also those that the access log leaves out.
func TestPastIsFed(t *testing.T) {
	table := NewTable(Options{})
	table.SetNode("node-a", nil)
	p := NewPast(table, LeastPast)
	s := table.Shard(0)
	for _, quiet := range []bool{false, true} {
		r := &Record{Client: netip.MustParseAddrPort("127.0.0.1:1"), Protocol: service.TCP, Quiet: quiet}
		s.Open(r)
		r.End = ClientFin
		s.Close(r)
	}
	s.Flush()
	wait.True(t, "both records", func() bool { return p.View().Kept == 2 })
	p.Close()
	closeTable(t, table)
	_ = p.View().Visit(t.Context(), time.Unix(0, 0), 0, all, func(r *Record) error {
		if r.ClientNode() != "node-a" || r.State() != Closed {
			t.Errorf("node %q, %v", r.ClientNode(), r.State())
		}
		return nil
	})
}

// FuzzPastBlock decodes anything without a panic.
func FuzzPastBlock(f *testing.F) {
	b := newBlock()
	for _, r := range examples() {
		b.add(&r)
	}
	f.Add(b.data)
	f.Fuzz(func(t *testing.T, data []byte) {
		c := block{data: data, ports: b.ports, endpoints: b.endpoints, count: 1, newest: 1}
		_ = c.each(t.Context(), 0, func(*Record) error { return nil })
	})
}

// BenchmarkPast measures what a record costs the goroutine that keeps it, and how many fit.
func BenchmarkPast(b *testing.B) {
	p := &Past{room: 16 << 20, current: newBlock()}
	records := examples()[:3]
	for b.Loop() {
		p.put(records)
	}
	v := p.View()
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(3*b.N), "ns/record")
	b.ReportMetric(float64(p.held)/float64(v.Kept), "B/record")
	began := time.Now()
	_ = v.Visit(b.Context(), time.Unix(0, 0), 0, func(*Record) bool { return false }, func(*Record) error { return nil })
	b.ReportMetric(float64(time.Since(began).Nanoseconds())/float64(v.Kept), "ns/read")
}
