package balancer

import (
	"net/netip"
	"testing"
	"time"
)

// TestPinsMoveToAnotherBalancer: clients keep their endpoint in another process for the rest of
// their time (A5.3), unless they have come to that process before.
func TestPinsMoveToAnotherBalancer(t *testing.T) {
	const clients, window = 100, 100 * second
	options := Options{AffinityTimeout: time.Duration(window)}
	list := endpoints(5)
	from, to := New(options), New(options)
	had := make(map[netip.Addr]netip.AddrPort)
	came := func(i int) int64 { return int64(i+1) * second / 2 }
	for i := range clients {
		had[client(i)], _ = connect(t, from, list, client(i), came(i))
	}
	now := came(clients)
	if late := from.Pinned(came(90), now); len(late) != 10 || late[0].Client != client(90) || late[9].Used != came(99) {
		t.Errorf("of the last ten clients, %+v are pinned", late)
	}
	if rest := from.Pinned(0, came(10)+window); len(rest) != clients-11 || rest[0].Client != client(11) {
		t.Errorf("%d pins have not expired, the first of %s", len(rest), rest[0].Client)
	}
	without := list[1:]
	if had[client(0)] != list[0].Addr {
		without = list[:1]
	}
	had[client(0)], _ = connect(t, to, without, client(0), now) // it came here in between
	to.Restore(from.Pinned(0, now), now)
	for i := 1; i < clients; i++ {
		for at, want := range map[int64]Affinity{came(i) + window - 1: AffinityHit, came(i) + window: AffinityNew} {
			third := New(options) // a connection there would extend the time
			third.Restore(to.Pinned(0, now), now)
			got, affinity := connect(t, third, list, client(i), at)
			if affinity != want || want == AffinityHit && got != had[client(i)] {
				t.Fatalf("client %d gets %s (%v) %d ns after it came, had %s", i, got, affinity, at-came(i), had[client(i)])
			}
		}
	}
	if got, affinity := connect(t, to, list, client(0), now); got != had[client(0)] || affinity != AffinityHit {
		t.Errorf("a client that came to the other process gets %s (%v), had %s", got, affinity, had[client(0)])
	}
	if got := New(Options{}).Pinned(0, now); got != nil {
		t.Errorf("%v without affinity", got)
	}
}
