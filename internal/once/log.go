package once

import "github.com/rs/zerolog"

// Log logs each problem of an object once. Like Texts it is not safe for concurrent
// use.
type Log struct {
	Logger zerolog.Logger
	texts  Texts
}

// Warn logs a problem of an object, unless it was logged before; nil is none.
func (l *Log) Warn(object string, problem error) {
	if problem != nil && l.texts.First(object+": "+problem.Error()) {
		l.Logger.Warn().Str("object", object).Msg(problem.Error())
	}
}
