package relay

import (
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// A link has one timer, for its nearest deadline: setting the endpoint's liveness
// options, the idle timeout, or checking for a dead peer.
//
// The kernel's keepalive probes detect a dead peer only while all bytes to it are
// acknowledged. TCP_USER_TIMEOUT does not help: since Linux 5.11, it also ends
// connections whose peer answers but does not read. So the relay checks a link
// periodically while it moves, and then for as long as bytes are unacknowledged. An
// idle link costs nothing.

// unansweredLimit is how many retransmissions or window probes a dead peer leaves
// unanswered. More than one, because one may be lost.
const unansweredLimit = 3

// HandleTimer implements poll.TimerHandler.
func (l *Link) HandleTimer(*poll.Timer) {
	w := l.worker
	if l.facts&matured == 0 {
		l.facts |= matured
		if c := &w.config; !c.EndpointLiveness.IsZero() {
			w.stats.Others++
			w.kernel.setLiveness(int(l.sides[endpoint].fd), c.EndpointLiveness)
		}
	}
	if quiet := l.patience(); quiet > 0 && w.loop.Now() >= l.moved+quiet {
		l.finish(Idle)
		return
	}
	next := int64(0)
	if w.config.GoneAfter > 0 {
		next = l.look()
	}
	if l.facts&running != 0 {
		l.setTimer(next)
	}
}

// setTimer sets the timer. look is the time until the next check; 0: none. Movement
// does not touch the timer. If it fires too early for the last movement, it is set
// again for the remaining time.
func (l *Link) setTimer(look int64) {
	w := l.worker
	at := int64(0)
	if quiet := l.patience(); quiet > 0 {
		at = max(l.moved+quiet, 1) // a moved link may have been quiet since before the clock's zero
	}
	l.facts |= watched // without checks, movement need not set the timer
	if look > 0 {
		if next := w.loop.Now() + look; at == 0 || next < at {
			at = next
		}
	} else if w.config.GoneAfter > 0 {
		l.facts &^= watched
	}
	if at > 0 {
		w.loop.Schedule(&l.timer, at, l)
	}
}

// lookInterval returns the time until the next check of a link that moved.
func (l *Link) lookInterval() int64 {
	c := &l.worker.config
	if l.facts&matured == 0 && (c.GoneAfter > 0 || !c.EndpointLiveness.IsZero()) {
		return int64(c.LivenessAfter)
	}
	return int64(c.GoneAfter) / 2
}

// look checks for a dead peer. It ends the link if a side has sent no
// acknowledgement for Config.GoneAfter despite several retransmissions. It returns
// the time until the next check; 0: none before the next movement.
func (l *Link) look() (next int64) {
	w := l.worker
	limit := int64(w.config.GoneAfter)
	if w.loop.Now()-l.moved < limit/2 {
		next = limit / 2
	}
	var unsent [2]bool
	for i := range l.sides {
		w.stats.Others++
		d, e := w.kernel.delivery(int(l.sides[i].fd))
		unsent[i] = e != 0 || d.Pending
		if e != 0 || !d.Pending {
			continue
		}
		silence := int64(d.Silence)
		if silence >= limit && d.Unanswered >= unansweredLimit {
			l.broken(i, sys.ETIMEDOUT)
			return 0
		}
		// Check again when the limit is reached, but not continuously after that.
		again := max(limit-silence, limit/6)
		if next == 0 || again < next {
			next = again
		}
	}
	for i := range l.sides {
		if l.review(i, unsent[1-i]) && next == 0 {
			next = limit / 2
		}
	}
	return next
}

// patience returns how long the link may be quiet; 0: for ever.
func (l *Link) patience() int64 {
	c := &l.worker.config
	if p, ok := l.owner.(Patient); ok {
		return int64(p.QuietFor(l.facts&halfClosed != 0, c.IdleTimeout, c.HalfClosedTimeout))
	}
	if l.facts&halfClosed != 0 {
		return int64(c.HalfClosedTimeout)
	}
	return int64(c.IdleTimeout)
}
