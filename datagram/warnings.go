package datagram

import (
	"sync"
	"time"
)

const (
	// warnEvery is the minimum time between two warnings of one cause, in ns.
	warnEvery = int64(time.Minute)
	// mostCauses bounds the remembered causes.
	mostCauses = 1024
)

// warnings limits repeated warnings of the loops. The zero value is ready for use.
// It is safe for concurrent use.
type warnings struct {
	mu     sync.Mutex
	causes map[string]*warned // guarded by mu
}

// warned is the state of one cause.
type warned struct {
	last  int64 // time of the last warning
	times int   // suppressed warnings since then
}

// due reports whether to log a warning now, and how many were suppressed since the
// last one.
func (w *warnings) due(cause string, now int64) (unsaid int, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.causes[cause]
	switch {
	case c == nil:
		if w.causes == nil || len(w.causes) == mostCauses {
			w.causes = make(map[string]*warned)
		}
		w.causes[cause] = &warned{last: now}
		return 0, true
	case now-c.last < warnEvery:
		c.times++
		return 0, false
	}
	unsaid = c.times
	c.last, c.times = now, 0
	return unsaid, true
}
