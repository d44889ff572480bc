package stream

import (
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/upstream"
)

// spareConns bounds the memory that is kept for later connections.
const spareConns = 1024

// worker is the Server's part of one event loop. Everything in it belongs to that
// loop; other goroutines reach it by post only.
type worker struct {
	server    *Server
	loop      *poll.Loop
	relay     *relay.Worker
	dialer    *upstream.Dialer
	shard     *conntrack.Shard
	acceptors map[*socket]*acceptor

	retries retries

	stalled    []stalled
	stallTimer poll.Timer

	paused     []*acceptor
	pauseTimer poll.Timer
	backoff    time.Duration

	spare []*conn
}

func newWorker(s *Server, loop *poll.Loop, r *relay.Worker, d *upstream.Dialer, shard *conntrack.Shard) *worker {
	w := &worker{server: s, loop: loop, relay: r, dialer: d, shard: shard, acceptors: make(map[*socket]*acceptor), retries: newRetries()}
	w.post(func() { loop.AtTick(w.giveTurns) })
	return w
}

// post runs f on the worker's loop.
func (w *worker) post(f func()) { w.loop.Post(f) }

// newConn returns an empty connection.
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

// freeConn takes back a connection that has ended. Nothing refers to it any more:
// its registrations are gone and its timer is cancelled.
func (w *worker) freeConn(c *conn) {
	*c = conn{}
	if len(w.spare) < spareConns {
		w.spare = append(w.spare, c)
	}
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
	w.shard.Flush()
}
