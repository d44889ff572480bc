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

// queue holds the connections of a Service that wait at a limit, of all loops. Each service port
// has them in order of arrival. When a place is free, the first one has a turn. It stays the first
// one until it begins to connect to an endpoint. --max-dialing-per-service bounds the queue.
type queue struct {
	length atomic.Int32
	full   atomic.Bool // somebody found the Service at its limit since a connection ended
	mu     sync.Mutex
	pools  []*pool // those with waiting connections; guarded by mu
	next   int     // index of the one whose turn is next, at the Service's limit; guarded by mu
}

type queued struct {
	conn   *conn // belongs to the worker
	worker *worker
	called bool // its turn is to come, or lasts
	again  bool // a place became free in its turn
}

const (
	// lookAgain is how often the first connection of a service port looks for a place: when a flow
	// in the kernel ends, nobody gives it a turn.
	lookAgain = int64(time.Second)
	// calledAtOnce is how many service ports have a turn when a place in their Service is free.
	calledAtOnce = 8
)

// add appends a connection to its service port's.
func (q *queue) add(c *conn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(c.pool.waiting) == 0 {
		q.pools = append(q.pools, c.pool)
	}
	c.pool.waiting = append(c.pool.waiting, queued{conn: c, worker: c.worker})
	c.pool.queued.Add(1)
	q.length.Add(1)
}

// remove takes a connection from the queue. If it was its service port's first one, the next
// one has its turn, if it is to be called.
func (q *queue) remove(c *conn, callNext bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	p := c.pool
	i := slices.IndexFunc(p.waiting, func(e queued) bool { return e.conn == c })
	p.waiting = slices.Delete(p.waiting, i, i+1)
	p.queued.Add(-1)
	q.length.Add(-1)
	switch {
	case len(p.waiting) == 0:
		i := slices.Index(q.pools, p)
		q.pools = slices.Delete(q.pools, i, i+1)
	case i == 0 && callNext:
		p.callLocked()
	}
}

// callLocked gives the first connection its turn, on its loop. There must be one.
func (p *pool) callLocked() {
	e := &p.waiting[0]
	if e.called {
		e.again = true
		return
	}
	w := e.worker
	e.called, e.again = true, false
	w.post(func() { w.giveTurn(p) })
}

// call gives the first connection of a service port a turn. If of is not nil, only of gets one.
func (q *queue) call(p *pool, of *conn) {
	if p.queued.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(p.waiting) > 0 && (of == nil || p.waiting[0].conn == of) {
		p.callLocked()
	}
}

// freed gives turns after a connection of a service port has ended.
func (q *queue) freed(p *pool) {
	if q.length.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.full.Swap(false) {
		for range min(len(q.pools), calledAtOnce) {
			q.next = (q.next + 1) % len(q.pools)
			q.pools[q.next].callLocked()
		}
	}
	if len(p.waiting) > 0 {
		p.callLocked()
	}
}

// wake gives the first connection of each service port its turn.
func (q *queue) wake() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, p := range q.pools {
		p.callLocked()
	}
}

// giveTurn has a service port's first connection look for a place, if that is on this loop.
func (w *worker) giveTurn(p *pool) {
	q := &p.service.queue
	q.mu.Lock()
	if len(p.waiting) == 0 || p.waiting[0].worker != w || !p.waiting[0].called || p.waiting[0].conn.awaits != place {
		q.mu.Unlock()
		return
	}
	p.waiting[0].again = false
	c := p.waiting[0].conn
	q.mu.Unlock()
	c.endWait()
	c.retry()
}

// endTurn has a connection wait on as the first one.
func (q *queue) endTurn(p *pool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	e := &p.waiting[0]
	e.called = false
	if e.again {
		p.callLocked()
	}
}

// enter counts the connection among those that its Service serves. It returns false if it has
// to wait: for those that came before it, or at the Service's limit.
func (c *conn) enter(l *service.Limits) bool {
	if c.counts&amongServed == 0 {
		if l.Any() && c.counts&amongQueued == 0 && c.pool.queued.Load() > 0 {
			return false
		}
		if !c.pool.service.serve(int64(l.Connections)) {
			c.pool.service.queue.full.Store(true)
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

// unqueue takes a connection from the queue, if it is there.
func (c *conn) unqueue(callNext bool) {
	if c.counts&amongQueued != 0 {
		c.counts &^= amongQueued
		c.pool.service.queue.remove(c, callNext)
		c.worker.server.queued.Add(-1)
	}
}

// hasFailed reports whether an attempt of the connection has failed. Then the next one in the queue
// waits until this one is connected or has failed: otherwise all of them would try an endpoint that
// refuses, again and again, while the others are full.
func (c *conn) hasFailed() bool { return len(c.record.Failed) > 0 }

// enqueue has a connection wait for a place as long as its Service's annotation says, or
// resets it.
func (c *conn) enqueue(v *policy.Verdict) {
	w, now, l, q := c.worker, poll.Nanotime(), &v.Port.Limits, &c.pool.service.queue
	isFirst, hadPlace := c.counts&amongQueued != 0, c.counts&amongServed != 0 // isFirst: it had its turn
	until, waited := w.until[c]
	if !waited {
		if until = now; c.record.Attempts > 0 {
			until = c.record.Start // attempts that fail give no more time
		}
		until += int64(l.Queue)
		w.until[c] = until
	}
	if !isFirst || now >= until {
		c.warnOfPlace(l)
	}
	c.leave()
	if now >= until {
		c.fail(conntrack.LimitReached)
		return
	}
	c.plan = balancer.Dial{}
	if !c.await(place, min(until, now+lookAgain)) {
		return
	}
	if isFirst {
		q.endTurn(c.pool)
		return
	}
	q.add(c)
	c.counts |= amongQueued
	w.server.queued.Add(1)
	if !c.hasFailed() && (hadPlace || c.pool.queued.Load() == 1) {
		q.freed(c.pool) // a place may be free since the connection looked for one
	}
}

// warnOfPlace logs that there is no place for a connection.
func (c *conn) warnOfPlace(l *service.Limits) {
	limit, name, what := l.PerEndpoint, maxPerEndpoint, "are reset"
	if c.counts&amongServed == 0 && l.Connections > 0 {
		limit, name = l.Connections, maxConnections
	}
	if l.Queue > 0 {
		what = "wait up to " + l.Queue.String()
	}
	c.worker.server.warnOfLimit(c.pool.service, int64(limit), name, what)
}

// lookForPlace ends a connection whose time in the queue is over, and looks again otherwise.
func (c *conn) lookForPlace() {
	now, until := poll.Nanotime(), c.worker.until[c]
	if now >= until {
		c.fail(conntrack.LimitReached)
		return
	}
	c.worker.loop.Schedule(&c.timer, min(until, now+lookAgain), c)
	c.pool.service.queue.call(c.pool, c)
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
