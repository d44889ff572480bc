package conntrack

import (
	"context"
	"math/rand/v2"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// kept is a connection that can do without its record.
type kept struct {
	shard    *Shard
	record   *Record
	parked   Parked
	counters *Counters
	start    int64
	up, down uint64
}

func openKept(s *Shard, c *Counters, start int64) *kept {
	k := &kept{shard: s, counters: c, start: start}
	r := &Record{Start: start, Protocol: service.TCP, Counters: c, Owner: k}
	s.Open(r)
	r.BeginAttempt(endpoint, start)
	r.AttemptSucceeded(start + 5)
	k.record = r
	return k
}

func (k *kept) Describe(r *Record) {
	r.Start, r.Protocol, r.Counters = k.start, service.TCP, k.counters
	r.Endpoint, r.Attempts, r.Connected, r.ConnectTime = endpoint, 1, true, 5
}

func (k *kept) Refresh(r *Record) { r.Progress(k.up, k.down) }

func (k *kept) EndConnection(end End) { k.end(end) }

func (k *kept) park() bool {
	if k.record == nil || !k.shard.Park(k.record, &k.parked, k) {
		return false
	}
	k.record = nil
	return true
}

func (k *kept) end(end End) {
	if k.record == nil {
		k.record = new(Record)
		k.shard.Unpark(&k.parked, k.record)
	}
	k.Refresh(k.record)
	k.record.End = end
	k.shard.Close(k.record)
}

// A parked connection is listed, found, looked at, counted and ended as if it had its record.
func TestParkedIsLikeOpen(t *testing.T) {
	ctx := t.Context()
	type seen struct {
		listed, looked, ended []Record
		totals                Totals
	}
	observe := func(park bool) (o seen) {
		sink := &collector{}
		table := NewTable(Options{Sink: sink, Opens: true, Now: func() time.Time { return time.Unix(9, 0) }})
		s, c := table.Shard(0), table.Counters(portHTTP.Name)
		var all []*kept
		for i := range 5 {
			k := openKept(s, c, int64(1000+i))
			all = append(all, k)
			if k.up, k.down = uint64(10+i), 100; park && !k.park() {
				t.Fatal("not parked")
			}
		}
		for more := true; more; {
			more = s.Refresh(2)
		}
		if got := c.Totals(); got.BytesFromEndpoint != 500 || got.BytesFromClient != 60 {
			t.Errorf("parked %t: refreshed to %+v", park, got)
		}
		keep := func(to *[]Record) func(*Record) error {
			return func(r *Record) error {
				*to = append(*to, *r)
				return nil
			}
		}
		for now := range int64(2) { // the second sees what the first one has looked at
			for _, k := range all {
				k.down++
			}
			must.OK(t, table.Look(ctx, here, 7000+now, keep(&o.looked)))
		}
		must.OK(t, table.List(ctx, here, keep(&o.listed)))
		if found, err := table.Find(ctx, here, 4, func(r *Record) { _ = keep(&o.listed)(r) }); !found || err != nil {
			t.Errorf("parked %t: record 4 is not found: %v", park, err)
		}
		if found, _ := table.Find(ctx, here, 44, func(*Record) {}); found {
			t.Error("a record that there is not is found")
		}
		must.OK(t, table.Remind(ctx, here, time.Nanosecond))
		n, err := table.EndWhere(ctx, here, 2, Admin, func(r *Record) bool { return r.BytesFromClient >= 11 && r.Connected })
		if n != 2 || err != nil {
			t.Errorf("parked %t: %d ended: %v", park, n, err)
		}
		for _, k := range all {
			if k.record == nil || k.record.End == EndNone {
				k.end(ClientFin)
			}
		}
		s.Flush()
		closeTable(t, table)
		if stats := table.Stats(); stats.Misuse != 0 || s.count != 0 || s.walks != 0 {
			t.Errorf("parked %t: %+v, %d open, %d walks", park, stats, s.count, s.walks)
		}
		o.ended = sink.records
		for _, list := range [][]Record{o.listed, o.looked, o.ended} {
			for i := range list { // times of this run, and its counters
				list[i].Duration, list[i].attemptStart, list[i].Counters = 0, 0, nil
			}
		}
		o.totals = c.Totals()
		o.totals.Duration = Histogram{} // of this run, too
		return o
	}
	want, got := observe(false), observe(true)
	if len(want.ended) != 15 || len(want.looked) != 10 || len(want.listed) != 6 {
		t.Fatalf("%d ended, %d looked at, %d listed", len(want.ended), len(want.looked), len(want.listed))
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("parked and with a record differ:\n%+v\n%+v", got, want)
	}
}

// A record with failed attempts stays.
func TestFailedAttemptsAreNotParked(t *testing.T) {
	s := NewTable(Options{}).Shard(0)
	k := openKept(s, nil, 1)
	k.record.AttemptFailed(DialRefused, 2)
	if k.park() {
		t.Error("parked")
	}
	k.end(ClientFin)
	if k.park() {
		t.Error("parked after its end")
	}
}

// While connections come, are parked and go, a listing visits each that stays exactly once.
func TestListWhileConnectionsAreParked(t *testing.T) {
	table := NewTable(Options{})
	loop := newLoop()
	post := func(_ int, f func()) bool { loop.work <- f; return true }
	s, r := table.Shard(0), rand.New(rand.NewPCG(3, 4))
	var stay, others []*kept
	loop.do(func() {
		for k := range 3000 {
			c := openKept(s, nil, 1)
			if k%2 == 0 {
				stay = append(stay, c)
			} else {
				others = append(others, c)
			}
		}
	})
	ids := make(map[uint64]bool)
	for _, k := range stay {
		ids[k.record.ID] = true
	}
	stop := make(chan struct{})
	parked := 0
	var churn sync.WaitGroup
	churn.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			loop.do(func() {
				if stay[r.IntN(len(stay))].park() {
					parked++
				}
				others[r.IntN(len(others))].park()
				at := r.IntN(len(others))
				others[at].end(ClientFin)
				others[at] = openKept(s, nil, 1)
				s.Refresh(10)
			})
		}
	})
	list := func() {
		t.Helper()
		seen := make(map[uint64]bool)
		err := table.List(context.Background(), post, func(r *Record) error {
			if seen[r.ID] {
				t.Errorf("record %d is visited twice", r.ID)
			}
			seen[r.ID] = true
			return nil
		})
		must.OK(t, err)
		for id := range ids {
			if !seen[id] {
				t.Fatalf("record %d is not visited", id)
			}
		}
	}
	wait.True(t, "more than 500 are parked between lists", func() (enough bool) {
		list()
		ctx, cancel := context.WithCancel(context.Background())
		_ = table.List(ctx, post, func(*Record) error { cancel(); return nil }) // broken off
		loop.do(func() { enough = parked > 500 })
		return enough
	})
	close(stop)
	churn.Wait()
	loop.do(func() {
		if s.walks != 0 || s.count != len(stay)+len(others) {
			t.Errorf("%d walks, %d open", s.walks, s.count)
		}
		for _, k := range append(stay, others...) {
			k.end(Shutdown)
		}
		check.Equalf(t, s.count, 0, "left")
	})
	loop.stop()
}
