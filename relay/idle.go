package relay

import "time"

// Idle returns for how long nothing has moved on a link that neither side has closed, if
// nothing is under way: no byte waits to be read, to be written, or to be acknowledged.
// Otherwise it returns 0. It takes up to four system calls, or none if the link moved less
// than atLeast ago.
func (l *Link) Idle(atLeast time.Duration) time.Duration {
	w := l.worker
	if l.facts&(running|closing) != running {
		return 0
	}
	quiet := time.Duration(w.loop.Now() - l.moved)
	if quiet < atLeast {
		return 0
	}
	for i := range l.sides {
		s := &l.sides[i]
		if s.held != nil || s.inPipe > 0 || s.state&blocked != 0 {
			return 0
		}
		w.stats.Others += 2
		if n, e := w.kernel.unread(int(s.fd)); n > 0 || e != 0 {
			return 0
		}
		if d, e := w.kernel.delivery(int(s.fd)); d.Pending || e != 0 {
			return 0
		}
	}
	return quiet
}

// Release ends a link that is idle, in the same turn as Idle said so, by a FIN to each side.
// What a side sends at the same moment is answered with a reset. It does nothing if the link
// is not running.
func (w *Worker) Release(l *Link) { w.Abort(l, Released) }
