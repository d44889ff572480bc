package balancer

import (
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// TestStanding: what is said of an endpoint is what connections meet.
func TestStanding(t *testing.T) {
	s := newSick(t, 4, Ejection{After: 5})
	s.now = time.Hour // other than 0
	of := func(i int) Standing { return s.b.Standing(s.list[i].Addr, int64(s.now)) }
	check.Equalf(t, of(0), Standing{Share: 1}, "at first")
	for !of(0).Ejected {
		s.run(time.Millisecond, Unserved)
	}
	s.now += 3 * time.Second
	if got := of(0); got.Trying || !got.Resets || got.For+got.Left != firstEjection || got.For < 3*time.Second || got.For > 4*time.Second {
		t.Errorf("3 s after the first ejection: %+v", got)
	}
	check.Equalf(t, of(1), Standing{Share: 1}, "another one")
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
	check.Equalf(t, b.Standing(list[0].Addr, now+1), Standing{Open: 2, Full: true, Share: 1}, "with two connections of two")
	check.Equalf(t, b.Standing(list[1].Addr, now+int64(15*time.Second)), Standing{Share: 0.5}, "in the middle of its slow start")
}
