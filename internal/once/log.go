package once

import "github.com/rs/zerolog"

// Log logs each problem of an object once. It is not safe for concurrent use.
type Log struct {
	Logger zerolog.Logger
	said   map[string]struct{}
}

// Warn logs a problem of an object, unless it was logged before; nil is none.
func (l *Log) Warn(object string, problem error) {
	if problem != nil && l.first(object+": "+problem.Error()) {
		l.Logger.Warn().Str("object", object).Msg(problem.Error())
	}
}

// first reports whether a text is new, and remembers it. When the set is full, it
// is cleared: repeated lines are better than unbounded memory, because texts
// contain strings from tenants.
func (l *Log) first(text string) bool {
	if _, was := l.said[text]; was {
		return false
	}
	if l.said == nil || len(l.said) == Most {
		l.said = make(map[string]struct{})
	}
	l.said[text] = struct{}{}
	return true
}
