package conntrack

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// Each connection that lasts has one record an interval, as soon as its endpoint
// answered an interval ago. All come to the sink, although it is slow.
func TestRemind(t *testing.T) {
	const open, waiting = 3000, 10
	sink := &collector{}
	table := NewTable(Options{Shards: 2, Sink: sink, Queue: 4 * batchSize})
	now := poll.Nanotime()
	begin := func(i int, start int64, connects bool) {
		r := &Record{Start: start}
		table.Shard(i % 2).Open(r)
		r.BeginAttempt(nil, start)
		if connects {
			r.AttemptSucceeded(start)
		}
	}
	for i := range open {
		begin(i, now-int64(time.Hour), true)
	}
	for i := range waiting {
		begin(i, now-int64(time.Hour), false)
		begin(i, now, true) // younger than the interval
	}
	remind := func() {
		t.Helper()
		must.OK(t, table.Remind(context.Background(), here, time.Minute))
	}
	remind()
	remind() // nothing is due again
	for i := range 2 {
		table.Shard(i).Flush()
	}
	closeTable(t, table)
	var ids []uint64
	for i := range sink.records {
		if r := &sink.records[i]; r.Event != Lasts || r.Duration < int64(time.Hour) {
			t.Fatalf("a record of %s after %d", r.Event, r.Duration)
		}
		ids = append(ids, sink.records[i].ID)
	}
	slices.Sort(ids)
	if len(slices.Compact(ids)) != open || len(sink.records) != open {
		t.Errorf("%d records of %d connections, want %d", len(sink.records), len(slices.Compact(ids)), open)
	}
}

// Opened records come only if the sink wants them.
func TestSinkWantsOpens(t *testing.T) {
	for _, wants := range []bool{false, true} {
		sink := &collector{}
		table := NewTable(Options{Sink: sink, Opens: wants})
		tap, err := table.Tap(TapOptions{Opens: true})
		must.OK(t, err)
		r := &Record{}
		table.Shard(0).Open(r)
		r.AttemptSucceeded(1)
		table.Shard(0).Close(r)
		table.Shard(0).Flush()
		if got, _ := readTap(t, tap, 2); len(got) != 2 {
			t.Errorf("the tap has %d records, want 2", len(got))
		}
		tap.Close()
		if table.opens.Load() != wants {
			t.Errorf("without a tap the loops make Opened records: %t", !wants)
		}
		closeTable(t, table)
		if want := map[bool]int{false: 1, true: 2}[wants]; len(sink.records) != want {
			t.Errorf("the sink has %d records, want %d", len(sink.records), want)
		}
	}
}

// A record of an open connection keeps its failed attempts: a UDP session may have another one, which
// takes the place of the last of a full list.
func TestOpenedKeepsItsFailedAttempts(t *testing.T) {
	sink := &collector{}
	table := NewTable(Options{Sink: sink, Opens: true})
	s, r := table.Shard(0), &Record{}
	s.Open(r)
	fail := func(reason DialError) {
		r.BeginAttempt(nil, 0)
		r.AttemptFailed(reason, 0)
	}
	for range maxFailedListed {
		fail(DialTimeout)
	}
	r.Announce(0)
	fail(DialRefused)
	s.Close(r)
	s.Flush()
	closeTable(t, table)
	check.Equalf(t, len(sink.records), 2, "records")
	for i, want := range []DialError{DialTimeout, DialRefused} {
		check.Equalf(t, sink.records[i].Failed[maxFailedListed-1].Error, want, "the last failed attempt in a record of %s", sink.records[i].Event)
	}
}
