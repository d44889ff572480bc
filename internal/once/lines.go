package once

import "time"

// PerMinute bounds the log lines about one subject in a minute.
const PerMinute = 100

// Lines limits the log lines about each of many subjects, so that a subject that
// changes often does not flood the log. The zero value is ready for use. It is not
// safe for concurrent use.
type Lines struct {
	began time.Time      // start of the current minute
	said  map[string]int // by subject; at most Most
}

// Take reports whether another line about a subject is allowed in this minute, and
// whether it is the last one.
func (l *Lines) Take(subject string, now time.Time) (last, ok bool) {
	if l.said == nil || now.Sub(l.began) >= time.Minute || len(l.said) == Most {
		l.began, l.said = now, make(map[string]int)
	}
	if l.said[subject] == PerMinute {
		return false, false
	}
	l.said[subject]++
	return l.said[subject] == PerMinute, true
}
