package live

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
)

// A Meter tells what each endpoint did: one that breaks connections, one whose failed
// attempts another one made good, one that all attempts failed at, one that is slow, and
// one that does not answer.
func TestMeterBlamesTheRightEndpoint(t *testing.T) {
	ms := int64(time.Millisecond)
	c := &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.3:80")}
	d := &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.4:80")}
	e := &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.5:80")}
	record := func(end conntrack.End, ep *service.Endpoint, firstByte int64, failed ...*service.Endpoint) *conntrack.Record {
		r := &conntrack.Record{Client: client(1), Port: web, Endpoint: ep, End: end, Connected: end != conntrack.ConnectFailed, Attempts: uint16(1 + len(failed)), Event: conntrack.Ended, FirstByte: firstByte}
		if !r.Connected {
			r.Attempts--
		}
		if firstByte > 0 {
			r.BytesFromEndpoint = 10
		}
		for _, f := range failed {
			r.Failed = append(r.Failed, conntrack.Attempt{Endpoint: f, Error: conntrack.DialTimeout, Duration: 1000 * ms})
			r.FirstByte += 1000 * ms // the endpoint has not caused that
			r.ConnectTime += 1000 * ms
		}
		return r
	}
	m := &Meter{options: MeterOptions{Filter: parse(t, ""), By: ByService | ByEndpoint, Interval: time.Second}, groups: make(map[Key]*Group), wake: make(chan struct{}, 1)}
	feed := func(r *conntrack.Record) {
		if r.Connected {
			opened := *r
			opened.Event, opened.End = conntrack.Opened, conntrack.EndNone
			m.sample(&opened, 0, 0)
		}
		m.sample(r, 0, r.BytesFromEndpoint)
	}
	for range 4 {
		feed(record(conntrack.EndpointReset, a, 0))       // a resets
		feed(record(conntrack.ClientFin, c, 400*ms, b))   // b refuses, c serves slowly
		feed(record(conntrack.ConnectFailed, d, 0, d, d)) // d fails twice
	}
	for _, end := range []conntrack.End{conntrack.ClientFin, conntrack.EndNone} { // e takes a request and sends nothing
		r := record(end, e, 0)
		if r.BytesFromClient, r.Duration = 10, 3000*ms; end == conntrack.EndNone {
			r.Event, r.Duration = conntrack.Listed, 7000*ms
			m.sample(r, 10, 0)
			continue
		}
		feed(r)
	}
	// One that stays open has its first byte as soon as it is seen, and not once more.
	open := record(conntrack.EndNone, c, 400*ms)
	open.Event = conntrack.Listed
	m.sample(open, 0, 10)
	open.BytesFromEndpoint = 30
	m.sample(open, 0, 20)
	m.endInterval(time.Now(), 0)
	f := m.take()
	for _, tt := range []struct {
		ep   *service.Endpoint
		want string
	}{
		{a, "4 failed, 4 broken, 0 attempts, 0 saved, 0 answered, 0 unanswered, 0 wait"},
		{b, "0 failed, 0 broken, 4 attempts, 4 saved, 0 answered, 0 unanswered, 0 wait"},
		{c, "0 failed, 0 broken, 0 attempts, 0 saved, 5 answered, 0 unanswered, 0 wait"},
		{d, "4 failed, 0 broken, 8 attempts, 0 saved, 0 answered, 0 unanswered, 0 wait"},
		{e, "0 failed, 0 broken, 0 attempts, 0 saved, 0 answered, 1 unanswered, 1 wait"},
	} {
		for _, g := range f.Groups {
			if g.Key.Endpoint != tt.ep.Addr {
				continue
			}
			if got := fmt.Sprintf("%d failed, %d broken, %d attempts, %d saved, %d answered, %d unanswered, %d wait", g.Failed, g.Broken, g.FailedAttempts, g.SavedAttempts, g.Answered, g.Unanswered, g.Waiting); got != tt.want {
				t.Errorf("%s: %s, want %s", tt.ep.Addr, got, tt.want)
			}
			if p99 := g.FirstByte.Quantile(0.99); tt.ep == c && (p99 < 400*time.Millisecond || p99 > 500*time.Millisecond) {
				t.Errorf("the slow one's first byte: %s", p99)
			}
			if tt.ep == c && g.Connect.Quantile(0.99) > 20*time.Microsecond {
				t.Errorf("the slow one is blamed for another one's handshake: %s", g.Connect.Quantile(0.99))
			}
			if tt.ep == e && g.Unserved != 7*time.Second {
				t.Errorf("the silent one's clients waited %s", g.Unserved)
			}
		}
	}
	for _, g := range f.Groups { // one of e's connections has ended, after 3 s
		if p99 := g.Lasted.Quantile(0.99); g.Key.Endpoint == e.Addr && (p99 < 3*time.Second || p99 > 4*time.Second) {
			t.Errorf("the silent one's connection lasted %s", p99)
		}
	}
	if err := f.Sort("duration"); err != nil || f.Groups[0].Key.Endpoint != e.Addr {
		t.Errorf("sorted by duration: %v, first is %v", err, f.Groups[0].Key)
	}
	if err := f.Sort("first"); err != nil || f.Groups[0].Key.Endpoint != c.Addr {
		t.Errorf("sorted by first byte: %v, first is %v", err, f.Groups[0].Key)
	}
}

// BenchmarkSort: 3000 endpoints are sorted each second that a page is open.
func BenchmarkSort(b *testing.B) {
	groups := make([]Group, 3000)
	for i := range groups {
		groups[i] = groupOf(web, &service.Endpoint{Addr: netip.AddrPortFrom(client(i).Addr(), 80)}, i%7, time.Duration(i)*time.Microsecond)
	}
	for _, by := range Ratings() {
		b.Run(by, func(b *testing.B) {
			for b.Loop() {
				f := Frame{Groups: pointers(groups)}
				must.OK(b, f.Sort(by))
			}
		})
	}
}
