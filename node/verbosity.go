package node

import (
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// LevelOf returns what a verbosity shows.
func LevelOf(verbosity int) zerolog.Level {
	switch {
	case verbosity >= 6:
		return zerolog.TraceLevel
	case verbosity >= 4:
		return zerolog.DebugLevel
	}
	return zerolog.InfoLevel
}

// logVerbosity is the verbosity of the program's log, which may be changed for a
// time. It is safe for concurrent use.
type logVerbosity struct {
	usual int

	mu    sync.Mutex
	v     int
	until time.Time // zero: for ever
	timer *time.Timer
}

func newLogVerbosity(v int) *logVerbosity { return &logVerbosity{usual: v, v: v} }

// set changes the verbosity for a time.
func (l *logVerbosity) set(v int, duration time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer != nil {
		l.timer.Stop()
	}
	l.v, l.until = v, time.Now().Add(duration)
	zerolog.SetGlobalLevel(LevelOf(v))
	var timer *time.Timer
	timer = time.AfterFunc(duration, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.timer == timer { // else it was set again meanwhile
			l.v, l.until, l.timer = l.usual, time.Time{}, nil
			zerolog.SetGlobalLevel(LevelOf(l.usual))
		}
	})
	l.timer = timer
}

// setUsual changes the verbosity that holds while no other one is set for a time.
func (l *logVerbosity) setUsual(v int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.usual = v
	if l.timer == nil {
		l.v = v
		zerolog.SetGlobalLevel(LevelOf(v))
	}
}

// state returns the verbosity, and when it ends; zero if it does not.
func (l *logVerbosity) state() (v int, until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.v, l.until
}
