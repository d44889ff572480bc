package conntrack

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"testing"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestRecordsMove: a connection that moves to another table keeps all that its record says,
// and has its end there alone. Its bytes are counted once, part in each table.
func TestRecordsMove(t *testing.T) {
	sinks := [2]*collector{{}, {}}
	var tables [2]*Table
	for i := range tables {
		tables[i] = NewTable(Options{Shards: 1, Sink: sinks[i]})
	}
	port := &service.Port{Name: service.PortName{Name: service.Name{Namespace: "default", Name: "web"}, Port: "http"}}
	port.Families[service.IPv4].Endpoints = []service.Endpoint{{Addr: netip.MustParseAddrPort("10.2.0.1:80"), Place: service.At("a", "")}}
	known := &port.Families[service.IPv4].Endpoints[0]
	gone := &service.Endpoint{Addr: netip.MustParseAddrPort("10.2.0.9:80"), Place: service.At("b", ""), Pod: service.Name{Namespace: "default", Name: "web-9"}}

	const second = int64(1e9)
	from, to := tables[0].Shard(0), tables[1].Shard(0)
	r := &Record{
		Start: 5 * second, Client: netip.MustParseAddrPort("10.1.0.1:1234"), VIP: netip.MustParseAddrPort("10.96.0.1:80"),
		Port: port, Counters: tables[0].Counters(port.Name), Kind: service.NodePort,
	}
	from.Open(r)
	r.NamedBy(netip.MustParseAddrPort("10.1.0.7:99"), r.Client)
	r.BeginAttempt(gone, 6*second)
	r.AttemptFailed(DialRefused, 7*second)
	r.BeginAttempt(known, 7*second)
	r.SourceAddr, r.Affinity = netip.MustParseAddrPort("10.9.0.1:4000"), balancer.AffinityHit
	r.AttemptSucceeded(8 * second)
	r.FirstByte = 4 * second
	r.StreamsFromClient, r.StreamsToClient = 5, 9
	r.Progress(100, 200)
	var before, after Record
	r.copyTo(&before, Ended, 0)

	text, err := json.Marshal(r.Moved(20 * second))
	must.OK(t, err)
	from.Leave(r)
	if n := known; r.Counters.loads.Of(n.Addr).Open() != 0 {
		t.Error("the connection still counts at its endpoint, where it has left")
	}
	var m Moved
	must.OK(t, json.Unmarshal(text, &m))
	arrived := &Record{Counters: tables[1].Counters(port.Name)}
	to.Join(arrived, &m, port, 3*second) // another clock
	if arrived.Endpoint != known || arrived.Counters.loads.Of(known.Addr).Open() != 1 {
		t.Errorf("it is at %+v, and counts %d times", arrived.Endpoint, arrived.Counters.loads.Of(known.Addr).Open())
	}
	arrived.copyTo(&after, Ended, 0)
	if after.Start != 3*second-15*second || after.attemptStart-after.Start != before.attemptStart-before.Start || after.Via() != before.Via() {
		t.Errorf("it began at %d, was announced at %d, by %s", after.Start, after.attemptStart, after.Via())
	}
	if f := after.Failed; len(f) != 1 || !reflect.DeepEqual(f[0].Endpoint, gone) || f[0].Duration != second || f[0].Error != DialRefused {
		t.Errorf("failed attempts: %+v", f)
	}
	for _, c := range []*Record{&before, &after} { // what the two processes know in their own way
		c.ID, c.Start, c.attemptStart, c.Counters, c.self, c.Failed = 0, 0, 0, nil, nil, nil
	}
	before.looked, after.looked = nil, nil
	if !reflect.DeepEqual(before, after) {
		t.Errorf("before %+v\nafter  %+v", before, after)
	}
	arrived.BytesFromClient, arrived.BytesFromEndpoint, arrived.End = 150, 210, ClientFin
	to.Close(arrived)
	for i, want := range []Totals{{Opened: 1, BytesFromClient: 100, BytesFromEndpoint: 200}, {BytesFromClient: 50, BytesFromEndpoint: 10}} {
		_, got := tables[i].Totals()
		if got.Opened != want.Opened || got.Active != 0 || got.BytesFromClient != want.BytesFromClient || got.BytesFromEndpoint != want.BytesFromEndpoint || got.Ended[ClientFin] != uint64(i) {
			t.Errorf("table %d counts %+v", i, got)
		}
		tables[i].Shard(0).Flush()
		must.OK(t, tables[i].Close(t.Context()))
		if n := len(sinks[i].records); n != i {
			t.Errorf("table %d has written %d records", i, n)
		}
		check.Equalf(t, tables[i].Stats().Misuse, 0, "table %d: misuses", i)
	}
}
