package stream

import (
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
)

// awaited is what a connection waits for before it is dialled.
type awaited uint8

const (
	nothing   awaited = iota
	header            // a PROXY header, on the client's socket with the registration endpoint
	endpoints         // an endpoint of its service port: it is in worker.held
)

// askAgain is the least time between two calls of Options.NeedEndpoints for a service port.
const askAgain = int64(10 * time.Second)

// hold has a connection wait until its service port has an endpoint, as long since its
// beginning as sluice.dev/hold says. It counts as being dialled meanwhile, which bounds the
// held connections of a Service.
func (c *conn) hold() {
	w, now := c.worker, poll.Nanotime()
	c.awaits = endpoints
	c.plan = balancer.Dial{}
	w.held[c] = struct{}{}
	w.server.held.Add(1)
	w.loop.Schedule(&c.timer, c.record.Start+int64(c.record.Port.Hold), c)
	if c.mayGoOn() { // the first endpoint came since the connection was decided about
		return
	}
	last := c.pool.asked.Load()
	if tell := w.server.options.NeedEndpoints; tell != nil && (last == 0 || now-last >= askAgain) && c.pool.asked.CompareAndSwap(last, max(now, 1)) {
		tell(c.record.Port)
	}
}

// release ends hold.
func (c *conn) release() {
	c.awaits = nothing
	delete(c.worker.held, c)
	c.worker.server.held.Add(-1)
}

// mayGoOn has the connection dialled in its turn if it is not to wait any more.
func (c *conn) mayGoOn() bool {
	w := c.worker
	if _, v := w.decide(c.record.Protocol, c.record.Client.Addr(), c.record.VIP); v.Action == policy.Hold {
		return false
	}
	c.release()
	w.loop.Cancel(&c.timer)
	w.retries.push(c)
	return true
}

// wakeHeld has all held connections decided about anew. Those that still have no endpoint go
// on waiting.
func (s *Server) wakeHeld() {
	if s.held.Load() == 0 {
		return
	}
	for _, w := range s.workers {
		w.post(func() {
			for c := range w.held {
				c.mayGoOn()
			}
		})
	}
}
