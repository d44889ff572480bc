package stream

import (
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
)

// stalled is a connection that was accepted when its Service was at its limit of
// connections that are being dialled. It waits until there is room, and the clients
// in the queue of its listening socket wait too. There is at most one for each
// socket and loop.
type stalled struct {
	conn     *conn
	acceptor *acceptor // nil if it does not accept any more
}

// stallPause is the time between two attempts to find room for stalled connections.
const stallPause = 10 * time.Millisecond

// staller is the worker as the handler of the timer for stalled connections.
type staller worker

// stall has a connection wait for room, and its listening socket wait for the
// connection.
func (w *worker) stall(c *conn, a *acceptor) {
	w.loop.Remove(a.reg)
	w.stalled = append(w.stalled, stalled{c, a})
	w.awaitRoom()
}

func (w *worker) awaitRoom() {
	if !w.stallTimer.Scheduled() {
		w.loop.Schedule(&w.stallTimer, w.loop.Now()+int64(stallPause), (*staller)(w))
	}
}

// HandleTimer dials for the connections that there is room for now.
func (r *staller) HandleTimer(*poll.Timer) {
	w := (*worker)(r)
	var ready []stalled
	w.stalled = slices.DeleteFunc(w.stalled, func(s stalled) bool {
		if s.conn.cut == conntrack.EndNone && !s.conn.beginDialing() {
			return false
		}
		ready = append(ready, s)
		return true
	})
	if len(w.stalled) > 0 {
		w.awaitRoom()
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

// unstall ends the wait of an acceptor that is being removed. The connection goes on
// waiting.
func (w *worker) unstall(a *acceptor) (was bool) {
	for i := range w.stalled {
		if w.stalled[i].acceptor == a {
			w.stalled[i].acceptor = nil
			return true
		}
	}
	return false
}

// beginDialing counts the connection among those of its Service that are being
// dialled; false if that is at its limit.
func (c *conn) beginDialing() bool {
	if !c.pool.service.beginDialing(int64(c.worker.server.config.MaxServiceDialing)) {
		return false
	}
	c.counts |= amongDialing
	c.pool.dialing.Add(1)
	return true
}

// endDialing undoes beginDialing.
func (c *conn) endDialing() {
	if c.counts&amongDialing != 0 {
		c.counts &^= amongDialing
		c.pool.dialing.Add(-1)
		c.pool.service.dialing.Add(-1)
	}
}
