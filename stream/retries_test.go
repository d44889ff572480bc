package stream

import (
	"slices"
	"testing"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// The connections of a service port wait in order, and service ports take turns:
// a thousand that wait for one delay those of another by one attempt each.
func TestRetriesTakeTurns(t *testing.T) {
	flooded, other := new(pool), new(pool)
	r := newRetries()
	for range attemptShare {
		if !r.take() {
			t.Fatal("the round has no room")
		}
	}
	if r.take() {
		t.Fatal("the round has more room than its share")
	}
	var want, got []*conn
	for range 1000 {
		c := &conn{pool: flooded}
		r.push(c)
		want = append(want, c)
	}
	for i := range 3 {
		c := &conn{pool: other}
		r.push(c)
		want = slices.Insert(want, 2*i+1, c)
	}
	for len(r.turns) > 0 {
		got = append(got, r.pop())
	}
	check.EqualSlicesf(t, got, want, "the connections had their turns in another order")
	if len(r.waiting) > 0 {
		t.Errorf("%d service ports are left", len(r.waiting))
	}
}

// When SCTP ends before TCP, the connections that wait of TCP keep their turns.
func TestForgettingAProtocol(t *testing.T) {
	r := newRetries()
	var want []*conn
	for i := range 8 {
		p := new(pool)
		for range 3 {
			c := &conn{pool: p}
			c.record.Protocol = service.TCP
			if i%2 == 0 {
				c.record.Protocol = service.SCTP
			}
			r.push(c)
		}
	}
	for i, p := range r.turns {
		if i%2 == 1 {
			want = append(want, r.waiting[p].head)
		}
	}
	r.forget(service.SCTP)
	if len(r.turns) != 4 || len(r.waiting) != 4 {
		t.Fatalf("%d turns, %d queues", len(r.turns), len(r.waiting))
	}
	var got []*conn
	for len(r.turns) > 0 {
		c := r.pop()
		check.Equalf(t, c.record.Protocol, service.TCP, "a forgotten connection got a turn")
		got = append(got, c)
	}
	if len(got) != 12 || !slices.Equal(got[:4], want) {
		t.Errorf("%d connections had turns", len(got))
	}
}
