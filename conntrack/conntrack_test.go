package conntrack

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

var (
	portHTTP = &service.Port{Name: service.PortName{Name: service.Name{Namespace: "default", Name: "web"}, Port: "http", Protocol: service.TCP}}
	endpoint = &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.5:8080"), Place: service.At("b", "z1"), Pod: service.Name{Namespace: "default", Name: "web-2"}}
)

// collector is a Sink that keeps everything.
type collector struct {
	mu      sync.Mutex
	records []Record
	batches int
	flushes int
	gate    chan struct{} // if not nil, Write waits for it
}

func (c *collector) Write(batch []Record) {
	if c.gate != nil {
		<-c.gate
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.records = append(c.records, batch...)
	c.batches++
}

func (c *collector) Flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flushes++
}

func closeTable(t *testing.T, table *Table) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	must.OK(t, table.Close(ctx))
}

func TestRecordSize(t *testing.T) {
	if got := unsafe.Sizeof(Record{}); got > 336 {
		t.Errorf("a Record takes %d bytes in each connection, want at most 336", got)
	}
	t.Logf("Record: %d bytes, Counters: %d bytes", unsafe.Sizeof(Record{}), unsafe.Sizeof(Counters{}))
}

func TestNames(t *testing.T) {
	want := []string{"client_fin", "client_reset", "client_timeout", "endpoint_fin", "endpoint_reset", "endpoint_timeout", "idle", "shutdown", "connect_failed", "no_endpoints", "limit", "not_admitted", "responses", "endpoint_gone", "evicted", "namespace_limit", "admin",
		"client_shutdown", "client_abort", "client_comm_lost", "endpoint_shutdown", "endpoint_abort", "endpoint_comm_lost", "message_too_large", "no_stream", "not_forwarded", "proxy_header", "proxy_header_timeout", "proxy_not_trusted", "drained", "rebalanced",
		"no_local_endpoints", "unknown_port", "unknown_address"}
	var got []string
	for _, e := range Ends() {
		got = append(got, e.String())
	}
	if !slices.Equal(got, want) {
		t.Errorf("ends %v, want %v", got, want)
	}
	got = nil
	for _, e := range DialErrors() {
		got = append(got, e.String())
	}
	want = []string{"timeout", "refused", "reset", "unreachable", "no_address", "no_resources", "denied", "dropped", "other"}
	if !slices.Equal(got, want) {
		t.Errorf("dial errors %v, want %v", got, want)
	}
	for _, s := range []fmt.Stringer{End(200), DialError(200)} {
		check.Equalf(t, s.String(), "unknown", "%T(200) is %v", s, s)
	}
}

func TestDialErrorOf(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want DialError
		own  bool
	}{
		{nil, DialOK, false},
		{syscall.Errno(0), DialOK, false},
		{syscall.ETIMEDOUT, DialTimeout, false},
		{syscall.ECONNREFUSED, DialRefused, false},
		{fmt.Errorf("connect: %w", syscall.ECONNREFUSED), DialRefused, false},
		{syscall.ECONNRESET, DialReset, false},
		{syscall.EHOSTUNREACH, DialUnreachable, false},
		{syscall.ENETUNREACH, DialUnreachable, false},
		{syscall.EADDRNOTAVAIL, DialNoAddress, true},
		{syscall.EMFILE, DialNoResources, true},
		{syscall.ENOBUFS, DialNoResources, true},
		{syscall.EPERM, DialDenied, true},
		{syscall.EBADF, DialOther, false},
		{errors.New("something"), DialOther, false},
	} {
		if got := DialErrorOf(tt.err); got != tt.want || got.Own() != tt.own {
			t.Errorf("DialErrorOf(%v) = %v, own %v", tt.err, got, got.Own())
		}
	}
}

// Promise 5 for the table: whatever the order of events, each opened connection
// leaves exactly one record, and the records of a shard are in the order of their
// ends.
func TestPromise5ExactlyOneRecord(t *testing.T) {
	for seed := range uint64(20) {
		sink := &collector{}
		table := NewTable(Options{Shards: 2, Sink: sink, Queue: batchSize << 14})
		var want [2][]uint64
		var misuse uint64
		for i := range 2 {
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			s := table.Shard(i)
			var open, closed []*Record
			note := func(rec *Record) { want[i] = append(want[i], rec.ID) }
			for range 3000 {
				switch k := r.IntN(20); {
				case k < 10:
					rec := &Record{Start: 1}
					s.Open(rec)
					open = append(open, rec)
				case k < 18:
					if len(open) == 0 {
						continue
					}
					at := r.IntN(len(open))
					rec := open[at]
					open = slices.Delete(open, at, at+1)
					closed = append(closed, rec)
					rec.End = ClientFin
					note(rec)
					s.Close(rec)
				case k == 18:
					s.Flush()
				default: // what must never happen
					if len(closed) > 0 {
						s.Close(closed[r.IntN(len(closed))])
						s.Open(closed[r.IntN(len(closed))])
						misuse += 2
					}
				}
				if s.count != len(open) {
					t.Fatalf("%d open, count says %d", len(open), s.count)
				}
			}
			var each []*Record
			s.Each(func(rec *Record) { each = append(each, rec) })
			if !slices.Equal(each, open) {
				t.Fatal("Each does not visit the open records in the order of opening")
			}
			closeAll(s, func(rec *Record) {
				note(rec)
				rec.End = Shutdown
				if r.IntN(2) == 0 { // as the connection does at its own end
					s.Close(rec)
				}
			})
			s.Flush()
			must.Equalf(t, s.count, 0, "open after closeAll")
		}
		closeTable(t, table)
		var got [2][]uint64
		for _, rec := range sink.records {
			shard := (rec.ID - 1) % 2
			got[shard] = append(got[shard], rec.ID)
			if rec.End == EndNone || rec.Owner != nil || rec.prev != nil || rec.next != nil {
				t.Fatalf("record %+v", rec)
			}
		}
		if !slices.Equal(got[0], want[0]) || !slices.Equal(got[1], want[1]) {
			t.Fatalf("seed %d: %d records, want %d", seed, len(sink.records), len(want[0])+len(want[1]))
		}
		if stats := table.Stats(); stats.Queued != uint64(len(sink.records)) || stats.Dropped != 0 || stats.Misuse != misuse {
			t.Errorf("stats %+v, want %d records and %d misuses", stats, len(sink.records), misuse)
		}
		if sink.flushes == 0 {
			t.Error("no Flush at the end")
		}
	}
}

func TestOpenFillsIn(t *testing.T) {
	at := time.Date(2026, 6, 1, 12, 0, 0, 5000, time.UTC)
	table := NewTable(Options{Shards: 3, Now: func() time.Time { return at }})
	seen := make(map[uint64]bool)
	for i := range 3 {
		for range 10 {
			r := &Record{}
			table.Shard(i).Open(r)
			if seen[r.ID] || r.ID == 0 || r.Wall != at.UnixNano() {
				t.Fatalf("record %+v", r)
			}
			seen[r.ID] = true
			r.Owner = r
			table.Shard(i).Close(r)
			if r.Owner != nil {
				t.Fatal("the owner stays")
			}
		}
	}
	if len(table.shards) != 3 || table.Stats() != (Stats{}) {
		t.Errorf("%d shards, %+v", len(table.shards), table.Stats())
	}
	closeTable(t, table)
}

// A burst makes one batch and one wake-up; a full batch goes at once.
func TestBatches(t *testing.T) {
	sink := &collector{}
	table := NewTable(Options{Sink: sink})
	s := table.Shard(0)
	pending := 0
	s.OnPending(func() { pending++ })
	records := func(n int) {
		for range n {
			r := &Record{End: Idle}
			s.Open(r)
			s.Close(r)
		}
	}
	records(50)
	if pending != 1 || table.Stats().Queued != 0 {
		t.Errorf("after 50: %d times pending, %d queued", pending, table.Stats().Queued)
	}
	records(batchSize - 50)
	if pending != 1 || table.Stats().Queued != batchSize {
		t.Errorf("after a batch: %d times pending, %d queued", pending, table.Stats().Queued)
	}
	records(1)
	s.Flush()
	s.Flush()
	if pending != 2 || table.Stats().Queued != batchSize+1 {
		t.Errorf("after one more: %d times pending, %d queued", pending, table.Stats().Queued)
	}
	closeTable(t, table)
	check.Equalf(t, sink.batches, 2, "batches")
}

// The queue's bound counts records, even if a loop adds few at a time: all fit
// until the bound, in order.
func TestQueueBoundCountsRecords(t *testing.T) {
	const bound = 10 * batchSize
	for _, each := range []int{1, 3, batchSize - 1, batchSize} {
		sink := &collector{gate: make(chan struct{})}
		table := NewTable(Options{Sink: sink, Queue: bound})
		s := table.Shard(0)
		end := func(n int) {
			for range n {
				r := &Record{End: Idle}
				s.Open(r)
				s.Close(r)
			}
			s.Flush()
		}
		end(1) // the sink has it and takes no more
		wait.True(t, "the sink is busy", func() bool { return table.queue.length() == 0 })
		total := 1
		for total+each <= 1+bound {
			end(each)
			total += each
		}
		if stats := table.Stats(); stats.Dropped != 0 {
			t.Fatalf("%d records at a time: %d of %d are dropped, the queue has room for %d", each, stats.Dropped, total, bound)
		}
		table.queue.mu.Lock()
		if n := len(table.queue.full); n > bound/batchSize {
			t.Errorf("%d records at a time: %d batches wait, want them joined to %d", each, n, bound/batchSize)
		}
		table.queue.mu.Unlock()
		end(each)
		total += each
		if stats := table.Stats(); stats.Queued != 1+bound || stats.Queued+stats.Dropped != uint64(total) {
			t.Errorf("%d records at a time: %+v of %d, want %d queued", each, stats, total, 1+bound)
		}
		close(sink.gate)
		closeTableAfter(t, table, s)
		for i := range sink.records {
			if sink.records[i].ID != uint64(i+1) {
				t.Fatalf("record %d is in place %d", sink.records[i].ID, i+1)
			}
		}
	}
}

// A sink that blocks costs records, but no time.
func TestFullQueueDropsAndCounts(t *testing.T) {
	sink := &collector{gate: make(chan struct{})}
	table := NewTable(Options{Sink: sink, Queue: 4 * batchSize})
	s := table.Shard(0)
	const total = 20 * batchSize
	for range total {
		r := &Record{End: Idle}
		s.Open(r)
		s.Close(r)
	}
	stats := table.Stats()
	if stats.Queued+stats.Dropped != total || stats.Queued < 4*batchSize || stats.Queued > 5*batchSize {
		t.Errorf("stats %+v of %d", stats, total)
	}

	// It recovers, and what was queued is not lost.
	close(sink.gate)
	for range 100 {
		r := &Record{End: Idle}
		s.Open(r)
		s.Close(r)
	}
	closeTableAfter(t, table, s)
	stats = table.Stats()
	if stats.Queued+stats.Dropped != total+100 || uint64(len(sink.records)) != stats.Queued {
		t.Errorf("stats %+v, %d records", stats, len(sink.records))
	}

	// After Close nothing blocks either.
	r := &Record{End: Idle}
	s.Open(r)
	s.Close(r)
	s.Flush()
	check.Equalf(t, table.Stats().Dropped, stats.Dropped+1, "dropped after Close, %d before", stats.Dropped)
}

func closeTableAfter(t *testing.T, table *Table, s *Shard) {
	t.Helper()
	s.Flush()
	closeTable(t, table)
}

// Close gives up on a sink that hangs.
func TestCloseIsBounded(t *testing.T) {
	sink := &collector{gate: make(chan struct{})}
	table := NewTable(Options{Sink: sink})
	s := table.Shard(0)
	r := &Record{End: Idle}
	s.Open(r)
	s.Close(r)
	s.Flush()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := table.Close(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Close: %v", err)
	}
	close(sink.gate)
	closeTable(t, table)
	check.Equalf(t, len(sink.records), 1, "records")
}

func TestAttempts(t *testing.T) {
	table := NewTable(Options{})
	c := table.Counters(portHTTP.Name)
	r := &Record{Start: 1000, Counters: c}
	table.Shard(0).Open(r)
	if r.Failed != nil {
		t.Error("attempts are allocated before one has failed")
	}
	for i := range int64(20) {
		r.BeginAttempt(endpoint, 2000+i)
		r.AttemptFailed(DialRefused, 2000+i+i)
	}
	r.BeginAttempt(endpoint, 3000)
	r.AttemptSucceeded(4000)
	if r.Attempts != 21 || !r.Connected || r.ConnectTime != 3000 || r.Endpoint != endpoint {
		t.Errorf("record %+v", r)
	}
	if len(r.Failed) != maxFailedListed || r.Failed[14].Duration != 14 || r.Failed[15] != (Attempt{endpoint, 19, DialRefused}) {
		t.Errorf("failed attempts %+v", r.Failed)
	}
	got := c.Totals()
	if got.Attempts != 21 || got.FailedAttempts() != 20 || got.Failed[DialRefused] != 20 || got.Retried != 1 || got.Connect.Count() != 1 {
		t.Errorf("totals %+v", got)
	}
}

// fakeConn is a connection whose bytes move while it is listed.
type fakeConn struct{ up, down uint64 }

func (f *fakeConn) Refresh(r *Record) { r.Progress(f.up, f.down) }

// loopOf runs functions one at a time, as an event loop does.
type loopOf struct {
	work chan func()
	done chan struct{}
}

func newLoop() *loopOf {
	l := &loopOf{work: make(chan func(), 64), done: make(chan struct{})}
	go l.run()
	return l
}

func (l *loopOf) run() {
	defer close(l.done)
	for f := range l.work {
		f()
	}
}

func (l *loopOf) stop() {
	close(l.work)
	<-l.done
}

func (l *loopOf) do(f func()) {
	ran := make(chan struct{})
	l.work <- func() { f(); close(ran) }
	<-ran
}

// While connections come and go, a listing visits each that stays exactly once.
func TestListWhileConnectionsComeAndGo(t *testing.T) {
	table := NewTable(Options{Shards: 2})
	loops := []*loopOf{newLoop(), newLoop()}
	post := func(i int, f func()) bool { loops[i].work <- f; return true }
	var stay [2][]*Record
	stop := make(chan struct{})
	var churn sync.WaitGroup
	for i := range 2 {
		s := table.Shard(i)
		r := rand.New(rand.NewPCG(9, uint64(i)))
		var others []*Record
		loops[i].do(func() {
			for k := range 1500 {
				rec := &Record{Owner: &fakeConn{uint64(k), 7}}
				s.Open(rec)
				if k%3 == 0 {
					stay[i] = append(stay[i], rec)
				} else {
					others = append(others, rec)
				}
			}
		})
		churn.Add(1)
		go func() {
			defer churn.Done()
			for {
				select {
				case <-stop:
					return
				default:
				}
				loops[i].do(func() {
					at := r.IntN(len(others))
					rec := others[at]
					rec.End = Idle
					s.Close(rec)
					*rec = Record{}
					s.Open(rec)
				})
			}
		}()
	}
	for range 20 {
		seen := make(map[uint64]Record)
		err := table.List(context.Background(), post, func(r *Record) error {
			if _, twice := seen[r.ID]; twice {
				return fmt.Errorf("record %d is visited twice", r.ID)
			}
			seen[r.ID] = *r
			return nil
		})
		must.OK(t, err)
		for _, list := range stay {
			for _, rec := range list {
				got, ok := seen[rec.ID]
				if !ok || got.BytesFromEndpoint != 7 || got.Owner != nil || got.next != nil {
					t.Fatalf("record %d: %v, %+v", rec.ID, ok, got)
				}
			}
		}
	}
	close(stop)
	churn.Wait()

	// A listing that is broken off leaves nothing in the table.
	enough := errors.New("enough")
	check.Equalf(t, table.List(context.Background(), post, func(*Record) error { return enough }), enough, "List")
	ctx, cancel := context.WithCancel(context.Background())
	n := 0
	err := table.List(ctx, post, func(*Record) error {
		if n++; n == listStep+1 {
			cancel()
			loops[0].do(func() {}) // so that the next step is not yet done
			loops[0].work <- func() { <-ctx.Done() }
		}
		return nil
	})
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("List: %v", err)
	}
	for i := range 2 {
		loops[i].do(func() {
			s := table.Shard(i)
			for r := s.list.next; r != &s.list; r = r.next {
				check.Equalf(t, r.state, recordOpen, "a marker is left in the list")
			}
			closeAll(s, func(r *Record) { r.End = Shutdown })
		})
		loops[i].stop()
	}
	if err := table.List(context.Background(), func(int, func()) bool { return false }, nil); err == nil {
		t.Error("a stopped loop is listed")
	}
}

// Closing all in the middle of a listing ends both.
func TestCloseAllDuringList(t *testing.T) {
	table := NewTable(Options{})
	s := table.Shard(0)
	for range 3 * listStep {
		s.Open(&Record{})
	}
	n := 0
	post := func(_ int, f func()) bool { f(); return true }
	err := table.List(context.Background(), post, func(*Record) error {
		if n++; n == 10 {
			closeAll(s, func(r *Record) { r.End = Shutdown })
		}
		return nil
	})
	if err != nil || n != listStep || s.count != 0 {
		t.Errorf("%v, %d visited, %d open", err, n, s.count)
	}
}

// closeAll closes every connection that is still open: finish is called for
// each, to set its End and what else is known, before its record is handed on.
func closeAll(s *Shard, finish func(*Record)) {
	for s.list.next != &s.list {
		r := s.list.next
		if r.state == recordMarker {
			r.unlink()
			continue
		}
		finish(r)
		if r.state == recordOpen {
			s.Close(r)
		}
	}
}
