package stream

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/relay"
)

// awaited is what a connection waits for before it is dialled.
type awaited uint8

const (
	nothing   awaited = iota
	header            // a PROXY header, on the client's socket with the registration endpoint
	endpoints         // an endpoint of its service port: it is in worker.held
	place             // a place at an endpoint or in its Service: it is in the queue
	process           // whether another process takes it: it is out of the loop
)

// await has a connection wait until HandleTimer, or until its client leaves. It
// returns false if the connection has failed.
func (c *conn) await(what awaited, until int64) bool {
	var err error
	if c.endpoint, err = c.worker.loop.Add(int(c.client), 0, relay.Watch&^poll.Writable, c); err != nil {
		c.fail(conntrack.LimitReached)
		return false
	}
	c.awaits = what
	c.record.BeginWait(poll.Nanotime())
	c.worker.loop.Schedule(&c.timer, until, c)
	return true
}

// endWait ends await.
func (c *conn) endWait() {
	c.awaits = nothing
	c.record.EndWait(poll.Nanotime())
	c.worker.loop.Cancel(&c.timer)
	c.worker.loop.Remove(c.endpoint)
	c.endpoint = poll.Registration{}
}

// leaves ends a waiting connection whose client has closed or reset it. A client whose FIN comes
// after bytes may have ended its half only, and wait for the answer.
func (c *conn) leaves(ev poll.Events) {
	switch {
	case ev&(poll.Failed|poll.HungUp) != 0:
		c.fail(conntrack.ClientReset)
	case ev&poll.PeerDone != 0 && !c.carrier.hasAsked():
		c.fail(conntrack.ClientFin)
	}
}

// askAgain is the least time between two calls of Options.NeedEndpoints for a service port.
const askAgain = int64(10 * time.Second)

// hold has a connection wait until its service port has an endpoint, as long since its
// beginning as sluice.dev/hold says. It counts as being dialled meanwhile, which bounds the
// held connections of a Service.
func (c *conn) hold() {
	w, now := c.worker, poll.Nanotime()
	c.plan = balancer.Dial{}
	c.unqueue(true)
	if !c.await(endpoints, c.record.Start+int64(c.record.Port.Hold)) {
		return
	}
	w.held[c] = struct{}{}
	w.server.held.Add(1)
	c.pool.held.Add(1)
	if c.mayGoOn() { // the first endpoint came since the connection was decided about
		return
	}
	last := c.pool.asked.Load()
	if tell := w.server.options.NeedEndpoints; tell != nil && (last == 0 || now-last >= askAgain) && c.pool.asked.CompareAndSwap(last, max(now, 1)) {
		tell(c.record.Port)
	}
}

// release takes a connection from those that are held.
func (c *conn) release() {
	delete(c.worker.held, c)
	c.worker.server.held.Add(-1)
	c.pool.held.Add(-1)
}

// mayGoOn has the connection dialled in its turn if it is not to wait any more.
func (c *conn) mayGoOn() bool {
	w := c.worker
	if _, v := w.decide(c.record.Protocol, c.record.Client.Addr(), c.record.VIP); v.Action == policy.Hold {
		return false
	}
	c.release()
	c.endWait()
	w.retries.push(c)
	return true
}

// wakeHeld has all held connections decided about anew, each loop's in order of arrival. Those
// that still have no endpoint go on waiting.
func (s *Server) wakeHeld() {
	if s.held.Load() == 0 {
		return
	}
	for _, w := range s.workers {
		w.post(func() {
			for _, c := range slices.SortedFunc(maps.Keys(w.held), func(a, b *conn) int { return cmp.Compare(a.record.Start, b.record.Start) }) {
				c.mayGoOn()
			}
		})
	}
}
