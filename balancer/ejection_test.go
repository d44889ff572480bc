package balancer

import (
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/race"
)

// sick is a service port whose endpoint 0 resets connections while it is sick.
type sick struct {
	t     *testing.T
	b     *Balancer
	loads *Loads
	list  []service.Endpoint
	now   time.Duration
	ill   bool
}

func newSick(t *testing.T, endpointCount int, e Ejection) *sick {
	s := &sick{t: t, loads: &Loads{}, list: endpoints(endpointCount), ill: true}
	port := &service.Port{}
	port.Families[0].Endpoints = s.list
	s.b = New(Options{Loads: s.loads, Ejection: e, Port: port, Seed: 3})
	return s
}

// run opens a connection each millisecond, and returns the share of endpoint 0.
func (s *sick) run(length time.Duration, how Outcome) float64 {
	zero, all := 0, 0
	for end := s.now + length; s.now < end; s.now += time.Millisecond {
		i, _ := first(s.t, s.b, s.list, someone, int64(s.now))
		l := s.loads.Of(s.list[i].Addr)
		s.loads.Answered(l, time.Millisecond, int64(s.now))
		all++
		if i == 0 {
			zero++
		}
		if i == 0 && s.ill {
			s.loads.Ended(l, how, int64(s.now))
		} else {
			s.loads.Ended(l, Served, int64(s.now))
		}
	}
	return float64(zero) / float64(all)
}

// TestEndpointThatResetsIsEjected: it gets under 1 % of the connections, and all of its
// share half a minute after it is mended.
func TestEndpointThatResetsIsEjected(t *testing.T) {
	s := newSick(t, 4, Ejection{After: 5})
	if got := s.run(5*time.Second, Unserved); got > 0.01 {
		t.Errorf("an endpoint that resets gets %.3f of the connections", got)
	}
	check.Equalf(t, s.b.Ejected(), 1, "endpoints are ejected")
	s.ill = false
	s.run(30*time.Second, Unserved)
	if got := s.run(time.Second, Unserved); got < 0.24 {
		t.Errorf("it is mended, and gets %.3f of the connections", got)
	}
	check.Equalf(t, s.b.Ejected(), 0, "endpoints are ejected")
}

// TestMendedEndpointComesBack: an endpoint that was sick for up to 20 s has its share again within
// 30 s after it is mended; any one after as long as it was sick and 10 s more, at most 5 minutes.
func TestMendedEndpointComesBack(t *testing.T) {
	sick := []time.Duration{time.Second, 11 * time.Second, 20 * time.Second, 35 * time.Second, 3 * time.Minute, time.Hour}
	for _, wasSick := range sick[:race.Fewer(len(sick))] {
		s := newSick(t, 4, Ejection{After: 5})
		s.run(wasSick, Unserved)
		s.ill = false
		mended := s.now
		for s.b.Ejected() > 0 {
			s.run(100*time.Millisecond, Unserved)
		}
		took := s.now - mended
		t.Logf("sick for %v, it is back %v after it is mended", wasSick, took)
		if most := min(wasSick+firstEjection, longestEjection) + 200*time.Millisecond; took > most {
			t.Errorf("sick for %v, it is back %v after it is mended, want at most %v", wasSick, took, most)
		}
		if got := s.run(time.Second, Unserved); got < 0.24 {
			t.Errorf("it is back, and gets %.3f of the connections", got)
		}
	}
}

// TestEjectionsGrowLonger: an endpoint that stays sick gets one connection each time, after
// 10, 20, 40 s and so on.
func TestEjectionsGrowLonger(t *testing.T) {
	s := newSick(t, 4, Ejection{After: 5})
	if got := s.run(75*time.Second, Unserved) * 75000; got < 7.5 || got > 8.5 {
		t.Errorf("it gets %.1f connections in 75 s, want 5 and those after 10, 30 and 70 s", got)
	}
	check.Equalf(t, s.run(60*time.Second, Unserved), 0, "its part of the connections while it is ejected")
}

// TestHalfOfTheEndpointsStays: however many fail.
func TestHalfOfTheEndpointsStays(t *testing.T) {
	for _, n := range []int{1, 2, 3, 10} {
		s := newSick(t, n, Ejection{After: 1})
		for i := range s.list {
			s.loads.Ended(s.loads.Of(s.list[i].Addr), Unserved, 0)
		}
		check.Equalf(t, s.b.Ejected(), n/2, "ejected endpoints, of %d", n)
	}
}

// TestWhatCountsAsAFailure: resets after the first byte count only if they are to; one that
// serves in between starts the row anew; without settings nothing counts.
func TestWhatCountsAsAFailure(t *testing.T) {
	for _, tt := range []struct {
		e    Ejection
		how  Outcome
		want int
	}{
		{Ejection{After: 5}, Reset, 0}, {Ejection{After: 5, AnyReset: true}, Reset, 1}, {Ejection{After: 5, AnyReset: true}, Unserved, 1},
		{Ejection{After: 5}, Served, 0}, {Ejection{}, Unserved, 0},
	} {
		s := newSick(t, 4, tt.e)
		s.run(time.Second, tt.how)
		check.Equalf(t, s.b.Ejected(), tt.want, "%+v, outcome %d: how many are ejected", tt.e, tt.how)
	}
	s := newSick(t, 4, Ejection{After: 5})
	l := s.loads.Of(s.list[0].Addr)
	for range 100 {
		for range 4 {
			s.loads.Ended(l, Unserved, 0)
		}
		s.loads.Ended(l, Served, 0)
	}
	check.Equalf(t, s.b.Ejected(), 0, "failures count that are not in a row")
	for range 5 {
		s.loads.Refused(l, 0)
	}
	check.Equalf(t, s.b.Ejected(), 1, "attempts that fail do not count")
}

// TestEjectionWithEachAlgorithm: none goes to an ejected endpoint.
func TestEjectionWithEachAlgorithm(t *testing.T) {
	for a := range algorithms {
		s := newSick(t, 3, Ejection{After: 1})
		port := &service.Port{}
		port.Families[0].Endpoints = s.list
		s.b.Configure(Options{Algorithm: Algorithm(a), Loads: s.loads, Ejection: Ejection{After: 1}, Port: port})
		s.loads.Ended(s.loads.Of(s.list[1].Addr), Unserved, 0)
		for c := range 200 {
			if i, _ := first(t, s.b, s.list, client(c), ms); i == 1 {
				t.Errorf("%v: a connection goes to the ejected endpoint", Algorithm(a))
				break
			}
		}
	}
}

func TestParseEjection(t *testing.T) {
	for value, want := range map[string]Ejection{
		"5": {After: 5}, "1": {After: 1}, "3 any-reset": {After: 3, AnyReset: true},
		"": {}, "0": {}, "-1": {}, "1001": {}, "five": {}, "5 resets": {}, "5any-reset": {}, "5 any-reset ": {},
	} {
		got, err := parseEjection(value)
		if got != want || (err == nil) != (want.After > 0) {
			t.Errorf("%q: %+v, %v", value, got, err)
		}
	}
}

// TestEjectedEndpointsThatLeave: they count no longer, so that others can be ejected, and
// what is gone is not ejected by the end of its last connections.
func TestEjectedEndpointsThatLeave(t *testing.T) {
	s := newSick(t, 4, Ejection{After: 1})
	reset := func(i int) { s.loads.Ended(s.loads.Of(s.list[i].Addr), Unserved, 0) }
	list := func(from, to int) {
		port := &service.Port{}
		port.Families[0].Endpoints = s.list[from:to]
		s.b.Configure(Options{Loads: s.loads, Ejection: Ejection{After: 1}, Port: port})
	}
	reset(0)
	reset(1)
	must.Equalf(t, s.b.Ejected(), 2, "how many of 4 endpoints are ejected")
	s.list = append(s.list, endpoints(8)[4:]...)
	list(2, 6)
	reset(0) // a connection from before
	check.Equalf(t, s.b.Ejected(), 0, "endpoints are ejected after both have gone")
	reset(2)
	reset(3)
	check.Equalf(t, s.b.Ejected(), 2, "how many of the next 4 endpoints are ejected")
	s.b.Configure(Options{Loads: s.loads, Port: &service.Port{}})
	check.Equalf(t, s.b.Ejected(), 0, "endpoints are ejected without the annotation")
}

// TestSuspectIsNotTried: an endpoint whose ejection is over, and that is passed over as it
// failed a moment ago, is not taken for mended.
func TestSuspectIsNotTried(t *testing.T) {
	s := newSick(t, 2, Ejection{After: 1})
	bad := s.list[0].Addr
	s.loads.Refused(s.loads.Of(bad), 0)
	over := int64(firstEjection) + 1
	var d Dial
	d.begin(endpointKey(bad), over)
	s.b.Failed(&d, bad, someone, over)
	for range 20 {
		if i, _ := first(t, s.b, s.list, someone, over+1); i == 0 {
			t.Fatal("a connection goes to the endpoint that has just failed")
		}
	}
	later := over + int64(firstSuspicion) + ms
	tried := 0
	for range 20 {
		if i, _ := first(t, s.b, s.list, someone, later); i == 0 {
			tried++
		}
	}
	check.Equalf(t, tried, 1, "how many of 20 connections try the endpoint")
}

// TestPinnedClientsLeaveAnEjectedEndpoint: session affinity does not keep them there.
func TestPinnedClientsLeaveAnEjectedEndpoint(t *testing.T) {
	s := newSick(t, 3, Ejection{After: 1})
	port := &service.Port{AffinityTimeout: time.Hour}
	port.Families[0].Endpoints = s.list
	s.b.Configure(Options{Loads: s.loads, Ejection: Ejection{After: 1}, Port: port, AffinityTimeout: time.Hour})
	pinned, _ := first(t, s.b, s.list, someone, 0)
	s.loads.Ended(s.loads.Of(s.list[pinned].Addr), Unserved, 0)
	if i, how := first(t, s.b, s.list, someone, ms); i == pinned || how != AffinityMoved {
		t.Errorf("the client goes to %d, %v; its endpoint %d is ejected", i, how, pinned)
	}
}
