package live

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/race"
	"github.com/sluice-proxy/sluice/test/wait"
)

// frameAt returns a frame of some seconds after the epoch, with its total.
func frameAt(seconds int, groups ...Group) *Frame {
	f := &Frame{Time: time.Unix(int64(seconds), 0), Length: historyInterval, Groups: pointers(groups)}
	for i := range groups {
		f.Total.add(&groups[i])
	}
	return f
}

// pointers returns pointers to groups.
func pointers(groups []Group) []*Group {
	out := make([]*Group, len(groups))
	for i := range groups {
		out[i] = &groups[i]
	}
	return out
}

// groupOf returns a group of a service port and an endpoint.
func groupOf(p *service.Port, ep *service.Endpoint, opened int, connect time.Duration) Group {
	g := Group{Key: Key{Service: p.Name, Endpoint: ep.Addr}, Endpoint: ep, Open: 1, Opened: uint64(opened), BytesFromClient: uint64(10 * opened)}
	for range opened {
		g.Connect.Add(connect)
	}
	return g
}

// newTestHistory returns a History that is given its frames by the test.
func newTestHistory() (h *History, now *time.Time) {
	now = new(time.Time)
	*now = time.Unix(1000, 0)
	return &History{clock: func() time.Time { return *now }, running: true, asked: *now, series: make(map[Key]*series)}, now
}

func ask(t *testing.T, h *History, q Question) *Window {
	t.Helper()
	if q.Match == nil {
		q.Match = func(*SeriesName) bool { return true }
	}
	if q.Limit == 0 {
		q.Limit = 100
	}
	w, err := h.Read(q)
	must.OK(t, err)
	return w
}

// A service port is the sum of its endpoints, and all connections are the sum of the
// service ports. Only the last 15 minutes are there.
func TestHistoryOfServicesAndEndpoints(t *testing.T) {
	h, _ := newTestHistory()
	for i := range historyIntervals + 20 {
		groups := []Group{groupOf(web, a, 3, time.Millisecond), groupOf(web, b, 5, 100*time.Millisecond)}
		if i >= historyIntervals {
			groups = append(groups, groupOf(dns, a, 1, time.Second))
		}
		h.add(frameAt(1000+5*i, groups...))
	}
	all := ask(t, h, Question{})
	if n := len(all.Intervals); n != historyIntervals || all.Intervals[0].Time.Unix() != 1000+5*20 {
		t.Fatalf("%d intervals from %s on", n, all.Intervals[0].Time)
	}
	if len(all.Series) != 1 || all.Series[0].Points[0].Opened != 8 || all.Series[0].Points[historyIntervals-1].Opened != 9 {
		t.Errorf("all connections: %+v", all.Series)
	}
	last := all.Intervals[historyIntervals-2].Time
	services := ask(t, h, Question{By: ByService, Sort: "opened", Since: last})
	if services.Matched != 2 || len(services.Intervals) != 1 || services.Series[0].Service != web.Name {
		t.Fatalf("%+v", services)
	}
	p := services.Series[0].Points[0]
	if p.Opened != 8 || p.Open != 2 || p.FromClient != 80 || p.ConnectP50 < 100_000 || p.ConnectP99 > 130_000 {
		t.Errorf("the service: %+v", p)
	}
	endpoints := ask(t, h, Question{By: ByService | ByEndpoint, Sort: "name", Match: func(n *SeriesName) bool { return n.Service == web.Name }})
	if endpoints.Matched != 2 || endpoints.Series[0].Endpoint != a.Addr || endpoints.Series[0].Pod != "shop/web-1" {
		t.Fatalf("%+v", endpoints.Series)
	}
	if p := endpoints.Series[0].Points[7]; p.Opened != 3 || p.ConnectP99 > 1300 {
		t.Errorf("the endpoint: %+v", p)
	}
	// The dns Service began late: its points before that are zero.
	late := ask(t, h, Question{By: ByService, Sort: "opened", Limit: 1, Match: func(n *SeriesName) bool { return n.Service == dns.Name }})
	if s := late.Series[0]; s.Points[0] != (Point{}) || s.Points[historyIntervals-1].Opened != 1 {
		t.Errorf("the late service: %+v", s)
	}
	if w := ask(t, h, Question{By: ByService, Sort: "opened", Limit: 1}); w.Matched != 2 || len(w.Series) != 1 {
		t.Errorf("%d of %d series with limit 1", len(w.Series), w.Matched)
	}
}

// A group that has no point any more is forgotten.
func TestHistoryForgetsGroups(t *testing.T) {
	h, _ := newTestHistory()
	h.add(frameAt(0, groupOf(web, a, 1, 0)))
	for i := range historyIntervals {
		if len(h.series) < 2 {
			t.Fatalf("forgotten after %d intervals", i)
		}
		h.add(frameAt(5 * i))
	}
	check.Equalf(t, len(h.series), 0, "groups are left")
}

// With 30,000 services that all have connections, the memory is bounded, the busiest
// services are there, and what is left out is counted.
func TestHistoryIsBounded(t *testing.T) {
	const services, limit = 30_000, 32 << 20
	full := race.Fewer(4000) // services, with which an interval is full
	h, _ := newTestHistory()
	groups := make([]Group, services)
	total := Group{Opened: services}
	for i := range groups {
		ep := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 80)
		name := service.PortName{Name: service.Name{Namespace: "shop", Name: fmt.Sprint("service-", i)}}
		groups[i] = Group{Key: Key{Service: name, Endpoint: ep}, Opened: 1}
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for i := range historyIntervals {
		h.add(&Frame{Time: time.Unix(int64(5*i), 0), Length: historyInterval, Groups: pointers(groups[:full]), Total: total})
	}
	if grown := int64(heap()) - int64(before); grown > limit || !race.Enabled && grown < limit/4 {
		t.Errorf("%d MiB, want at most %d", grown>>20, limit>>20)
	}
	// Others are busiest from now on, and then others again.
	for i := range 4 {
		for j := range 3000 {
			groups[3000*(i+1)+j].Opened = uint64(2 + i)
		}
		h.add(&Frame{Time: time.Unix(int64(5*(historyIntervals+i)), 0), Length: historyInterval, Groups: pointers(groups), Total: total})
	}
	if len(h.series) > maxSeries {
		t.Errorf("%d series", len(h.series))
	}
	w := ask(t, h, Question{By: ByService, Sort: "opened", Limit: 1000})
	if len(w.Series) != 1000 || w.Intervals[0].LeftOut == 0 {
		t.Errorf("%d series, %d connections left out", len(w.Series), w.Intervals[0].LeftOut)
	}
	runtime.KeepAlive(groups)
}

// A History measures while somebody asks, and holds nothing afterwards.
func TestHistoryLastsWhileSomebodyAsks(t *testing.T) {
	h, now := newTestHistory()
	*now = now.Add(historyAttention)
	if !h.add(frameAt(0, groupOf(web, a, 1, 0))) {
		t.Fatal("ended although somebody has asked")
	}
	*now = now.Add(time.Second)
	if h.add(frameAt(5)) || h.running || h.intervals != nil {
		t.Fatal("goes on although nobody asks")
	}
	h.always, h.running, h.series = true, true, make(map[Key]*series)
	if !h.add(frameAt(10)) {
		t.Error("ended although it shall measure always")
	}
}

// The first question begins to measure the connections of the View.
func TestHistoryMeasures(t *testing.T) {
	w := newWorld(t, 1)
	h, err := NewHistory(w.view, false)
	must.OK(t, err)
	if got := ask(t, h, Question{}); len(got.Intervals) != 0 {
		t.Errorf("%d intervals at once", len(got.Intervals))
	}
	w.on(0, func(s *conntrack.Shard) {
		now := poll.Nanotime()
		r := &conntrack.Record{Start: now, Client: client(1), Port: web, Protocol: service.TCP}
		s.Open(r)
		r.BeginAttempt(a, now)
		r.AttemptSucceeded(now + int64(time.Millisecond))
		r.End = conntrack.ClientFin
		s.Close(r)
		s.Flush()
	})
	wait.For(t, "the connection is in the history", time.Minute, func() error {
		got := ask(t, h, Question{By: ByService, Sort: "opened"})
		if len(got.Series) != 1 {
			return fmt.Errorf("%d series", len(got.Series))
		}
		for _, p := range got.Series[0].Points {
			if p.Opened == 1 {
				return nil
			}
		}
		return fmt.Errorf("%+v", got.Series[0].Points)
	})
}
