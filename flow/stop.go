package flow

import (
	"math"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
)

const (
	// stopShare is how many flows end before the loop does other work.
	stopShare = 1024
	// stopPause is the time that the access log gets when its queue is full.
	stopPause = int64(time.Millisecond)
	// roomPatience is how long a stop waits for an access log that accepts no records. Then flows
	// end without records.
	roomPatience = int64(5 * time.Second)
)

// stopper ends all flows, some at a time: their records must find room in the queue of the
// access log, and the loop must go on.
type stopper struct {
	worker *worker
	timer  poll.Timer
	at     int
	since  int64 // when the queue last had room
	done   func()
}

// stop ends all flows, and calls done after the last one.
func (w *worker) stop(done func()) {
	w.readNotices()
	w.discoverAll()
	(&stopper{worker: w, since: poll.Nanotime(), done: done}).HandleTimer(nil)
}

// HandleTimer ends some flows.
func (s *stopper) HandleTimer(*poll.Timer) {
	w := s.worker
	now := poll.Nanotime()
	room := min(w.server.options.Table.Room(), stopShare)
	if room > 0 {
		s.since = now
	} else if now-s.since > roomPatience {
		room = stopShare
	}
	for ; s.at < len(w.flows) && room > 0; s.at++ {
		f := w.flows[s.at]
		if f == nil {
			continue
		}
		room--
		if !f.ended {
			if !f.isUDP() {
				f.resetBoth()
			}
			f.end(conntrack.Shutdown, now)
		}
		f.drop()
	}
	w.endRound()
	w.shard.Flush()
	if s.at < len(w.flows) {
		pause := stopPause
		if w.server.options.Table.Room() >= stopShare {
			pause = 0
		}
		w.loop.Schedule(&s.timer, now+pause, s)
		return
	}
	w.expire(math.MaxInt64)
	w.endRound()
	w.loop.Cancel(&w.tick)
	w.loop.Cancel(&w.beat)
	s.done()
}
