package live

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/live/filter"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// world is a table of connections on running loops.
type world struct {
	table *conntrack.Table
	loops []*poll.Loop
	view  *View
}

func newWorld(t testing.TB, loops int) *world {
	t.Helper()
	w := &world{table: conntrack.NewTable(conntrack.Options{Shards: loops})}
	before := runtime.GOMAXPROCS(max(poll.Procs(loops), runtime.GOMAXPROCS(0)))
	t.Cleanup(func() { runtime.GOMAXPROCS(before) })
	for range loops {
		l, err := poll.New()
		must.OK(t, err)
		w.loops = append(w.loops, l)
		go func() { _ = l.Run() }()
		t.Cleanup(l.Stop)
	}
	w.view = New(w.table, conntrack.OnLoops(w.loops))
	return w
}

// on runs f on a loop and waits for it.
func (w *world) on(shard int, f func(*conntrack.Shard)) {
	done := make(chan struct{})
	w.loops[shard].Post(func() { defer close(done); f(w.table.Shard(shard)) })
	<-done
}

var (
	web = &service.Port{Name: service.PortName{Name: service.Name{Namespace: "shop", Name: "web"}, Port: "http"}}
	dns = &service.Port{Name: service.PortName{Name: service.Name{Namespace: "kube-system", Name: "dns"}}}
	a   = &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.1:80"), Place: service.At("node-a", ""), Pod: service.Name{Namespace: "shop", Name: "web-1"}}
	b   = &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.2:80"), Place: service.At("node-b", "")}
)

// client returns the address of the nth client.
func client(n int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}), 4000)
}

func parse(t testing.TB, text string) *filter.Filter {
	t.Helper()
	f, err := filter.Parse(text)
	must.OK(t, err)
	return f
}

// Pages, in any order, are those of a list that is sorted as a whole.
func TestPagesAgainstModel(t *testing.T) {
	w := newWorld(t, 2)
	r := rand.New(rand.NewPCG(1, 2))
	var all []*conntrack.Record
	for i := range 1000 {
		rec := &conntrack.Record{
			Start: r.Int64N(50), Client: client(r.IntN(100)), Port: []*service.Port{web, dns, nil}[r.IntN(3)],
			Endpoint: []*service.Endpoint{a, b, nil}[r.IntN(3)], Attempts: uint16(r.IntN(4)),
			BytesFromClient: r.Uint64N(20), BytesFromEndpoint: r.Uint64N(20),
		}
		w.on(i%2, func(s *conntrack.Shard) { s.Open(rec) })
		all = append(all, rec)
	}
	for i, name := range Orders() {
		if name == "duration" {
			continue // changes all the time; time is its reverse
		}
		down := []string{"", "-"}[i%2]
		order, err := ParseOrder(down + name)
		must.OK(t, err)
		f := parse(t, "attempts>0 bytes>3")
		var want []uint64
		model := slices.DeleteFunc(slices.Clone(all), func(r *conntrack.Record) bool { return !f.Match(r) })
		slices.SortFunc(model, order.compare)
		for _, r := range model {
			want = append(want, r.ID)
		}
		var got []uint64
		for offset := 0; ; offset += 300 {
			page, err := w.view.Page(context.Background(), Wanted{Filter: f, Order: order, Offset: offset, Limit: 300})
			must.OK(t, err)
			if page.Open != len(all) || page.Matched != len(want) {
				t.Fatalf("%d open and %d match, want %d and %d", page.Open, page.Matched, len(all), len(want))
			}
			if len(page.Records) == 0 {
				break
			}
			for i := range page.Records {
				got = append(got, page.Records[i].ID)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("sort=%s%s: the pages differ from the sorted list", down, name)
		}
	}
	if _, err := ParseOrder("nix"); err == nil {
		t.Error("an order that does not exist is no error")
	}
}

// A page allocates for its rows, however many connections are open.
func TestPageAllocatesForWhatItReturns(t *testing.T) {
	order, err := ParseOrder("-bytes")
	must.OK(t, err)
	allocated := func(open int) uint64 {
		w := newWorld(t, 1)
		w.on(0, func(s *conntrack.Shard) {
			for i := range open {
				s.Open(&conntrack.Record{Client: client(i), Port: web, BytesFromClient: uint64(i * 7919 % open)})
			}
		})
		least := uint64(math.MaxUint64)
		for range 3 {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			must.OK(t, must.Err(w.view.Page(context.Background(), Wanted{Filter: &filter.Filter{}, Order: order, Offset: 0, Limit: 10})))
			runtime.ReadMemStats(&after)
			least = min(least, after.TotalAlloc-before.TotalAlloc)
		}
		return least
	}
	few, many := allocated(1000), allocated(50000)
	if many > few+few/2 {
		t.Errorf("%d bytes for 50,000 connections, %d for 1,000", many, few)
	}
}

// Rates count each connection, each byte and each failure once. A frame that is not read
// before the next one is lost, so a reader that was late begins again.
func TestRates(t *testing.T) {
	for began := time.Now(); !countsOnce(t); {
		if time.Since(began) > time.Minute {
			t.Fatal("frames are lost all the time")
		}
	}
}

// countsOnce compares the sum of all frames with what connections did. It reports whether
// it has read each frame.
func countsOnce(t *testing.T) bool {
	t.Helper()
	w := newWorld(t, 2)
	// This one moved bytes before anybody looked.
	old := &conntrack.Record{Client: client(9), Port: web, Protocol: service.TCP}
	w.on(0, func(s *conntrack.Shard) {
		old.Start = poll.Nanotime()
		s.Open(old)
		old.BeginAttempt(b, poll.Nanotime())
		old.AttemptSucceeded(poll.Nanotime())
		old.BytesFromClient = 1 << 40
	})
	m, err := w.view.Meter(MeterOptions{Filter: parse(t, "service=web"), By: ByService | ByEndpoint, Interval: time.Second})
	must.OK(t, err)
	defer m.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	last, err := m.Next(ctx)
	must.OK(t, err)
	w.on(1, func(s *conntrack.Shard) {
		now := poll.Nanotime()
		for i := range 10 {
			r := &conntrack.Record{Start: now, Client: client(i), Port: web, Protocol: service.TCP}
			s.Open(r)
			r.BeginAttempt(b, now)
			if i < 3 {
				r.AttemptFailed(conntrack.DialRefused, now)
				r.BeginAttempt(a, now)
			}
			r.AttemptSucceeded(now + int64(time.Millisecond))
			if i < 5 {
				r.BytesFromClient, r.End = 100, conntrack.ClientFin
				s.Close(r)
			} else {
				r.BytesFromClient = 10
			}
		}
		other := &conntrack.Record{Start: now, Client: client(1), Port: dns}
		s.Open(other)
		s.Close(other)
		s.Flush()
	})
	w.on(0, func(*conntrack.Shard) { old.BytesFromClient += 7 })
	sum := map[netip.AddrPort]*Group{a.Addr: {}, b.Addr: {}}
	for sum[b.Addr].Opened < 7 || sum[a.Addr].Opened < 3 || sum[b.Addr].BytesFromClient < 7+200+50 {
		f, err := m.Next(ctx)
		if err != nil {
			t.Fatalf("%v; counted so far: %+v, %+v", err, sum[a.Addr], sum[b.Addr])
		}
		if !f.Time.Add(-f.Length).Equal(last.Time) {
			t.Logf("frames of %s were lost", f.Time.Add(-f.Length).Sub(last.Time))
			return false
		}
		last = f
		must.OK(t, f.Sort("name"))
		for _, g := range f.Groups {
			if g.Key.Service != web.Name {
				t.Fatalf("a group of %v", g.Key)
			}
			to := sum[g.Key.Endpoint]
			to.Opened += g.Opened
			to.Ended += g.Ended
			to.FailedAttempts += g.FailedAttempts
			to.BytesFromClient += g.BytesFromClient
			to.Open = g.Open
		}
	}
	for _, tt := range []struct {
		ep   *service.Endpoint
		want string
	}{
		{a, "3 opened, 3 ended, 0 open, 0 failed attempts, 300 bytes"},
		{b, "7 opened, 2 ended, 6 open, 3 failed attempts, 257 bytes"},
	} {
		g := sum[tt.ep.Addr]
		if got := fmt.Sprintf("%d opened, %d ended, %d open, %d failed attempts, %d bytes", g.Opened, g.Ended, g.Open, g.FailedAttempts, g.BytesFromClient); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.ep.Addr, got, tt.want)
		}
	}
	return true
}

func TestDurations(t *testing.T) {
	var d Durations
	if d.Quantile(0.5) != 0 {
		t.Error("a quantile of nothing")
	}
	r := rand.New(rand.NewPCG(3, 4))
	var all []time.Duration
	for range 10000 {
		v := time.Duration(20000 * (1 + r.ExpFloat64()*1000))
		all = append(all, v)
		d.Add(v)
	}
	slices.Sort(all)
	for _, q := range []float64{0, 0.5, 0.9, 0.99, 1} {
		exact := all[int(q*float64(len(all)-1))]
		if got := d.Quantile(q); got < exact || got > exact+exact/4+1 {
			t.Errorf("quantile %g is %s, want %s to within a quarter", q, got, exact)
		}
	}
	d.Add(0)
	d.Add(100 * time.Hour)
	if got := d.Quantile(1); got < 39*time.Hour {
		t.Errorf("the longest is %s", got)
	}
}

// A few durations, which are kept without buckets, are those that buckets would have.
func TestFewDurations(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 1000 {
		var some, more, spread, sum Durations
		spread.spread()
		for i := range r.IntN(2*fewDurations + 1) {
			v := time.Duration(1 << (10 + r.IntN(40)))
			[]*Durations{&some, &more}[i%2].Add(v)
			spread.Add(v)
		}
		sum.merge(&some)
		sum.merge(&more)
		for _, q := range []float64{0, 0.5, 0.9, 0.99, 1} {
			check.Equalf(t, sum.Quantile(q), spread.Quantile(q), "quantile %g of %d", q, spread.count)
		}
	}
}

// A Meter that opens as the last one has closed waits for the looks of before without the
// lock: those may want it for their end.
func TestMeterAfterTheLastOne(t *testing.T) {
	w := newWorld(t, 1)
	looks := make(chan struct{})
	w.view.meters.done = looks // of before, and still under way
	opened := make(chan *Meter, 1)
	go func() {
		m, err := w.view.Meter(MeterOptions{Filter: parse(t, ""), By: ByService, Interval: time.Second})
		check.OK(t, err)
		opened <- m
	}()
	select {
	case m := <-opened:
		defer m.Close()
		w.view.meters.current() // as the looks do
		close(looks)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		check.OKf(t, must.Err(m.Next(ctx)), "no frame")
	case <-time.After(time.Minute):
		t.Fatal("Meter holds the lock until the looks are over")
	}
}
