package listener

import (
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/relay"
)

const (
	// flushDelay is how long a record waits for others to be written with.
	flushDelay = 10 * time.Millisecond
	// refreshInterval is how often the counters are brought up to date with
	// connections that are open.
	refreshInterval = 15 * time.Second
	// refreshShare is how many connections are looked at before other work of
	// the loop has its turn, and refreshPause when the next are.
	refreshShare = 256
	refreshPause = 2 * time.Millisecond
	// spareConns bounds the memory that is kept for connections to come.
	spareConns = 1024
)

// worker is the listener's share of one event loop. Everything in it belongs to
// that loop; other goroutines reach it by post only.
type worker struct {
	manager   *Manager
	loop      *poll.Loop
	relay     *relay.Worker
	shard     *conntrack.Shard
	acceptors map[*socket]*acceptor

	retries retries

	stalled    []stalled
	stallTimer poll.Timer

	paused     []*acceptor
	pauseTimer poll.Timer
	backoff    time.Duration

	flushTimer   poll.Timer
	refreshTimer poll.Timer
	spare        []*conn
}

func newWorker(m *Manager, loop *poll.Loop, r *relay.Worker, shard *conntrack.Shard) *worker {
	w := &worker{manager: m, loop: loop, relay: r, shard: shard, acceptors: make(map[*socket]*acceptor), retries: newRetries()}
	shard.OnPending(func() {
		loop.Schedule(&w.flushTimer, loop.Now()+int64(flushDelay), (*flusher)(w))
	})
	replies := m.traits.Replies
	w.post(func() {
		loop.AtTick(w.giveTurns)
		if replies.LastPort != 0 {
			r.UseReplyPorts(replies.FirstPort, replies.LastPort)
		}
		(*refresher)(w).HandleTimer(nil)
	})
	return w
}

// post runs f on the worker's loop.
func (w *worker) post(f func()) bool { return w.loop.Post(f) }

// newConn gives a fresh connection.
func (w *worker) newConn() *conn {
	var c *conn
	if n := len(w.spare); n > 0 {
		c = w.spare[n-1]
		w.spare[n-1] = nil
		w.spare = w.spare[:n-1]
	} else {
		c = new(conn)
	}
	c.worker = w
	c.upstream = -1
	return c
}

// freeConn takes a connection that has ended. Nothing refers to it any more:
// its registrations are gone and its timer is cancelled.
func (w *worker) freeConn(c *conn) {
	*c = conn{}
	if len(w.spare) < spareConns {
		w.spare = append(w.spare, c)
	}
}

// flusher is a worker as the handler of its flush timer.
type flusher worker

// HandleTimer hands the records on that have ended since the last time.
func (f *flusher) HandleTimer(*poll.Timer) { f.shard.Flush() }

// refresher is a worker as the handler of its refresh timer.
type refresher worker

// HandleTimer has the counters see the bytes of connections that live long.
func (r *refresher) HandleTimer(*poll.Timer) {
	next := refreshInterval
	if r.shard.Refresh(refreshShare) {
		next = refreshPause
	}
	r.loop.Schedule(&r.refreshTimer, r.loop.Now()+int64(next), r)
}

// stop ends accepting and all connections, and writes their records.
func (w *worker) stop() {
	w.loop.Cancel(&w.pauseTimer)
	for s := range w.acceptors {
		w.drop(s)
	}
	w.retries.clear()
	w.loop.Cancel(&w.stallTimer)
	w.stalled = nil
	w.shard.Each(func(r *conntrack.Record) {
		if c, is := r.Owner.(*conn); is {
			c.abort()
		}
	})
	w.loop.Cancel(&w.refreshTimer)
	w.loop.Cancel(&w.flushTimer)
	w.shard.Flush()
}
