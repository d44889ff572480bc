package conntrack

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// The last failures hold connections that their endpoint broke, and not those that the
// client did.
func TestFailuresHoldBrokenConnections(t *testing.T) {
	table := NewTable(Options{})
	defer closeTable(t, table)
	s := table.Shard(0)
	for i, end := range []End{EndpointReset, ClientReset, EndpointTimeout, ClientFin, EndpointAbort} {
		r := &Record{Start: int64(i)}
		s.Open(r)
		r.BeginAttempt(endpoint, r.Start)
		r.AttemptSucceeded(r.Start)
		r.End, r.Duration = end, int64(time.Duration(i+1)*time.Hour)
		s.Close(r)
	}
	all, err := table.Failures(context.Background(), func(_ int, f func()) bool { f(); return true })
	must.OK(t, err)
	var got []string
	for _, f := range all {
		if f.Endpoint != endpoint || f.Duration <= 0 {
			t.Errorf("%+v", f)
		}
		got = append(got, f.Reason())
	}
	if want := []string{"endpoint_abort", "endpoint_timeout", "endpoint_reset"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// Refusals are among the failures, and the sink has their records unless these are quiet.
func TestRefusals(t *testing.T) {
	var sink collector
	table := NewTable(Options{Sink: &sink, Now: func() time.Time { return time.Unix(1000, 0) }})
	table.SetNode("node-a", []netip.Addr{netip.MustParseAddr("10.0.0.1")})
	tap, err := table.Tap(TapOptions{})
	must.OK(t, err)
	vip := netip.MustParseAddrPort("10.96.0.10:81")
	for i, quiet := range []bool{true, false} {
		table.Refuse([]Refusal{
			{Client: netip.MustParseAddr("10.0.0.1"), VIP: vip, Protocol: service.TCP, Kind: service.ClusterIP, Reason: UnknownPort, Packets: 3, Path: Kernel},
			{Client: netip.MustParseAddr("10.2.3.4"), VIP: vip, Protocol: service.UDP, Kind: service.ClusterIP, Reason: NotAdmitted, Packets: 1},
		}, uint64(i*7), quiet)
	}
	got, lost := readTap(t, tap, 4+7)
	check.Equal(t, lost, uint64(7))
	check.Equal(t, len(got), 4)
	tap.Close()
	closeTable(t, table)
	check.Equal(t, len(sink.records), 2)
	for i, want := range []struct {
		node    string
		packets uint64
		end     End
		path    Path
	}{{"node-a", 3, UnknownPort, Kernel}, {"", 1, NotAdmitted, Relayed}} {
		r := &sink.records[i]
		if r.Event != Refused || r.ClientNode() != want.node || r.DatagramsFromClient != want.packets || r.End != want.end || r.Path != want.path || r.VIP != vip {
			t.Errorf("record %d is %+v, want %+v", i, r, want)
		}
	}
	failures := must.Get(table.Failures(context.Background(), here))(t)
	check.Equal(t, len(failures), 4)
	if f := failures[0]; f.Packets == 0 || f.VIP != vip || f.Reason() != f.Broke.String() {
		t.Errorf("the last failure is %+v", f)
	}
}
