package listener

import (
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
)

// stalled is a connection that was accepted when its Service had as many as
// may wait for an endpoint. It waits for its turn, and so does everybody in the
// queue of the socket that it came from: there is one for each socket and loop.
type stalled struct {
	conn     *conn
	acceptor *acceptor // nil if it accepts no more
}

// stallPause is how long after it those that are stalled are looked at again.
const stallPause = 10 * time.Millisecond

// staller is a worker as the handler of the timer for stalled connections.
type staller worker

// stall has a connection wait for a place, and its socket for the connection.
func (w *worker) stall(c *conn, a *acceptor) {
	w.loop.Remove(a.reg)
	w.stalled = append(w.stalled, stalled{c, a})
	w.awaitPlaces()
}

func (w *worker) awaitPlaces() {
	if !w.stallTimer.Scheduled() {
		w.loop.Schedule(&w.stallTimer, w.loop.Now()+int64(stallPause), (*staller)(w))
	}
}

// HandleTimer begins to dial for those that there is a place for now.
func (r *staller) HandleTimer(*poll.Timer) {
	w := (*worker)(r)
	var ready []stalled
	w.stalled = slices.DeleteFunc(w.stalled, func(s stalled) bool {
		if !s.conn.beginDialing() {
			return false
		}
		ready = append(ready, s)
		return true
	})
	if len(w.stalled) > 0 {
		w.awaitPlaces()
	}
	for _, s := range ready {
		if s.acceptor != nil {
			w.listen(s.acceptor)
		}
		s.conn.retry()
	}
}

func (w *worker) isStalled(a *acceptor) bool {
	return slices.ContainsFunc(w.stalled, func(s stalled) bool { return s.acceptor == a })
}

// unstall ends the waiting of an acceptor that goes. The connection goes on to
// wait.
func (w *worker) unstall(a *acceptor) (was bool) {
	for i := range w.stalled {
		if w.stalled[i].acceptor == a {
			w.stalled[i].acceptor = nil
			return true
		}
	}
	return false
}

// beginDialing takes one of the places that the connection's Service has for
// those that wait for an endpoint; false if there is none.
func (c *conn) beginDialing() bool {
	c.dialing = c.pool.service.beginDialing(int64(c.worker.manager.config.MaxServiceDialing))
	if c.dialing {
		c.pool.dialing.Add(1)
	}
	return c.dialing
}

// endDialing gives the place back.
func (c *conn) endDialing() {
	if c.dialing {
		c.dialing = false
		c.pool.dialing.Add(-1)
		c.pool.service.dialing.Add(-1)
	}
}
