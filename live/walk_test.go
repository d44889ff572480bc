package live

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
)

// However many clients list all connections, again and again, the loop has most of its
// time for connections, and does one step of theirs at a time.
func TestWalksLeaveTheLoopItsTime(t *testing.T) {
	const open, clients, length = 2000, 16, 700 * time.Millisecond
	// The machine may stop the loop in a step for any time, and no pause grows with more
	// than this.
	const longestStep = 5 * time.Millisecond
	w := newWorld(t, 1)
	w.on(0, func(s *conntrack.Shard) {
		for i := range open {
			s.Open(&conntrack.Record{Start: poll.Nanotime(), Client: client(i), Port: web, Endpoint: a})
		}
	})
	var used, walks, waiting, crowds atomic.Int64
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	post := func(shard int, f func()) bool {
		if n := waiting.Add(1); n > 2 && ctx.Err() == nil { // one may just have ended
			crowds.Add(1)
		}
		return w.loops[shard].Post(func() {
			began := time.Now()
			f()
			used.Add(int64(min(time.Since(began), longestStep)))
			waiting.Add(-1)
		})
	}
	began := time.Now()
	var running sync.WaitGroup
	for range clients {
		running.Go(func() {
			for w.table.List(ctx, post, func(*conntrack.Record) error { return nil }) == nil {
				if walks.Add(1) >= clients && time.Since(began) > length {
					stop()
				}
			}
		})
	}
	running.Wait()
	if share := float64(used.Load()) / float64(time.Since(began)); share > 0.6 {
		t.Errorf("%.0f %% of the loop's time, want at most a fifth", 100*share)
	} else {
		t.Logf("%.0f %% of the loop's time, %d walks", 100*share, walks.Load())
	}
	if n := crowds.Load(); n > 0 {
		t.Errorf("%d times several steps waited for the loop", n)
	}
	if walks.Load() == 0 {
		t.Error("no walk has ended")
	}
}
