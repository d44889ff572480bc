package stream

import (
	"slices"
	"testing"
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
	if !slices.Equal(got, want) {
		t.Error("the connections had their turns in another order")
	}
	if len(r.waiting) > 0 {
		t.Errorf("%d service ports are left", len(r.waiting))
	}
}
