package balancer

import (
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// TestStanding: what is said of an endpoint is what connections meet.
func TestStanding(t *testing.T) {
	s := newSick(t, 4, Ejection{After: 5})
	s.now = time.Hour // other than 0
	of := func(i int) Standing { return s.b.Standing(s.list[i].Addr, int64(s.now)) }
	if got := of(0); got != (Standing{Share: 1}) {
		t.Errorf("at first: %+v", got)
	}
	for !of(0).Ejected {
		s.run(time.Millisecond, Unserved)
	}
	s.now += 3 * time.Second
	if got := of(0); got.Trying || !got.Resets || got.For+got.Left != firstEjection || got.For < 3*time.Second || got.For > 4*time.Second {
		t.Errorf("3 s after the first ejection: %+v", got)
	}
	if got := of(1); got != (Standing{Share: 1}) {
		t.Errorf("another one: %+v", got)
	}
	s.now += 8 * time.Second
	if got := of(0); !got.Ejected || got.Left != 0 {
		t.Errorf("when its time is over and nobody has tried it: %+v", got)
	}
	for of(0).Left == 0 {
		s.run(time.Millisecond, Unserved) // it is tried, and resets again
	}
	if got := of(0); got.For+got.Left != 2*firstEjection {
		t.Errorf("the second ejection: %+v", got)
	}
	s.now += 2 * firstEjection
	for i := 1; i != 0; i, _ = first(t, s.b, s.list, someone, int64(s.now)) {
	}
	s.now += 2 * time.Second
	if got := of(0); !got.Trying || got.For+got.Left != firstEjection || got.Left > 9*time.Second {
		t.Errorf("while it is tried: %+v", got)
	}

	now := int64(time.Hour)
	port := slowPort(ready("a"))
	port.Limits = service.Limits{PerEndpoint: 2}
	opts := Options{Port: port, Loads: &Loads{}, Now: now}
	b := New(opts)
	list := ready("a", "b")
	opts.Port = slowPort(list)
	opts.Port.Limits = port.Limits
	b.Configure(opts)
	opts.Loads.Of(list[0].Addr).Begin()
	opts.Loads.Of(list[0].Addr).Begin()
	if got := b.Standing(list[0].Addr, now+1); got != (Standing{Open: 2, Full: true, Share: 1}) {
		t.Errorf("with two connections of two: %+v", got)
	}
	if got := b.Standing(list[1].Addr, now+int64(15*time.Second)); got != (Standing{Share: 0.5}) {
		t.Errorf("in the middle of its slow start: %+v", got)
	}
}
