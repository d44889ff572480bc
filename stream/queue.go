package stream

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// queue has the connections of a Service that wait at a limit, those of all loops, in order
// of arrival. When a place is free, the first one of each service port takes its turn; it
// keeps its place if there is no room for it. --max-dialing-per-service bounds the queue.
type queue struct {
	length atomic.Int32
	mu     sync.Mutex
	queued []queued // guarded by mu
}

type queued struct {
	conn   *conn // belongs to the worker
	worker *worker
	pool   *pool
	until  int64 // when it is reset, monotonic ns
}

// lookAgain is how often a queued connection has the first one look for a place, in case
// nothing told of one: flows in the kernel count at endpoints too.
const lookAgain = int64(time.Second)

// add appends a connection, or puts one back before all others.
func (q *queue) add(e queued, isBack bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	at := len(q.queued)
	if isBack {
		at = 0
	}
	q.queued = slices.Insert(q.queued, at, e)
	q.length.Add(1)
	e.pool.queued.Add(1)
}

func (q *queue) findLocked(c *conn) int {
	return slices.IndexFunc(q.queued, func(e queued) bool { return e.conn == c })
}

// until returns when a connection in the queue is to be reset.
func (q *queue) until(c *conn) int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.queued[q.findLocked(c)].until
}

func (q *queue) remove(c *conn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.removeLocked(q.findLocked(c))
}

func (q *queue) removeLocked(i int) {
	q.queued[i].pool.queued.Add(-1)
	q.queued = slices.Delete(q.queued, i, i+1)
	q.length.Add(-1)
}

// wake gives the first connection of each service port its turn.
func (q *queue) wake() {
	if q.length.Load() == 0 {
		return
	}
	var first []queued
	q.mu.Lock()
	for _, e := range q.queued {
		if !slices.ContainsFunc(first, func(f queued) bool { return f.pool == e.pool }) {
			first = append(first, e)
		}
	}
	q.mu.Unlock()
	for _, e := range first {
		e.worker.post(func() { e.worker.callNext(q, e.pool) })
	}
}

// callNext gives a service port's first connection its turn, if that is on this loop.
func (w *worker) callNext(q *queue, p *pool) {
	q.mu.Lock()
	i := slices.IndexFunc(q.queued, func(e queued) bool { return e.pool == p })
	if i < 0 || q.queued[i].worker != w {
		q.mu.Unlock()
		return
	}
	w.called = q.queued[i]
	q.removeLocked(i)
	q.mu.Unlock()
	w.server.queued.Add(-1)
	c := w.called.conn
	c.endWait()
	c.retry()
	w.called = queued{}
}

// enter counts the connection among those that its Service serves. It returns false if it has
// to wait: for those that came before it, or at the Service's limit.
func (c *conn) enter(l *service.Limits) bool {
	if c.counts&amongServed == 0 {
		mayGo := !l.Any() || c.worker.called.conn == c || c.pool.queued.Load() == 0
		if !mayGo || !c.pool.service.serve(int64(l.Connections)) {
			return false
		}
		c.counts |= amongServed
	}
	return true
}

// leave undoes enter.
func (c *conn) leave() {
	if c.counts&amongServed != 0 {
		c.counts &^= amongServed
		c.pool.service.served.Add(-1)
	}
}

// begun has the next one take its turn once this one's has brought an endpoint.
func (c *conn) begun() {
	if c.worker.called.conn == c {
		c.worker.called = queued{}
		c.pool.service.queue.wake()
	}
}

// enqueue has a connection wait for a place as long as its Service's annotation says, or
// resets it.
func (c *conn) enqueue(v *policy.Verdict) {
	w, now, l, q := c.worker, poll.Nanotime(), &v.Port.Limits, c.pool.service
	// From the connection's start, so that one whose attempts fail does not wait anew each time.
	e, isBack := queued{conn: c, worker: w, pool: c.pool, until: c.record.Start + int64(l.Queue)}, w.called.conn == c
	if !isBack || now >= e.until {
		c.warnOfPlace(l)
	}
	c.leave()
	if now >= e.until {
		c.fail(conntrack.LimitReached)
		return
	}
	c.plan = balancer.Dial{}
	if !c.await(place, min(e.until, now+lookAgain)) {
		return
	}
	q.queue.add(e, isBack)
	w.server.queued.Add(1)
	if !isBack && c.pool.queued.Load() == 1 {
		q.queue.wake() // a place may be free since the connection looked for one
	}
}

// warnOfPlace logs that there is no place for a connection.
func (c *conn) warnOfPlace(l *service.Limits) {
	limit, name, what := l.PerEndpoint, "sluice.dev/max-connections-per-endpoint (for each endpoint)", "are reset"
	if c.counts&amongServed == 0 && l.Connections > 0 {
		limit, name = l.Connections, "sluice.dev/max-connections"
	}
	if l.Queue > 0 {
		what = "wait up to " + l.Queue.String()
	}
	c.worker.server.warnOfLimit(c.pool.service, int64(limit), name, what)
}

// lookForPlace ends a connection whose time in the queue is over, and looks again otherwise.
func (c *conn) lookForPlace() {
	now, q := poll.Nanotime(), &c.pool.service.queue
	until := q.until(c)
	if now >= until {
		c.fail(conntrack.LimitReached)
		return
	}
	c.worker.loop.Schedule(&c.timer, min(until, now+lookAgain), c)
	q.wake()
}

// wakeQueued gives all queues their turn, after a change of endpoints or limits.
func (s *Server) wakeQueued() {
	if s.queued.Load() == 0 {
		return
	}
	for _, q := range s.quotas.services {
		q.queue.wake()
	}
}
