package conntrack

import (
	"testing"
	"time"
)

// A record sums up its waits. A copy that is made during a wait includes it, the copies before
// keep what they had, and a load balancer's header does not take it away.
func TestWaitTime(t *testing.T) {
	table := NewTable(Options{Shards: 1})
	r := &Record{Client: examples()[0].Client, VIP: examples()[0].VIP}
	r.Start = int64(time.Second)
	r.shard = table.Shard(0)
	at := func(ms int64) int64 { return r.Start + ms*int64(time.Millisecond) }
	want := func(r Record, ms int64) {
		t.Helper()
		if got := time.Duration(r.WaitTime()); got != time.Duration(ms)*time.Millisecond {
			t.Errorf("waited %v, want %d ms", got, ms)
		}
	}
	want(*r, 0)
	r.BeginWait(at(10))
	copied := *r
	copied.Duration = 25 * int64(time.Millisecond)
	r.EndWait(at(30))
	want(*r, 20)
	r.NamedBy(r.VIP, r.Client)
	r.BeginWait(at(100))
	r.EndWait(at(105))
	want(*r, 25)
	want(copied, 15)
}
