package live

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/filter"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// asked is a connection whose transport can be asked.
type asked struct {
	says  conntrack.Transport
	times *atomic.Int64
}

func (a *asked) Inspect(t *conntrack.Transport) { a.times.Add(1); *t = a.says }

func (a *asked) EndConnection(conntrack.End) {}

// Transports are asked only for those who need what they say, and then for each connection;
// filters and orders go by it.
func TestTransportIsAskedWhenNeeded(t *testing.T) {
	const open = 1000 // several steps
	w := newWorld(t, 2)
	var times atomic.Int64
	for i := range open {
		owner := &asked{times: &times, says: conntrack.Transport{
			Idle:     int64(i) * int64(time.Second),
			Client:   conntrack.Side{Known: conntrack.BySocket, RTT: int64(open-i) * int64(time.Millisecond), Retransmits: uint32(i % 2), Unacked: 7},
			Endpoint: conntrack.Side{Known: conntrack.BySocket, RTT: 1},
		}}
		w.on(i%2, func(s *conntrack.Shard) {
			s.Open(&conntrack.Record{Start: poll.Nanotime(), Client: client(i), Port: web, Endpoint: a, Connected: true, Owner: owner})
		})
	}
	page := func(text, sort string, transport bool) *Page {
		order, err := ParseOrder(sort)
		must.OK(t, err)
		p, err := w.view.Page(context.Background(), Wanted{Filter: parse(t, text), Order: order, Limit: 10, Transport: transport})
		must.OK(t, err)
		return p
	}
	if p := page("", "-bytes", false); times.Load() != 0 || p.Records[0].Transport() != nil {
		t.Errorf("%d transports were asked for nobody", times.Load())
	}
	for _, tt := range []struct {
		filter, sort string
		transport    bool
		matched      int
		first        time.Duration // the first one's Idle
	}{
		{"", "", true, open, 0},
		{"", "-idle", false, open, 999 * time.Second},
		{"", "rtt", false, open, 999 * time.Second},
		{"idle>5m", "", false, 699, 302 * time.Second}, // of the first shard
		{"rtt>900ms", "-id", false, 100, 98 * time.Second},
		{"client_rtt<=1ms", "", false, 1, 999 * time.Second},
		{"retransmits>0", "-idle", false, open / 2, 999 * time.Second},
		{"unacked=7 endpoint_rtt<1ms", "-idle", false, open, 999 * time.Second},
	} {
		times.Store(0)
		p := page(tt.filter, tt.sort, tt.transport)
		if times.Load() != open || p.Matched != tt.matched || len(p.Records) == 0 {
			t.Fatalf("%+v: %d asked, %d match", tt, times.Load(), p.Matched)
		}
		if got := time.Duration(p.Records[0].Transport().Idle); tt.sort != "" && tt.sort != "-id" && got != tt.first {
			t.Errorf("%+v: the first one is idle for %s", tt, got)
		}
	}
	for i, r := range page("", "idle", false).Records { // of the first step, as others follow
		check.Equalf(t, r.Transport().Idle, int64(i)*int64(time.Second), "record %d has another one's transport", i)
	}
	ended, err := w.view.EndWhere(context.Background(), open, parse(t, "idle>=990s"))
	if err != nil || ended != 10 {
		t.Errorf("%d ended, %v", ended, err)
	}
}

// A filter for records does not take what no record has: it would select nothing, silently.
func TestRecordsHaveNoTransport(t *testing.T) {
	for _, field := range []string{"idle>1s", "rtt>1ms", "client_rtt>1ms", "endpoint_rtt>1ms", "retransmits>0", "unacked>0"} {
		if f, err := filter.Parse(field); err != nil || !f.NeedsTransport() {
			t.Errorf("%s: %v", field, err)
		}
		check.Errorf(t, must.Err(filter.ParseForRecords("service=web "+field)), "open connections alone", "%s", field)
	}
	if f, err := filter.ParseForRecords("duration>1s"); err != nil || f.NeedsTransport() {
		t.Errorf("%v, %v", f, err)
	}
}

// Judge names each culprit for what only that one does.
func TestJudge(t *testing.T) {
	const ms = int64(time.Millisecond)
	whole := func(change func(r *conntrack.Record, s *conntrack.Transport)) *conntrack.Record {
		s := &conntrack.Transport{Client: conntrack.Side{Known: conntrack.BySocket, Idle: 5 * ms}, Endpoint: conntrack.Side{Known: conntrack.BySocket, Idle: 9 * ms}}
		r := &conntrack.Record{
			Protocol: service.TCP, Endpoint: a, Attempts: 1, Connected: true, ConnectTime: ms, FirstByte: 100 * ms, Duration: 120 * ms, BytesFromClient: 10, BytesFromEndpoint: 10,
		}
		r.SetTransport(s)
		change(r, s)
		return r
	}
	ended := func(end conntrack.End) func(r *conntrack.Record, s *conntrack.Transport) {
		return func(r *conntrack.Record, _ *conntrack.Transport) { r.End = end }
	}
	failed := func(e conntrack.DialError) func(r *conntrack.Record, s *conntrack.Transport) {
		return func(r *conntrack.Record, _ *conntrack.Transport) {
			r.End, r.Connected = conntrack.ConnectFailed, false
			r.Failed = []conntrack.Attempt{{Endpoint: a, Error: e, Duration: ms}}
		}
	}
	var seen []string
	for _, tt := range []struct {
		change   func(r *conntrack.Record, s *conntrack.Transport)
		who, why string
	}{
		{func(*conntrack.Record, *conntrack.Transport) {}, "pod", "has not answered for 5ms"},
		{func(_ *conntrack.Record, s *conntrack.Transport) { s.Client.Idle = 20 * ms }, "client", "has sent nothing for 20ms"},
		{func(_ *conntrack.Record, s *conntrack.Transport) { s.Endpoint.Unacked, s.Endpoint.Unanswered = 10, 3 }, "pod_network", "sent again 3 times"},
		{func(_ *conntrack.Record, s *conntrack.Transport) { s.Client.Unacked, s.Client.Unanswered = 10, 3 }, "client_network", "sent again 3 times"},
		{func(_ *conntrack.Record, s *conntrack.Transport) {
			s.Endpoint.Unacked, s.Endpoint.Unsent, s.Endpoint.Unanswered = 10, 5, 3
		}, "pod", "does not read"},
		{func(_ *conntrack.Record, s *conntrack.Transport) { s.Client.Unacked, s.Client.Unsent = 10, 5 }, "client", "does not read"},
		{func(_ *conntrack.Record, s *conntrack.Transport) {
			s.Client.Known, s.Endpoint.Known = conntrack.ByPackets, conntrack.ByPackets
			s.Client.Unacked, s.Client.Idle = 10, 2*stalled
		}, "client_network", "no packet came for 2s"},
		{func(_ *conntrack.Record, s *conntrack.Transport) {
			s.Client.Known, s.Endpoint.Known = conntrack.ByPackets, conntrack.ByPackets
			s.Endpoint.Unacked, s.Endpoint.Idle, s.Endpoint.Retransmits = 10, 2*repeating, 3
		}, "pod_network", "no packet came for 400ms; 3 segments were sent again"},
		{func(r *conntrack.Record, s *conntrack.Transport) {
			s.Client.Known, s.Endpoint.Known, r.FirstByte, r.BytesFromEndpoint = conntrack.ByPackets, conntrack.ByPackets, 0, 0
		}, "pod", "has not answered"},
		{func(r *conntrack.Record, _ *conntrack.Transport) { r.Connected, r.Duration = false, 3*ms }, "pod_network", "has not answered the handshake for 3ms"},
		{func(r *conntrack.Record, s *conntrack.Transport) {
			failed(conntrack.DialRefused)(r, s)
			r.End, r.Attempts = conntrack.EndNone, 2
		}, "pod", "refused the connection after 1ms; it is attempt 2"},
		{failed(conntrack.DialRefused), "pod", "refused"},
		{failed(conntrack.DialTimeout), "pod_network", "timeout"},
		{failed(conntrack.DialUnreachable), "pod_network", "unreachable"},
		{failed(conntrack.DialNoAddress), "node", "no_address"},
		{failed(conntrack.DialDropped), "node", "a rule of this node dropped"},
		{ended(conntrack.EndpointReset), "pod", "reset the connection after 120ms"},
		{ended(conntrack.EndpointTimeout), "pod_network", "no longer acknowledged"},
		{ended(conntrack.ClientReset), "client", "reset the connection after 120ms"},
		{func(r *conntrack.Record, s *conntrack.Transport) {
			ended(conntrack.ClientReset)(r, s)
			r.FirstByte = 0
		}, "pod", "the client gave up"},
		{func(r *conntrack.Record, s *conntrack.Transport) {
			s.Client.Known, s.Endpoint.Known, s.Idle, r.Duration = conntrack.ByPackets, conntrack.ByPackets, 2*stalled, 3*stalled
		}, "nobody", "which took 1ms, and nothing has been sent for 2s"},
		{func(r *conntrack.Record, s *conntrack.Transport) {
			r.Protocol, r.ConnectTime, s.Idle, r.Duration = service.UDP, 0, 2*stalled, 3*stalled
		}, "nobody", "the first answer came 100ms after the first datagram, and nothing has been sent for 2s"},
		{func(r *conntrack.Record, _ *conntrack.Transport) { r.Protocol, r.ConnectTime = service.UDP, 0 }, "pod", "the first answer came 100ms after"},
		{ended(conntrack.ClientTimeout), "client_network", "no longer acknowledged"},
		{ended(conntrack.LimitReached), "node", "limit"},
		{ended(conntrack.ClientFin), "pod", "came 99ms after the handshake, which took 1ms"},
		{func(r *conntrack.Record, s *conntrack.Transport) {
			ended(conntrack.EndpointFin)(r, s)
			r.ConnectTime = 60 * ms
		}, "pod_network", "which took 60ms"},
		{func(r *conntrack.Record, s *conntrack.Transport) {
			ended(conntrack.ClientFin)(r, s)
			r.Duration = 1000 * ms
		}, "nobody", "the rest of 900ms"},
	} {
		r := whole(tt.change)
		v := Judge(r)
		if v.Who != tt.who || !strings.Contains(v.Why, tt.why) {
			t.Errorf("%s: %+v, want %s: %s", fmt.Sprintf("%+v", r.Transport()), v, tt.who, tt.why)
		}
		seen = append(seen, v.Who)
	}
	for _, who := range api.Culprits {
		if !slices.Contains(seen, who) {
			t.Errorf("nobody is told of as %s", who)
		}
	}
}
