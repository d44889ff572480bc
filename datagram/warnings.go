package datagram

import (
	"sync"
	"time"
)

const (
	// warnEvery is the least time between two warnings of one cause, in ns.
	warnEvery = int64(time.Minute)
	// mostCauses bounds the causes that are remembered.
	mostCauses = 1024
)

// warnings keeps what loops have to say again and again from filling the log.
// The zero value is ready; it may be used from any goroutine.
type warnings struct {
	mu     sync.Mutex
	causes map[string]*warned // guarded by mu
}

// warned is what is known of one cause.
type warned struct {
	last  int64 // when it was said
	times int   // that it was not said since
}

// due tells whether to say something now, and how many times it was left unsaid
// since the last time.
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
