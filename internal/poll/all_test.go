package poll

import (
	"sync/atomic"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// PostAll finishes when every running loop has run the function. It does not wait for
// stopped loops.
func TestPostAll(t *testing.T) {
	var loops []*Loop
	for range 3 {
		l := must.Get(New())(t)
		loops = append(loops, l)
	}
	running := make(chan error, 2)
	for _, l := range loops[:2] {
		go func() { running <- l.Run() }()
	}
	loops[2].Stop()
	must.OK(t, loops[2].Run())
	var ran [3]atomic.Int32
	<-PostAll(loops, func(i int) { ran[i].Add(1) })
	if a, b, c := ran[0].Load(), ran[1].Load(), ran[2].Load(); a != 1 || b != 1 || c != 0 {
		t.Errorf("the loops ran it %d, %d and %d times", a, b, c)
	}
	<-PostAll(nil, func(int) { t.Error("no loop ran it") })
	for _, l := range loops[:2] {
		l.Stop()
		check.OK(t, <-running)
	}
}
