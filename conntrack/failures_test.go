package conntrack

import (
	"context"
	"slices"
	"testing"
	"time"

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
