package listener

import (
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
)

const (
	// flushDelay is how long a record waits for others to be written with.
	flushDelay = 10 * time.Millisecond
	// refreshInterval is how often the counters take in the bytes of connections
	// that are open.
	refreshInterval = 15 * time.Second
	// refreshShare is how many connections are refreshed before the loop does other work, and
	// refreshPause the time until the next ones are.
	refreshShare = 256
	refreshPause = 2 * time.Millisecond
)

// recorder flushes and refreshes the records of one event loop, of all data paths. It belongs to
// that loop.
type recorder struct {
	loop    *poll.Loop
	shard   *conntrack.Shard
	flush   poll.Timer
	refresh poll.Timer
}

// startRecorder begins to flush and refresh the records of a loop.
func startRecorder(loop *poll.Loop, shard *conntrack.Shard) *recorder {
	r := &recorder{loop: loop, shard: shard}
	shard.OnPending(func() { loop.Schedule(&r.flush, loop.Now()+int64(flushDelay), (*flusher)(r)) })
	loop.Post(func() { r.HandleTimer(nil) })
	return r
}

// flusher is the recorder as the handler of its flush timer.
type flusher recorder

// HandleTimer hands on the records that have ended since the last time.
func (f *flusher) HandleTimer(*poll.Timer) { f.shard.Flush() }

// HandleTimer updates the counters with the bytes of long-lived connections.
func (r *recorder) HandleTimer(*poll.Timer) {
	next := refreshInterval
	if r.shard.Refresh(refreshShare) {
		next = refreshPause
	}
	r.loop.Schedule(&r.refresh, r.loop.Now()+int64(next), r)
}

// stop ends refreshing, and flushes what the data paths have left.
func (r *recorder) stop() {
	r.loop.Post(func() {
		r.loop.Cancel(&r.refresh)
		r.loop.Cancel(&r.flush)
		r.shard.Flush()
	})
}
