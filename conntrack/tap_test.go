package conntrack

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// here runs posted functions at once, as if the caller were the loop.
func here(_ int, f func()) bool { f(); return true }

// readTap returns the records that a tap has received, at least n.
func readTap(t *testing.T, tap *Tap, n int) (all []Record, lost uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	buf := make([]Record, 100)
	for len(all)+int(lost) < n {
		got, missed, err := tap.Next(ctx, buf)
		must.OKf(t, err, "%d records and %d lost, want %d", len(all), lost, n)
		all = append(all, buf[:got]...)
		lost += missed
	}
	return all, lost
}

// A tap has the connections that open and end while it is there, also those that the
// access log does not want, and the sink has only its own.
func TestTap(t *testing.T) {
	sink := &collector{}
	table := NewTable(Options{Sink: sink})
	s := table.Shard(0)
	connect := func(quiet bool) {
		r := &Record{Client: netip.MustParseAddrPort("10.0.0.1:1"), Protocol: service.TCP, Owner: new(refreshed)}
		s.Open(r)
		r.Quiet = quiet
		r.BeginAttempt(&service.Endpoint{}, 0)
		r.AttemptSucceeded(5)
		r.End = ClientFin
		s.Close(r)
		s.Flush()
	}
	connect(false)
	connect(true)
	all, err := table.Tap(TapOptions{Opens: true})
	must.OK(t, err)
	even, err := table.Tap(TapOptions{Match: func(r *Record) bool { return r.ID%2 == 0 }})
	must.OK(t, err)
	connect(false) // 3
	connect(true)  // 4
	got, _ := readTap(t, all, 4)
	for i, want := range []struct {
		id    uint64
		event Event
	}{{3, Opened}, {3, Ended}, {4, Opened}, {4, Ended}} {
		if got[i].ID != want.id || got[i].Event != want.event || got[i].Owner != nil || got[i].next != nil {
			t.Errorf("record %d is %d %s, want %d %s", i, got[i].ID, got[i].Event, want.id, want.event)
		}
	}
	if got, _ := readTap(t, even, 1); len(got) != 1 || got[0].ID != 4 || got[0].Event != Ended {
		t.Errorf("the filtered tap has %v", got)
	}
	all.Close()
	even.Close()
	if table.opens.Load() || table.taps.any.Load() {
		t.Error("the loops still make records for taps that are closed")
	}
	connect(false)
	closeTable(t, table)
	if len(sink.records) != 3 {
		t.Errorf("the sink has %d records, want 3", len(sink.records))
	}
	if _, err := table.Tap(TapOptions{}); err == nil {
		t.Error("a tap of a closed table")
	}
}

// A reader that is too slow loses records, and is told how many. Others lose none.
func TestSlowTapLosesItsOwnRecords(t *testing.T) {
	table := NewTable(Options{})
	slow, err := table.Tap(TapOptions{})
	must.OK(t, err)
	quick, err := table.Tap(TapOptions{})
	must.OK(t, err)
	const rounds, each = 60, 100
	s := table.Shard(0)
	for range rounds {
		for range each {
			r := &Record{}
			s.Open(r)
			s.Close(r)
		}
		s.Flush()
		if got, lost := readTap(t, quick, each); len(got) != each || lost != 0 {
			t.Fatalf("the quick reader has %d records and lost %d", len(got), lost)
		}
	}
	wait.True(t, "the last records reach the slow reader, too", func() bool {
		slow.mu.Lock()
		defer slow.mu.Unlock()
		return slow.count+int(slow.lost) == rounds*each
	})
	got, lost := readTap(t, slow, rounds*each)
	if len(got) != tapRoom || lost != rounds*each-tapRoom {
		t.Errorf("the slow reader has %d records and lost %d, want %d and %d", len(got), lost, tapRoom, rounds*each-tapRoom)
	}
	for i := range got {
		must.Equalf(t, got[i].ID, uint64(i+1), "record %d has ID", i)
	}
	slow.Close()
	quick.Close()
	closeTable(t, table)
}

// A reader that is always too slow is told what it loses while it reads.
func TestAlwaysSlowTapIsToldItsLoss(t *testing.T) {
	tap := &Tap{wake: make(chan struct{}, 1)}
	batch, buf := make([]Record, 2*batchSize), make([]Record, batchSize)
	var put, took, told uint64
	for range 100 * tapRoom / batchSize {
		tap.put(batch)
		put += uint64(len(batch))
		n, lost := tap.take(buf)
		if took += uint64(n); lost > 0 {
			told += lost
			if waits := uint64(tap.count); took+told+waits != put {
				t.Fatalf("of %d records %d were read, %d wait, and %d are told as lost", put, took, waits, told)
			}
		}
	}
	if told < put/4 {
		t.Errorf("of %d records %d were read, and %d are told as lost", put, took, told)
	}
}

func TestTapsAreBounded(t *testing.T) {
	table := NewTable(Options{})
	for range maxTaps {
		must.OK(t, must.Err(table.Tap(TapOptions{})))
	}
	if _, err := table.Tap(TapOptions{}); !errors.Is(err, ErrTooManyTaps) {
		t.Errorf("one more: %v", err)
	}
	closeTable(t, table)
}

// endable is a connection that EndConnection closes at once, or later.
type endable struct {
	shard  *Shard
	record Record
	later  bool
	asked  End
}

func (c *endable) EndConnection(e End) {
	c.asked = e
	if !c.later {
		c.record.End = e
		c.shard.Close(&c.record)
		c.record = Record{} // as a pool of connections does
	}
}

func TestEndWhere(t *testing.T) {
	table := NewTable(Options{Shards: 2})
	var all []*endable
	for i := range 1000 {
		c := &endable{shard: table.Shard(i % 2), later: i%10 == 0}
		c.record.Owner = c
		c.record.Attempts = uint16(i % 4)
		c.shard.Open(&c.record)
		all = append(all, c)
	}
	plain := &Record{Attempts: 3}
	table.Shard(0).Open(plain)
	match := func(r *Record) bool { return r.Attempts == 3 }
	if n, err := table.EndWhere(context.Background(), here, 20, Admin, match); n != 20 || err != nil {
		t.Fatalf("%d ended, want 20: %v", n, err)
	}
	if n, err := table.EndWhere(context.Background(), here, 1<<30, Admin, match); n != 230 || err != nil {
		t.Fatalf("%d ended, want 230: %v", n, err)
	}
	for i, c := range all {
		if want := i%4 == 3; (c.asked == Admin) != want {
			t.Fatalf("connection %d was ended: %t", i, !want)
		}
	}
	if plain.state != recordOpen {
		t.Error("a connection that cannot be ended is not open")
	}
}

// Look tells the bytes at the look before.
func TestLook(t *testing.T) {
	table := NewTable(Options{})
	r := &Record{}
	table.Shard(0).Open(r)
	look := func(now int64) (before uint64, at int64) {
		must.OK(t, table.Look(context.Background(), here, now, func(r *Record) error {
			before, _, at = r.Looked()
			return nil
		}))
		return before, at
	}
	r.BytesFromClient = 100
	if before, at := look(1000); before != 0 || at != 0 {
		t.Errorf("the first look has %d bytes at %d", before, at)
	}
	r.BytesFromClient = 150
	if before, at := look(2000); before != 100 || at != 1000 {
		t.Errorf("the second look has %d bytes at %d, want 100 at 1000", before, at)
	}
	found, err := table.Find(context.Background(), here, r.ID, func(r *Record) {
		if before, _, _ := r.Looked(); before != 150 || r.Event != Listed || r.State() != Connecting {
			t.Errorf("found %+v", r)
		}
	})
	if !found || err != nil {
		t.Errorf("the connection is found: %t, %v", found, err)
	}
	if found, err := table.Find(context.Background(), here, r.ID+1, func(*Record) {}); found || err != nil {
		t.Errorf("another one is found: %t, %v", found, err)
	}
}

func TestFailures(t *testing.T) {
	began := time.Unix(1000, 0)
	table := NewTable(Options{Shards: 2, Now: func() time.Time { return began }})
	ep := &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.4:80")}
	for shard := range 2 {
		for i := range failuresKept + 10 {
			r := &Record{Start: 50}
			table.Shard(shard).Open(r)
			r.BeginAttempt(ep, 50+int64(i)*2)
			r.AttemptFailed(DialRefused, 50+int64(i)*2+1)
			table.Shard(shard).Close(r)
		}
	}
	all, err := table.Failures(context.Background(), here)
	must.OK(t, err)
	if len(all) != 2*failuresKept {
		t.Fatalf("%d failures, want %d", len(all), 2*failuresKept)
	}
	newest := all[0]
	if want := began.Add(2*(failuresKept+9) + 1); !newest.At.Equal(want) || newest.Endpoint != ep || newest.Error != DialRefused || newest.Duration != 1 {
		t.Errorf("the newest is %+v, want at %s", newest, want)
	}
	if oldest := all[len(all)-1]; !oldest.At.Equal(began.Add(2*10 + 1)) {
		t.Errorf("the oldest is of %s", oldest.At)
	}
}

// A tap with a rate counts what is beyond it, and others have everything.
func TestTapRate(t *testing.T) {
	const records, rate = 1000, 10
	table := NewTable(Options{})
	s := table.Shard(0)
	slow, err := table.Tap(TapOptions{Rate: rate})
	must.OK(t, err)
	defer slow.Close()
	all, err := table.Tap(TapOptions{})
	must.OK(t, err)
	defer all.Close()
	began := time.Now()
	for range records {
		r := &Record{}
		s.Open(r)
		s.Close(r)
	}
	s.Flush()
	if got, lost := readTap(t, all, records); len(got) != records || lost != 0 {
		t.Errorf("the tap without a rate has %d records, lost %d", len(got), lost)
	}
	got, lost := readTap(t, slow, records)
	if most := rate * (2 + int(time.Since(began)/time.Second)); len(got) < rate || len(got) > most || len(got)+int(lost) != records {
		t.Errorf("%d records and %d lost, want %d to %d of %d", len(got), lost, rate, most, records)
	}
}

// A loss is told also if no further record comes.
func TestTapTellsOfLossAlone(t *testing.T) {
	table := NewTable(Options{})
	tap, err := table.Tap(TapOptions{Rate: 1})
	must.OK(t, err)
	defer tap.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	time.AfterFunc(10*time.Millisecond, func() { tap.lose(1) }) // while Next waits
	if n, lost, err := tap.Next(ctx, make([]Record, 1)); n != 0 || lost != 1 || err != nil {
		t.Errorf("%d records, %d lost, %v", n, lost, err)
	}
}
