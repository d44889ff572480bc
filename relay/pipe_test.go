package relay

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestReserveKeepsTheLimit: workers that reserve at the same time take exactly the
// limit, and nobody ever reads a count above it.
func TestReserveKeepsTheLimit(t *testing.T) {
	const workers, limit, rounds = 4, 100_000, 2_000_000
	var count, took atomic.Int64
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range rounds {
				if reserve(&count, 1, limit) {
					took.Add(1)
				}
				if n := count.Load(); n > limit {
					t.Errorf("the count was %d, the limit is %d", n, limit)
					return
				}
			}
		})
	}
	wg.Wait()
	check.Equalf(t, took.Load(), limit, "how many were reserved")
}
