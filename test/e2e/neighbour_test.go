package e2e

import (
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
)

// What a neighbour's requests may take beside a flood however short they are without it. A proxy
// that is busy waits for a CPU beside other programs, one that is idle does not, so on a busy
// machine a multiple alone says little. A median of seconds and a packet that is sent again, after
// a second, are faults of the proxy.
const (
	mostWait = 250 * time.Millisecond // the median
	mostTail = time.Second            // the 99th percentile
)

// bearable reports whether a neighbour's requests beside a flood take no more than most, or not
// much more often than times as long as without it.
func bearable(quiet, beside, most time.Duration, times int) bool {
	return beside <= most || beside <= time.Duration(times)*quiet
}

// isBearable measures the medians of a neighbour's requests. It measures again, twice at most, if
// they are not bearable: what another program of the machine takes for a while does not come again.
func isBearable(t *testing.T, times int, measure func() (quiet, beside time.Duration)) {
	t.Helper()
	for left := 2; ; left-- {
		quiet, beside := measure()
		t.Logf("medians: without the flood %v, beside it %v, %.1f times", quiet, beside, float64(beside)/float64(quiet))
		if bearable(quiet, beside, mostWait, times) {
			return
		}
		if left == 0 {
			t.Errorf("beside the flood a neighbour's requests take %v and %v without it, more than %d times as long", beside, quiet, times)
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
