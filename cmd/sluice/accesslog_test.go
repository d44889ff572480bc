package main

import (
	"testing"

	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/must"
)

// Of the records that a sample's filter matches, one connection in N is written from each
// of two loops; of the others, all.
func TestAccessLogSample(t *testing.T) {
	const connections = 10_000
	var o recordOptions
	f := pflag.NewFlagSet("run", pflag.ContinueOnError)
	o.register(f)
	must.OK(t, f.Parse([]string{"--access-log-filter", "end!=idle", "--access-log-sample", "1/100 end=client_fin", "--access-log-sample", "1/2 attempts>1"}))
	keep := o.keep()
	for _, tt := range []struct {
		record conntrack.Record
		in     int
	}{
		{conntrack.Record{End: conntrack.ClientFin, Attempts: 2}, 100}, // the first sample that matches counts
		{conntrack.Record{End: conntrack.EndpointFin, Attempts: 2}, 2},
		{conntrack.Record{End: conntrack.EndpointFin, Attempts: 1}, 1},
	} {
		for first := range uint64(2) {
			written, r := 0, tt.record
			for i := range uint64(connections) {
				if r.ID = 1 + first + 2*i; keep(&r) {
					written++
				}
			}
			if want := connections / tt.in; written < want/2 || written > want*2 {
				t.Errorf("%s, %d attempts: %d of %d in loop %d, want one in %d", r.End, r.Attempts, written, connections, first, tt.in)
			}
		}
	}
	if keep(&conntrack.Record{ID: 1, End: conntrack.Idle}) {
		t.Error("a record is written that the filter leaves out")
	}
	for _, wrong := range []string{"", "100", "1/0", "2/100", "1/x", "1/-1", "1/100 end=x", "1/100 client_pod=shop/web"} {
		if err := f.Parse([]string{"--access-log-sample", wrong}); err == nil {
			t.Errorf("%q is taken", wrong)
		}
	}
}
