package relay

import (
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// A link has one timer, for its nearest deadline: the endpoint's liveness options,
// the idle timeout, and looks for a peer that is gone.
//
// The kernel's keepalive probes find a peer that is gone while everything that was
// written to it is acknowledged. They do not run otherwise, and TCP_USER_TIMEOUT
// does not replace them: since Linux 5.11 it also ends connections whose peer
// answers, but has not read for so long. So a link that moved is looked at now and
// then, and one that is quiet only as long as something is unacknowledged. A link
// that is idle costs nothing.

// unansweredLimit is how many retransmissions or window probes a peer leaves
// unanswered before it is given up: one may be lost.
const unansweredLimit = 3

// HandleTimer is called by the loop.
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

// setTimer sets the timer. look is how long it is until the next look; 0: none.
// Movement does not touch the timer: when it fires too early for the link's last
// movement, it is set again for the rest.
func (l *Link) setTimer(look int64) {
	w := l.worker
	at := int64(0)
	if quiet := l.patience(); quiet > 0 {
		at = l.moved + quiet
	}
	l.facts |= watched // without looks, movement has nothing to set
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

// lookInterval is how long it is until a link that moved is looked at.
func (l *Link) lookInterval() int64 {
	c := &l.worker.config
	if l.facts&matured == 0 && (c.GoneAfter > 0 || !c.EndpointLiveness.IsZero()) {
		return int64(c.LivenessAfter)
	}
	return int64(c.GoneAfter) / 2
}

// look ends the link if a side is gone: it has sent no acknowledgement for
// Config.GoneAfter, though something was sent to it again and again. It returns
// how long it is until the next look; 0: none before something moves.
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
		// At the moment when it may be over, and not all the time after that.
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

// patience is how long the link may be quiet; 0: for ever.
func (l *Link) patience() int64 {
	if l.facts&halfClosed != 0 {
		return int64(l.worker.config.HalfClosedTimeout)
	}
	return int64(l.worker.config.IdleTimeout)
}
