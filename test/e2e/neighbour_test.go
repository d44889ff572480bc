package e2e

import (
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
)

// Bounds of a neighbour's requests beside a flood. Shorter ones pass, whatever multiple they are of
// those without the flood: on a busy machine, a busy proxy waits for a CPU and an idle one does not.
const (
	mostWait = 250 * time.Millisecond // the median
	mostTail = time.Second            // the 99th percentile: a lost packet is sent again after it
)

// bearable reports whether a neighbour's requests beside a flood take at most so long, or at most so
// many times as long as those that it does not meet: between floods, or past the proxy.
func bearable(quiet, beside, most time.Duration, times int) bool {
	return beside <= most || beside <= time.Duration(times)*quiet
}

// checkBearable measures the medians of both, and fails the test if they are not bearable three times:
// another program may take the CPUs for a while.
func checkBearable(t *testing.T, times int, measure func() (quiet, beside time.Duration)) {
	t.Helper()
	for left := 2; ; left-- {
		quiet, beside := measure()
		t.Logf("medians: beside the flood %v, else %v, %.1f times", beside, quiet, float64(beside)/float64(quiet))
		if bearable(quiet, beside, mostWait, times) {
			return
		}
		if left == 0 {
			t.Errorf("beside the flood a neighbour's requests take %v and else %v, more than %d times as long", beside, quiet, times)
			return
		}
	}
}

// alternate connects to a server directly and by a Service, by turns, so that both meet the same
// load of the machine, until over is true. It returns the medians of both.
func alternate(t *testing.T, client *netns.Host, past, through []string, over func(asked int) bool) (direct, served time.Duration) {
	t.Helper()
	took := [2][]time.Duration{}
	for i := 0; !over(i); i++ {
		for kind, targets := range [][]string{past, through} {
			v := ask(client, targets[i%len(targets)])
			if v.err != nil {
				t.Fatalf("%s: %v", targets[i%len(targets)], v.err)
			}
			took[kind] = append(took[kind], v.elapsed)
		}
	}
	for _, times := range took {
		slices.Sort(times)
	}
	return percentile(took[0], 50), percentile(took[1], 50)
}
